"""`register_custom_op` by itself: results, mutation, values, sizes, and when a graph is compiled again."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from lowp.dynamo.custom_op import register_custom_op
from lowp.dynamo.schema import Mutable, Sizes
from lowp.quantization import Quantized
from lowp.recipe import Float8CurrentScaling
from lowp.registration import REGISTRY
from tests.ops.graphs import Graphs, lowp_ops

BACKENDS = ["aot_eager", "inductor"]


def equal(a: Any, b: Any) -> bool:
    """Equal results, Nones and structure included."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a is b


def compile_(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


# ---- results


@dataclass
class ToyArgs:
    x: Tensor
    wanted: tuple[bool, ...]
    scale: float = 2.0


def _results(args: ToyArgs) -> tuple[Any, ...]:
    """A tensor, a matrix as a tensor or quantized, a tensor or None, and a list."""
    first, quantized, third, *more = args.wanted
    y = args.x * args.scale
    scale = args.x.new_ones(())
    matrix = Quantized(y.clone(), scale, None, None) if quantized else y.clone()
    return y if first else None, matrix, y.sum() if third else None, [y + index for index in range(sum(more))]


toy_results = register_custom_op(
    "toy_results", ToyArgs, _results, _results, ("tensor", "tensor_or_quantized", "tensor", "list")
)


@pytest.mark.parametrize(
    "wanted", [(True, False, True, True, True), (False, True, False), (True, True, False, True), (False, False, True)]
)
def test_results_of_every_kind(wanted):
    x = torch.randn(3, 4)
    expected = _results(ToyArgs(x, wanted))
    expected = (*expected[:-1], tuple(expected[-1]))
    assert equal(toy_results(ToyArgs(x, wanted)), expected)
    assert equal(compile_(lambda x: toy_results(ToyArgs(x, wanted)))(x), expected)


def _register(name: str, compute: Any, results: tuple[str, ...] = ("tensor",), args: type = ToyArgs) -> Any:
    return register_custom_op(name, args, compute, compute, results)


def test_one_result_and_none_at_all():
    one = _register("toy_one", lambda args: (args.x + 1,))
    none = _register("toy_none", lambda args: (), ())
    nothing = _register("toy_nothing", lambda args: (None,))
    listed = _register("toy_listed", lambda args: ([args.x + 1, args.x + 2],), ("list",))
    x = torch.randn(3)
    for call in (lambda f: f, compile_):
        assert equal(call(lambda x: one(ToyArgs(x, ())))(x), (x + 1,))
        assert equal(call(lambda x: (x + 1, nothing(ToyArgs(x, ()))))(x)[1], (None,))
        assert equal(call(lambda x: listed(ToyArgs(x, ())))(x), ((x + 1, x + 2),))
    assert none(ToyArgs(x, ())) == ()


def test_a_tensor_that_comes_twice_is_copied():
    twice = _register("toy_twice", lambda args: ((y := args.x + 1), y, [y, y]), ("tensor", "tensor", "list"))
    x = torch.randn(3)
    for call in (lambda f: f, compile_):
        a, b, (c, d) = call(lambda x: twice(ToyArgs(x, ())))(x)
        assert len({t.data_ptr() for t in (a, b, c, d)}) == 4
        assert all(torch.equal(t, x + 1) for t in (a, b, c, d))


def test_an_argument_is_not_a_result():
    returns = _register("toy_returns_argument", lambda args: (args.x,))
    lists = _register("toy_lists_argument", lambda args: ([args.x],), ("list",))
    text = r"toy_\w+_argument: a result can't be one of the arguments\. Return None for it, or a copy\."
    for op in (returns, lists):
        with pytest.raises(RuntimeError, match=text):
            op(ToyArgs(torch.ones(1), ()))
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=text):
            compile_(lambda x, op=op: op(ToyArgs(x, ())))(torch.ones(1))


def test_a_wrong_number_of_results():
    op = _register("toy_too_many", lambda args: (args.x + 1, args.x + 2))
    with pytest.raises(RuntimeError, match=r"^toy_too_many: returned 2 results where 1 were declared\.$"):
        op(ToyArgs(torch.ones(1), ()))


