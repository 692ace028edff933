"""Forward and backward are judged independently: what can't be compiled in one direction is left out there only."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.ops import BasicOperation, FusedOperation, FusionRule, register_fusion
from lowp.ops.plan import candidates, make_plan
from tests.ops.graphs import Graphs, lowp_ops

REASON = "needs a toy that nobody has built"


@dataclass
class ToyScaleArgs:
    input: Tensor
    weight: Tensor


@dataclass
class ToyScaleBackwardArgs:
    grad_output: Tensor
    input: Tensor
    weight: Tensor


class ToyScale(BasicOperation):
    """y = x * w"""

    fwd_args_type = ToyScaleArgs
    bwd_args_type = ToyScaleBackwardArgs
    parameter_names = ("weight",)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def pack_forward_args(self, basic_op_ctxs, input_, **_):
        return ToyScaleArgs(input_, self.weight)

    @classmethod
    def forward_compute(cls, args, *, in_custom_op=False):
        return args.input * args.weight, ((),), ()

    def forward_setup_context(self, basic_op_ctxs, args, aux):
        basic_op_ctxs[0].save_for_backward(args.input, args.weight)

    def pack_backward_args(self, basic_op_ctxs, grad_output, **_):
        return ToyScaleBackwardArgs(grad_output, *basic_op_ctxs[0].saved_tensors)

    @classmethod
    def backward_compute(cls, args, *, in_custom_op=False):
        grad_weight = (args.grad_output * args.input).flatten(0, -2).sum(0)
        return args.grad_output * args.weight, ((grad_weight,),), ((),)


class ToyNegate(BasicOperation):
    """y = -x"""

    fwd_args_type = ToyScaleArgs
    bwd_args_type = ToyScaleArgs

    def pack_forward_args(self, basic_op_ctxs, input_, **_):
        return ToyScaleArgs(input_, input_)

    @classmethod
    def forward_compute(cls, args, *, in_custom_op=False):
        return -args.input, ((),), ()

    def pack_backward_args(self, basic_op_ctxs, grad_output, **_):
        return ToyScaleArgs(grad_output, grad_output)

    @classmethod
    def backward_compute(cls, args, *, in_custom_op=False):
        return -args.input, ((),), ((),)


class _ToyScaleNegate(FusedOperation):
    """y = -(x * w), in either direction; `eager_runs` notes what runs directly."""

    fuses = (ToyScale, ToyNegate)

    def pack_forward_args(self, basic_op_ctxs, input_, **_):
        return ToyScaleArgs(input_, self.basic_ops[0].weight)

    @classmethod
    def forward_compute(cls, args, *, in_custom_op=False):
        return -(args.input * args.weight), ((), ()), ()

    def forward_setup_context(self, basic_op_ctxs, args, aux):
        basic_op_ctxs[0].save_for_backward(args.input, args.weight)

    def pack_backward_args(self, basic_op_ctxs, grad_output, **_):
        return ToyScaleBackwardArgs(grad_output, *basic_op_ctxs[0].saved_tensors)

    @classmethod
    def backward_compute(cls, args, *, in_custom_op=False):
        grad_input, parameters, inputs = ToyScale.backward_compute(args, in_custom_op=in_custom_op)
        return -grad_input, ((-parameters[0][0],), ()), (*inputs, ())


class ToyForwardScaleNegate(_ToyScaleNegate):
    fwd_args_type = ToyScaleArgs


class ToyBackwardScaleNegate(_ToyScaleNegate):
    bwd_args_type = ToyScaleBackwardArgs


class ToyForwardEager(ToyForwardScaleNegate):
    def compile_unsupported_reason(self, direction):
        return REASON if direction == "forward" else None


class ToyBackwardEager(ToyBackwardScaleNegate):
    def compile_unsupported_reason(self, direction):
        return REASON if direction == "backward" else None


UNFUSED = ("ToyScale", "ToyNegate")
CASES = {
    "both compile": (ToyForwardScaleNegate, ToyBackwardScaleNegate, True, True),
    "backward doesn't": (ToyForwardScaleNegate, ToyBackwardEager, True, False),
    "forward doesn't": (ToyForwardEager, ToyBackwardScaleNegate, False, True),
    "neither does": (ToyForwardEager, ToyBackwardEager, False, False),
}


def _step(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    y = call(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("fusion_rules")
def test_a_fusion_is_left_out_in_the_direction_that_does_not_compile(case):
    forward, backward, forward_fused, backward_fused = CASES[case]
    register_fusion(FusionRule("forward", forward))
    register_fusion(FusionRule("backward", backward))
    scale = ToyScale(4)
    fused = lowp.ops.Sequential(scale, ToyNegate())
    unfused = nn.Sequential(scale, fused[1])
    assert fused.plan.splitlines()[1:] == [
        f"forward  {forward.__name__}[0..1]",
        f"backward {backward.__name__}[0..1]",
    ]

    graphs, x = Graphs(), torch.randn(3, 4, requires_grad=True)
    results = [_step(call, fused, x) for call in (graphs.compile(fused), fused, unfused)]
    for tensors in zip(*results, strict=True):
        assert torch.equal(tensors[0], tensors[1])
        torch.testing.assert_close(tensors[0], tensors[2])
    assert lowp_ops(graphs.forward[0]) == (
        ["ToyForwardScaleNegate_forward"] if forward_fused else [f"{name}_forward" for name in UNFUSED]
    )
    assert lowp_ops(graphs.backward[0]) == (
        ["ToyBackwardScaleNegate_backward"] if backward_fused else [f"{name}_backward" for name in UNFUSED[::-1]]
    )


@pytest.mark.usefixtures("fusion_rules")
def test_the_plan_of_a_trace_says_why_a_fusion_is_left_out():
    register_fusion(FusionRule("backward", ToyBackwardEager))
    ops = (ToyScale(4), ToyNegate())
    plan = make_plan(ops, candidates(ops), (torch.float32, torch.float32), ((), ()), None, None, compiling=True)
    assert plan.declined == (f"backward without ToyBackwardEager[0]: {REASON}",)


# ---- a basic operation that can't be compiled


class ToyEagerForward(ToyScale):
    def compile_unsupported_reason(self, direction):
        return REASON if direction == "forward" else None


class ToyEagerBackward(ToyScale):
    def compile_unsupported_reason(self, direction):
        return REASON if direction == "backward" else None


ISLANDS: dict[str, Any] = {
    "forward": lambda: ToyEagerForward(4),
    "backward": lambda: ToyEagerBackward(4),
}


@pytest.mark.parametrize("direction", ISLANDS)
@pytest.mark.parametrize("pipeline", [False, True])
def test_fullgraph_gives_the_reason(direction, pipeline):
    op = ISLANDS[direction]()
    call = lowp.ops.Sequential(ToyScale(4), op, ToyNegate()) if pipeline else op
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"{type(op).__name__} {direction}: {REASON}"):
        torch.compile(call, fullgraph=True, backend="eager")(torch.randn(3, 4, requires_grad=True))


@pytest.mark.parametrize("direction", ISLANDS)
@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo reads it
def test_without_fullgraph_it_runs_as_an_eager_island(direction, pipeline, grad, autocast):
    op = ISLANDS[direction]()
    call = lowp.ops.Sequential(ToyScale(4), op, ToyNegate()) if pipeline else op
    x = torch.randn(3, 4, requires_grad=grad)

    def model(x: Tensor) -> Tensor:
        return call(x * 2) + 1

    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for _ in range(2):
            if grad:
                results = [_step(function, call, x) for function in (compiled, model)]
            else:
                results = [[function(x)] for function in (compiled, model)]
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    if not autocast:  # switching it off around the island makes graphs of its own
        assert graphs.frames == 2  # before and after the island


@pytest.mark.parametrize("direction", ISLANDS)
def test_it_has_no_effect_in_eager_mode(direction):
    op, x = ISLANDS[direction](), torch.randn(3, 4, requires_grad=True)
    y, dx, dw = _step(op, op, x)
    torch.testing.assert_close(y, x * op.weight)
    torch.testing.assert_close(dx, 2 * y * op.weight)
    torch.testing.assert_close(dw, (2 * y * x).sum(0))


def test_dynamo_is_imported_by_traced_code_only():
    code = "import sys, lowp; assert 'torch._dynamo' not in sys.modules and 'lowp.ops.traced' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
