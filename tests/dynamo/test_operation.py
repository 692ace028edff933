"""Operations as registered operators: gradients of several outputs, mutation in backward, and `in_custom_op`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.dynamo.schema import Mutable, Sizes
from lowp.ops.basic.basic_linear import LinearForwardArgs
from lowp.ops.fused.forward_linear_bias import ForwardLinearBias
from lowp.registration import REGISTRY
from tests.library_ops import LIBRARY_OPS, OPERATIONS
from tests.ops.graphs import Graphs, lowp_ops

BACKENDS = ["aot_eager", "inductor"]


def compile_(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend)


def assert_close(actual: Tensor | None, expected: Tensor | None) -> None:
    """None and zeros count as equal."""
    if actual is None or expected is None:
        assert all(gradient is None or not gradient.any() for gradient in (actual, expected))
    else:
        torch.testing.assert_close(actual, expected)


# ---- two outputs: y = x * w, extra = x + w


@dataclass
class ToyForkForwardArgs:
    input: Tensor
    weight: Tensor


@dataclass
class ToyForkBackwardArgs:
    GRAD_OUTPUT_FIELDS: ClassVar[tuple[str, ...]] = ("grad_output", "grad_extra")

    grad_output: Tensor
    grad_extra: Tensor
    input: Tensor
    weight: Tensor
    input_requires_grad: bool
    weight_requires_grad: bool


def _sum_leading(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).sum(0)


class ToyFork(lowp.ops.BasicOperation):
    """Its extra output is differentiable too."""

    fwd_args_type = ToyForkForwardArgs
    bwd_args_type = ToyForkBackwardArgs
    parameter_names = ("weight",)
    num_extra_outputs = 1

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def pack_forward_args(self, basic_op_ctxs, input_, **_):
        return ToyForkForwardArgs(input_, self.weight)

    @classmethod
    def forward_compute(cls, args, *, in_custom_op=False):
        return args.input * args.weight, ((args.input + args.weight,),), ()

    def forward_setup_context(self, basic_op_ctxs, args, aux):
        basic_op_ctxs[0].save_for_backward(args.input, args.weight)

    def pack_backward_args(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        ctx = basic_op_ctxs[0]
        input_, weight = ctx.saved_tensors
        ((grad_extra,),) = basic_op_grad_extra_outputs
        return ToyForkBackwardArgs(
            grad_output, grad_extra, input_, weight, ctx.input_requires_grad, weight.requires_grad
        )

    @classmethod
    def backward_compute(cls, args, *, in_custom_op=False):
        grad_input = grad_weight = None
        for grad, d_input, d_weight in ((args.grad_output, args.weight, args.input), (args.grad_extra, 1.0, 1.0)):
            if grad is None:
                continue
            if args.input_requires_grad:
                grad_input = grad * d_input if grad_input is None else grad_input + grad * d_input
            if args.weight_requires_grad:
                part = _sum_leading(grad * d_weight)
                grad_weight = part if grad_weight is None else grad_weight + part
        return grad_input, ((grad_weight,),), ((),)


LOSSES: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
    "both": lambda y, extra: [y.square().sum() + extra.square().sum()],
    "both, extra first": lambda y, extra: [extra.square().sum() + y.square().sum()],
    "output": lambda y, extra: [y.square().sum()],
    "extra": lambda y, extra: [extra.square().sum()],
    "output, then extra": lambda y, extra: [y.square().sum(), extra.square().sum()],
    "extra, then output": lambda y, extra: [extra.square().sum(), y.square().sum()],
}


def _gradients(call: Callable[..., Any], op: nn.Module, x: Tensor, loss: str) -> list[Tensor | None]:
    """The outputs, and the gradients of each part of the loss by turns."""
    y, extra = call(x)
    results: list[Tensor | None] = [y, extra]
    for part in LOSSES[loss](y, extra):
        inputs = [tensor for tensor in (x, op.weight) if tensor.requires_grad]
        results.extend(torch.autograd.grad(part, inputs, retain_graph=True, allow_unused=True))
    return results


def _native(op: ToyFork) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    return lambda x: (x * op.weight, x + op.weight)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("requires", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("loss", LOSSES)
def test_either_outputs_gradient_may_be_absent(loss, requires, compiled):
    op, x = ToyFork(4), torch.randn(2, 3, 4)
    x.requires_grad_(requires[0])
    op.weight.requires_grad_(requires[1])
    call = compile_(op) if compiled else op
    for actual, expected in zip(_gradients(call, op, x, loss), _gradients(_native(op), op, x, loss), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("loss", ["output", "extra"])
def test_an_unused_output_inside_of_the_graph(loss):
    op, x = ToyFork(4), torch.randn(3, 4, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        y, extra = op(x)
        return (y if loss == "output" else extra).square().sum()

    gradients = [torch.autograd.grad(call(x), [x, op.weight]) for call in (step, compile_(step))]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_inductor_gives_both_gradients():
    op, x = ToyFork(4), torch.randn(3, 4, requires_grad=True)
    results = [_gradients(call, op, x, "both") for call in (op, compile_(op, "inductor"))]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_each_direction_is_one_node():
    op, graphs = ToyFork(4), Graphs()
    y, extra = graphs.compile(op)(torch.randn(3, 4, requires_grad=True))
    (y.sum() + extra.sum()).backward()
    assert [lowp_ops(graph) for graph in graphs.forward] == [["ToyFork_forward"]]
    assert [lowp_ops(graph) for graph in graphs.backward] == [["ToyFork_backward"]]


def test_the_gradient_fields_may_be_absent_in_the_schema():
    (fork,) = (str(REGISTRY["ToyFork_backward"].overload._schema),)
    assert "Tensor? grad_output, Tensor? grad_extra, Tensor input, Tensor weight, str bundle" in fork


# ---- extra inputs and outputs in a pipeline


@dataclass
class ToyJoinArgs:
    input: Tensor
    other: Tensor


@dataclass
class ToyJoinBackwardArgs:
    grad_output: Tensor


class ToyJoin(lowp.ops.BasicOperation):
    """y = x + 2 other."""

    fwd_args_type = ToyJoinArgs
    bwd_args_type = ToyJoinBackwardArgs
    num_extra_inputs = 1
    grad_input_is_grad_output = True

    def pack_forward_args(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        ((other,),) = basic_op_extra_inputs
        return ToyJoinArgs(input_, other)

    @classmethod
    def forward_compute(cls, args, *, in_custom_op=False):
        return args.input + 2 * args.other, ((),), ()

    def pack_backward_args(self, basic_op_ctxs, grad_output, **_):
        return ToyJoinBackwardArgs(grad_output)

    @classmethod
    def backward_compute(cls, args, *, in_custom_op=False):
        return None, ((),), ((2 * args.grad_output,),)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("loss", ["both", "output", "extra"])
def test_extra_inputs_and_outputs_in_a_pipeline(loss, compiled):
    fork, bias = ToyFork(4), lowp.ops.Bias(4)
    pipeline = lowp.ops.Sequential(fork, bias, ToyJoin())
    x, other = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    inputs = [x, other, fork.weight, bias.bias]

    def native(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return x * fork.weight + bias.bias + 2 * other, x + fork.weight

    results = []
    for call in (compile_(pipeline) if compiled else pipeline, native):
        y, extra = call(x, other)
        (part,) = LOSSES[loss](y, extra)
        results.append([y, extra, *torch.autograd.grad(part, inputs, allow_unused=True)])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


# ---- mutation in backward


@dataclass
class ToyCountForwardArgs:
    input: Tensor
    weight: Tensor


@dataclass
class ToyCountBackwardArgs:
    grad_output: Tensor
    input: Tensor
    weight: Tensor
    total: Mutable
    leading: Sizes


class ToyCount(lowp.ops.BasicOperation):
    """y = x * w; backward adds the weight's gradient to `total` where there is one, and returns it otherwise."""

    fwd_args_type = ToyCountForwardArgs
    bwd_args_type = ToyCountBackwardArgs
    parameter_names = ("weight",)

    def __init__(self, size: int, total: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.total = torch.zeros(size) if total else None

    def pack_forward_args(self, basic_op_ctxs, input_, **_):
        return ToyCountForwardArgs(input_, self.weight)

    @classmethod
    def forward_compute(cls, args, *, in_custom_op=False):
        return args.input * args.weight, ((),), ()

    def forward_setup_context(self, basic_op_ctxs, args, aux):
        basic_op_ctxs[0].save_for_backward(args.input, args.weight)
        basic_op_ctxs[0].leading = tuple(args.input.shape[:-1])
        basic_op_ctxs[0].total = self.total

    def pack_backward_args(self, basic_op_ctxs, grad_output, **_):
        ctx = basic_op_ctxs[0]
        return ToyCountBackwardArgs(grad_output, *ctx.saved_tensors, ctx.total, ctx.leading)

    @classmethod
    def backward_compute(cls, args, *, in_custom_op=False):
        grad_weight = _sum_leading(args.grad_output * args.input)
        if args.total is not None:
            args.total.add_(grad_weight)
            grad_weight = None
        return (args.grad_output * args.weight).reshape(*args.leading, -1), ((grad_weight,),), ((),)

    @classmethod
    def backward_compute_fake(cls, args):
        grad_weight = torch.empty_like(args.weight) if args.total is None else None
        return torch.empty_like(args.grad_output), ((grad_weight,),), ((),)


def _forward_forward_backward_backward(call: Callable[..., Any], op: ToyCount) -> list[Tensor]:
    torch.manual_seed(3)
    results: list[Tensor] = []
    for _ in range(2):
        x1, x2 = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(2))
        y1, y2 = call(x1), call(x2)
        for y, x in ((y1, x1), (y2, x2)):
            y.square().sum().backward()
            assert (op.weight.grad is None) == (op.total is not None)
            results.extend([y, x.grad, (op.weight.grad if op.total is None else op.total).clone()])
    return results