@dataclass
class ToyMutableArgs:
    x: Tensor
    acc: Mutable
    other: Mutable
    sizes: Sizes


@pytest.mark.parametrize(
    ("results", "position", "args"),
    [
        (("tensors",), 0, ToyArgs),
        (("tensor", "quantized"), 1, ToyArgs),
        (("list", "tensor"), 0, ToyArgs),
        (("tensor", "list"), 1, ToyMutableArgs),
    ],
)
def test_layouts_that_cannot_cross(results, position, args):
    with pytest.raises(TypeError, match=rf"^toy_layout: result {position} can't be '\w+'\. Results are "):
        _register("toy_layout", lambda args: (), results, args)
    assert "toy_layout" not in REGISTRY


# ---- mutation


def _accumulate(args: ToyMutableArgs) -> tuple[Tensor, Tensor | None]:
    """Adds x to both accumulators; returns 2 x, and the sum where there is no accumulator."""
    for acc in (args.acc, args.other):
        if acc is not None:
            acc.add_(args.x.reshape(args.sizes))
    absent = args.acc is None and args.other is None
    return args.x * 2, args.x.reshape(args.sizes) if absent and args.sizes != args.x.shape else None


def _accumulate_fake(args: ToyMutableArgs) -> tuple[Tensor, Tensor | None]:
    absent = args.acc is None and args.other is None
    return torch.empty_like(args.x), args.x.new_empty(args.sizes) if absent and args.sizes != args.x.shape else None


toy_accumulate = register_custom_op(
    "toy_accumulate", ToyMutableArgs, _accumulate, _accumulate_fake, ("tensor", "tensor")
)


def _accumulated(x: Tensor, acc: Tensor | None, other: Tensor | None) -> tuple[Any, ...]:
    first = toy_accumulate(ToyMutableArgs(x, acc, other, tuple(x.shape)))
    second = toy_accumulate(ToyMutableArgs(x + 1, acc, other, tuple(x.shape)))
    return first, second


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("present", [(True, True), (True, False), (False, True), (False, False)])
def test_mutable_arguments(present, backend):
    x = torch.randn(2, 3)
    results = []
    for call in (_accumulated, compile_(_accumulated, backend=backend)):
        accs = [torch.ones(2, 3) if there else None for there in present]
        pointers = [acc is not None and acc.data_ptr() for acc in accs]
        results.append((call(x, *accs), *accs))
        assert pointers == [acc is not None and acc.data_ptr() for acc in accs]
    assert equal(*results)
    for acc in results[0][1:]:
        assert acc is None or torch.allclose(acc, 2 + 2 * x)


def test_the_plain_operator_is_used_where_nothing_is_mutated():
    acc = torch.zeros(2)
    for accs, name in (((acc, None), "toy_accumulate_inplace"), ((None, None), "toy_accumulate")):
        graphs = Graphs()
        graphs.compile(lambda x, accs=accs: _accumulated(x, *accs))(torch.ones(2))
        assert lowp_ops(graphs.inference[0]) == [name] * 2
    assert not REGISTRY["toy_accumulate"].overload._schema.is_mutable
    assert REGISTRY["toy_accumulate_inplace"].overload._schema.is_mutable


def test_none_comes_back_from_a_mutating_operator():
    x, acc = torch.ones(2), torch.zeros(2)
    for call in (_accumulated, compile_(_accumulated)):
        (_, first), (_, second) = call(x, acc, None)
        assert first is None
        assert second is None


def test_a_mutating_operator_returns_no_bool():
    op = _register("toy_mutating_bool", lambda args: (args.acc.add_(args.x) > 0,), ("tensor",), ToyMutableArgs)
    with pytest.raises(RuntimeError, match=r"^toy_mutating_bool_inplace: .* can't return bool tensors\.$"):
        op(ToyMutableArgs(torch.ones(1), torch.ones(1), None, ()))


@dataclass
class ToyMode:
    mode: Tensor
    acc: Mutable


def test_a_mutating_operator_has_no_argument_called_mode():
    with pytest.raises(ValueError, match=r"^lowp::toy_mode_inplace: .* need other names, got \['mode'\]"):
        _register("toy_mode", lambda args: (), (), ToyMode)


# ---- sizes


@dataclass
class ToySizesArgs:
    x: Tensor
    sizes: Sizes | None
    factor: float


def _reshaped(args: ToySizesArgs) -> tuple[Tensor]:
    return ((args.x * args.factor).reshape(args.x.shape if args.sizes is None else args.sizes),)


def _reshaped_fake(args: ToySizesArgs) -> tuple[Tensor]:
    return (args.x.new_empty(args.x.shape if args.sizes is None else args.sizes),)


toy_reshaped = register_custom_op("toy_reshaped", ToySizesArgs, _reshaped, _reshaped_fake, ("tensor",))


def _flat(x: Tensor) -> Tensor:
    return toy_reshaped(ToySizesArgs(x, (x.shape[0] * x.shape[1], 1), 3.0))[0]


@pytest.mark.parametrize("mark", [False, True])
def test_one_graph_for_all_sizes_from_two_up(mark):
    graphs = Graphs()
    compiled = graphs.compile(_flat, dynamic=None if mark else True)
    for rows, frames in ((2, 1), (3, 1), (17, 1), (128, 1), (1, 2), (0, 3), (5, 3)):
        x = torch.randn(rows, 4)
        if mark and rows > 1:
            torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), (x * 3).reshape(-1, 1))
        assert graphs.frames == frames
    (node,) = (node for node in graphs.inference[0].graph.nodes if "toy_reshaped" in str(node.target))
    _, sizes, bundle = node.args
    assert isinstance(sizes[0], torch.fx.Node)
    assert bundle == '{"dict":{"factor":3.0}}'


def test_sizes_may_be_absent():
    x = torch.randn(2, 3)
    for call in (lambda f: f, compile_):
        assert torch.equal(call(lambda x: toy_reshaped(ToySizesArgs(x, None, 1.0))[0])(x), x)


# ---- values


class ToyActivation(enum.Enum):
    DOUBLE = 2.0
    HALVE = 0.5


@dataclass
class ToyValueArgs:
    x: Tensor
    params: dict[str, float]
    activation: ToyActivation
    dtype: torch.dtype
    power: int
    recipe: Float8CurrentScaling | None


def _valued(args: ToyValueArgs) -> tuple[Tensor]:
    epsilon = 0.0 if args.recipe is None else args.recipe.amax_epsilon
    y = args.x * args.activation.value + args.params.get("offset", 0.0) + epsilon
    return ((y**args.power).to(args.dtype),)


toy_valued = register_custom_op("toy_valued", ToyValueArgs, _valued, _valued, ("tensor",))


class ToyModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Any] = {
            "params": {"offset": 1.0, "unused": 7.0},
            "activation": ToyActivation.DOUBLE,
            "dtype": torch.float32,
            "power": 1,
            "recipe": None,
        }

    def forward(self, x: Tensor) -> Tensor:
        return toy_valued(ToyValueArgs(x, **self.values))[0]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("params", ({"offset": 2.0, "unused": 7.0}, {"offset": 2.5, "unused": 7.0}, {})),
        ("activation", (ToyActivation.HALVE,)),
        ("dtype", (torch.bfloat16, torch.float64)),
        ("power", (2, 3)),
        ("recipe", (Float8CurrentScaling(amax_epsilon=0.5), Float8CurrentScaling(amax_epsilon=0.25))),
    ],
)
def test_a_changed_value_compiles_again_and_an_earlier_one_returns_to_its_graph(name, changed, dynamic):
    module, graphs, x = ToyModule(), CompileCounter(), torch.randn(3)
    compiled = torch.compile(module, fullgraph=True, backend=graphs, dynamic=dynamic)
    values = (module.values[name], *changed)
    for value in (*values, *values[::-1], *values):
        module.values[name] = value
        assert equal(compiled(x), module(x))
    assert graphs.frame_count == len(values)