@pytest.mark.parametrize("total", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_forward_backward_backward(backend, total):
    results = []
    for call in (lambda op: op, lambda op: compile_(op, backend)):
        torch.manual_seed(0)
        op = ToyCount(4, total)
        results.append(_forward_forward_backward_backward(call(op), op))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("total", "name"), [(True, "ToyCount_backward_inplace"), (False, "ToyCount_backward")])
def test_the_plain_operator_is_chosen_where_there_is_nothing_to_mutate(total, name):
    graphs = Graphs()
    graphs.compile(ToyCount(4, total))(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert lowp_ops(graphs.backward[0]) == [name]
    assert ("auto_functionalized" in str(graphs.backward[0].graph)) == total


@pytest.mark.parametrize("total", [True, False])
def test_one_graph_for_all_sizes(total):
    op, graphs = ToyCount(4, total), Graphs()
    compiled = graphs.compile(op, dynamic=True)
    for rows in (2, 3, 9):
        x = torch.randn(rows, 3, 4, requires_grad=True)
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, op.weight.detach().expand(rows, 3, 4))
    assert graphs.frames == 1


# ---- in_custom_op


@dataclass
class ToyFlagArgs:
    input: Tensor


class ToyFlag(lowp.ops.BasicOperation):
    """Tells how it was called: y = x + 1 inside of the operator; backward likewise. `seen` notes real executions."""

    fwd_args_type = ToyFlagArgs
    bwd_args_type = ToyFlagArgs
    seen: ClassVar[list[tuple[str, bool]]] = []

    def pack_forward_args(self, basic_op_ctxs, input_, **_):
        return ToyFlagArgs(input_)

    @classmethod
    def forward_compute(cls, args, *, in_custom_op=False):
        if not torch.compiler.is_compiling():
            cls.seen.append(("forward", in_custom_op))
        return args.input + float(in_custom_op), ((),), ()

    @classmethod
    def forward_compute_fake(cls, args):
        return torch.empty_like(args.input), ((),), ()

    def pack_backward_args(self, basic_op_ctxs, grad_output, **_):
        return ToyFlagArgs(grad_output)

    @classmethod
    def backward_compute(cls, args, *, in_custom_op=False):
        if not torch.compiler.is_compiling():
            cls.seen.append(("backward", in_custom_op))
        return args.input + float(in_custom_op), ((),), ((),)

    @classmethod
    def backward_compute_fake(cls, args):
        return torch.empty_like(args.input), ((),), ((),)