def test_new_inputs_of_the_same_shape_do_not_compile_again():
    module, graphs = ToyModule(), CompileCounter()
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    for _ in range(4):
        compiled(torch.randn(3))
    assert graphs.frame_count == 1


# ---- process groups


@dataclass
class ToyGroupArgs:
    x: Tensor
    group: dist.ProcessGroup | None


def _reduced(args: ToyGroupArgs) -> tuple[Tensor]:
    y = args.x * 1
    if args.group is not None:
        name = args.group.group_name
        y = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(y, "sum", name))
    return (y,)


toy_reduced = register_custom_op(
    "toy_reduced", ToyGroupArgs, _reduced, lambda args: (torch.empty_like(args.x),), ("tensor",)
)


def test_a_process_group_is_there_when_the_operator_runs(group):
    x = torch.randn(3)
    graphs = Graphs()
    compiled = graphs.compile(lambda x, group: toy_reduced(ToyGroupArgs(x, group))[0])
    assert torch.equal(toy_reduced(ToyGroupArgs(x, group))[0], x)
    for each in (group, None, group):
        assert torch.equal(compiled(x, each), x)
    assert graphs.frames == 2
    (node,) = (node for node in graphs.inference[0].graph.nodes if "toy_reduced" in str(node.target))
    assert node.args[1] == group.group_name


# ---- replays


@dataclass
class ReplayedArgs:
    x: Tensor
    sizes: Sizes
    total: Mutable = None
    factor: float = 2.0


_computed: list[ReplayedArgs] = []


def _replayed(args: ReplayedArgs) -> tuple[Any, ...]:
    """The product, reshaped, and its sum; or the sum added to a total."""
    _computed.append(args)
    y = (args.x * args.factor).reshape(args.sizes)
    if args.total is None:
        return y, y.sum()
    args.total.add_(y.sum())
    return y, None


toy_replayed = register_custom_op(
    "toy_replayed", ReplayedArgs, _replayed, _replayed, ("tensor", "tensor"), replays=True
)


def _count(*args: Any, times: int = 4) -> int:
    """How often arguments are computed on that differ in values only; each result is that of other values."""
    _computed.clear()
    for _ in range(times):
        x, sizes, total, factor = torch.randn(*args[0]), *args[1:]
        total = None if total is None else total.clone()
        before = None if total is None else total.clone()
        y, summed = toy_replayed(ReplayedArgs(x, sizes, total, factor))
        assert torch.equal(y, (x * factor).reshape(sizes))
        if total is None:
            assert torch.equal(summed, y.sum())
        else:
            assert summed is None
            assert torch.equal(total, before + y.sum())
    return len(_computed)


@pytest.mark.parametrize("total", [None, torch.ones(())])
def test_layouts_and_values_that_were_seen_twice_are_replayed(total):
    assert _count((4, 6), (6, 4), total, 2.0) == 2
    assert _count((4, 6), (6, 4), total, 2.0) == 0
    assert _count((4, 6), (3, 8), total, 2.0) == 2, "sizes are not tensors, but belong to the key"
    assert _count((4, 6), (6, 4), total, 3.0) == 2
    assert _count((2, 6), (6, 2), total, 2.0) == 2
    assert _count((4, 6), (6, 4), total, 2.0) == 0


def test_compiled_code_replays():
    call = compile_(lambda x: toy_replayed(ReplayedArgs(x, (9, 1), None, 5.0)))
    call(torch.randn(9))
    _computed.clear()
    for _ in range(3):
        x = torch.randn(9)
        assert torch.equal(call(x)[0], (x * 5.0).reshape(9, 1))
    assert len(_computed) == 1  # the second run on real tensors


class Seen(TorchDispatchMode):
    """Notes the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_modes_see_what_a_kernel_runs():
    x = torch.randn(5)
    arguments = (x, [5], None, '{"dict":{"factor":7.0}}')
    kernel = REGISTRY["toy_replayed"].ref
    for _ in range(3):
        kernel(*arguments)
    _computed.clear()
    with Seen() as seen:
        y, _ = kernel(*arguments)
    assert torch.equal(y, x * 7.0)
    assert len(_computed) == 1
    assert seen.names[0] == "mul"