def _flagged(call: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    x = torch.zeros(3, requires_grad=True)
    y = call(x)
    y.backward(torch.zeros(3))
    return y.detach(), x.grad


def test_it_is_false_on_direct_calls():
    ToyFlag.seen.clear()
    y, dx = _flagged(ToyFlag())
    assert not y.any()
    assert not dx.any()
    assert ToyFlag.seen == [("forward", False), ("backward", False)]


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_it_is_true_on_every_execution_of_the_operator(backend):
    compiled = compile_(ToyFlag(), backend)
    for _ in range(3):
        ToyFlag.seen.clear()
        y, dx = _flagged(compiled)
        assert (y == 1).all()
        assert (dx == 1).all()
        assert ToyFlag.seen == [("forward", True), ("backward", True)]
    ToyFlag.seen.clear()
    with torch.no_grad():
        assert (compiled(torch.zeros(3)) == 1).all()
    assert ToyFlag.seen == [("forward", True)]


def test_it_is_true_where_the_operator_is_called_in_eager_mode():
    ToyFlag.seen.clear()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            output, _, _ = ToyFlag.registered["forward"](ToyFlagArgs(torch.zeros(3)))
            assert (output == 1).all()
    assert ToyFlag.seen == [("forward", True)] * 2


def test_it_is_false_at_the_kernel_boundary():
    with lowp.compile_boundary("kernel"):
        y, dx = _flagged(compile_(ToyFlag()))
    assert not y.any()
    assert not dx.any()


@pytest.mark.parametrize("cls", OPERATIONS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_it_is_keyword_only_and_crosses_nowhere(cls, direction):
    flag = inspect.signature(getattr(cls, f"{direction}_compute")).parameters["in_custom_op"]
    assert flag.kind is inspect.Parameter.KEYWORD_ONLY
    assert flag.default is False
    assert list(inspect.signature(getattr(cls, f"{direction}_compute_fake")).parameters) == ["args"]
    args_type = getattr(cls, {"forward": "fwd_args_type", "backward": "bwd_args_type"}[direction])
    if args_type is not None:
        assert "in_custom_op" not in [field.name for field in dataclasses.fields(args_type)]


def test_it_is_in_no_schema():
    for name in LIBRARY_OPS:
        assert "in_custom_op" not in str(REGISTRY[name].overload._schema)


@pytest.mark.parametrize("flag", [True, False])
def test_a_fusion_forwards_it(flag, monkeypatch):
    seen = []

    def forward_compute(args: LinearForwardArgs, *, in_custom_op: bool = False) -> Any:
        seen.append(in_custom_op)
        return args.input, ((),), ()

    monkeypatch.setattr(lowp.ops.BasicLinear, "forward_compute", forward_compute)
    x = torch.ones(2, 2)
    args = LinearForwardArgs(x, x, None, None, None, False, torch.float32, None, None, False, False, False)
    ForwardLinearBias.forward_compute(args, in_custom_op=flag)
    assert seen == [flag]


# ---- what is refused when a class is defined


def test_a_compute_method_without_the_keyword_is_refused():
    text = r"^ToyForgetful\.{}_compute: must take the keyword-only argument in_custom_op=False\.$"

    with pytest.raises(TypeError, match=text.format("forward")):

        class ToyForgetful(lowp.ops.BasicOperation):
            fwd_args_type = ToyFlagArgs

            @classmethod
            def forward_compute(cls, args):
                return args.input + 1, ((),), ()

    with pytest.raises(TypeError, match=text.format("backward")):

        class ToyForgetful(lowp.ops.BasicOperation):
            bwd_args_type = ToyFlagArgs

            @classmethod
            def backward_compute(cls, args, in_custom_op=False):
                return args.input + 1, ((),), ((),)

    with pytest.raises(TypeError, match=text.format("forward")):

        class ToyForgetful(ToyFlag):
            @classmethod
            def forward_compute(cls, args, **kwargs):
                return super().forward_compute(args, **kwargs)


@pytest.mark.parametrize("fields", [("grad_output",), ("grad_output", "grad_extra", "input")])
def test_a_wrong_number_of_gradient_fields_is_refused(fields):
    @dataclass
    class ToyWrongArgs(ToyForkBackwardArgs):
        GRAD_OUTPUT_FIELDS = fields

    text = (
        r"^ToyWrongArgs: GRAD_OUTPUT_FIELDS must name one field for each output of ToyWrong \(2\), got \('grad_output"
    )
    with pytest.raises(TypeError, match=text):

        class ToyWrong(ToyFork):
            bwd_args_type = ToyWrongArgs


def test_unknown_gradient_fields_are_refused():
    @dataclass
    class ToyUnknownArgs(ToyForkBackwardArgs):
        GRAD_OUTPUT_FIELDS = ("grad_output", "grad_of_extra")

    text = r"^ToyUnknownArgs: GRAD_OUTPUT_FIELDS names \['grad_of_extra'\], not tensor fields of it\.$"
    with pytest.raises(TypeError, match=text):

        class ToyUnknown(ToyFork):
            bwd_args_type = ToyUnknownArgs


def test_two_operations_of_one_name_are_refused():
    text = r"each operator has its own name, got lowp::ToyFlag_forward again\. Rename the operation's class\.$"
    with pytest.raises(ValueError, match=text):
        type("ToyFlag", (ToyFlag,), {"fwd_args_type": ToyFlagArgs})


# ---- inheritance


class ToyFlagTwice(ToyFlag):
    """Overrides one direction."""

    @classmethod
    def backward_compute(cls, args, *, in_custom_op=False):
        grad_input, parameters, inputs = super().backward_compute(args, in_custom_op=in_custom_op)
        return 2 * grad_input, parameters, inputs


class ToyFlagRenamed(ToyFlag):
    """Overrides nothing."""


class ToyFlagInline(ToyFlag):
    """Is traced inline in backward."""

    bwd_args_type = None

    @classmethod
    def backward_compute(cls, args, *, in_custom_op=False):
        return args.input + 7.0, ((),), ((),)


@pytest.mark.parametrize(
    ("cls", "forward", "backward", "gradient"),
    [
        (ToyFlagTwice, ["ToyFlag_forward"], ["ToyFlagTwice_backward"], 2.0),
        (ToyFlagRenamed, ["ToyFlag_forward"], ["ToyFlag_backward"], 1.0),
        (ToyFlagInline, ["ToyFlag_forward"], [], 7.0),
    ],
)
def test_a_subclass_registers_what_it_overrides(cls, forward, backward, gradient):
    graphs = Graphs()
    y, dx = _flagged(graphs.compile(cls()))
    assert (y == 1).all()
    assert (dx == gradient).all()
    assert lowp_ops(graphs.forward[0]) == forward
    assert lowp_ops(graphs.backward[0]) == backward


class ToyFlagQuantizing(ToyFlag):
    """Changes the layout of the results only."""

    quantizes_output = True


def test_a_subclass_registers_its_own_layout():
    assert str(REGISTRY["ToyFlagQuantizing_forward"].overload._schema).endswith(
        "-> (Tensor?, Tensor?, Tensor?, Tensor?, Tensor?, Tensor[])"
    )
    graphs = Graphs()
    assert (graphs.compile(ToyFlagQuantizing())(torch.zeros(3)) == 1).all()
    assert lowp_ops(graphs.inference[0]) == ["ToyFlagQuantizing_forward"]
