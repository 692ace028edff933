"""BasicLinear and its pipelines on one and on two ranks give what float64 gives on one, bit for bit.

Shape legend: T = ranks, M = tokens, N = out features, K = in features of the whole layer.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import lowp
from lowp import ops
from lowp.distributed import reduce_sequence_parallel_grads
from lowp.recipe import Float8CurrentScaling, Recipe
from tests.distributed.exact import K, M, N, Problem, check_equal, problem
from tests.distributed.ranks import Ranks, alone, device, message, rank, world

RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "fp8": Float8CurrentScaling(),
    "fp8_backward_high_precision": Float8CurrentScaling(backward_override="high_precision"),
    "fp8_backward_dequantized": Float8CurrentScaling(backward_override="dequantized"),
}
BOUNDARIES = ["operation", "kernel"]
HOW = (None, *BOUNDARIES)
"""Eager, or compiled at this boundary."""


class Split:
    """Which part of each tensor a rank has; see the table in `lowp.distributed.shapes`."""

    def __init__(self, mode: str, sequence_parallel: bool, group: Any) -> None:
        self.column, self.sequence_parallel, self.group = mode == "column", sequence_parallel, group

    def part(self, whole: Tensor, axis: int) -> Tensor:
        """This rank's part along one axis."""
        return whole.tensor_split(self.group.size(), axis)[self.group.rank()]

    def input(self, x: Tensor) -> Tensor:
        if not self.column:
            return self.part(x, 1)
        return self.part(x, 0) if self.sequence_parallel else x

    def output(self, y: Tensor) -> Tensor:
        if self.column:
            return self.part(y, 1)
        return self.part(y, 0) if self.sequence_parallel else y

    def weight(self, w: Tensor) -> Tensor:
        return self.part(w, 0 if self.column else 1)

    def bias(self, b: Tensor) -> Tensor:
        return self.part(b, 0) if self.column else b


def parallel_linear(split: Split, whole: Problem, *, bias: bool, keep: bool, facade: bool, dtype: torch.dtype) -> Any:
    """A layer with this rank's part of the weights: `ops.Linear`, or operations in a Sequential."""
    mode = "column" if split.column else "row"
    options: dict[str, Any] = {"device": device(), "dtype": dtype}
    parallel = {
        "tensor_parallel_mode": mode,
        "tensor_parallel_group": split.group,
        "sequence_parallel": split.sequence_parallel,
        "keep_gathered_input": keep,
    }
    if facade:
        layer: Any = ops.Linear(whole.w.shape[1], N, bias, **options, **parallel)
    else:
        layer = ops.Sequential(ops.BasicLinear(whole.w.shape[1], N, **options, **parallel))
        if bias:
            add = ops.Bias(
                N,
                **options,
                tensor_parallel_group=split.group if split.column else None,
                sequence_parallel=split.sequence_parallel and not split.column,
            )
            layer.append(add)
    parameters = list(layer.parameters())
    with torch.no_grad():
        parameters[0].copy_(split.weight(whole.w))
        if bias:
            parameters[1].copy_(split.bias(whole.b))
    return layer


def run(layer: Any, call: Any, split: Split, whole: Problem, recipe: Recipe | None, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of one forward and backward."""
    layer.zero_grad()
    x = split.input(whole.x).to(device(), dtype).requires_grad_()
    with lowp.autocast(enabled=recipe is not None, recipe=recipe):
        y = call(x)
    y.backward(split.output(whole.dy).to(device(), dtype))
    reduce_sequence_parallel_grads(layer, split.group)
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]  # type: ignore[list-item]


def check(results: list[Tensor], split: Split, whole: Problem, what: str) -> None:
    """Each of `results` is this rank's part of the float64 one."""
    references = [split.output(whole.y), split.input(whole.dx), split.weight(whole.dw), split.bias(whole.db)]
    for name, result, reference in zip(("y", "dx", "dw", "db"), results, references, strict=False):
        check_equal(result, reference, f"{what}: {name}")


def random_problem(seed: int) -> Problem:
    """Operands without results, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    x, w, b, dy = (torch.randn(size, generator=generator).double() for size in ((M, K), (N, K), (N,), (M, N)))
    return Problem(x, w, b, dy, *(torch.empty(0),) * 4)


def compiled(layer: Any, boundary: str | None, backend: Any = "aot_eager") -> Any:
    return layer if boundary is None else torch.compile(layer, fullgraph=True, backend=backend)


def matches_float64(
    world_size: int,
    mode: str,
    sequence_parallel: bool,
    bias: bool,
    recipe_name: str,
    boundaries: list[str | None],
    *,
    keep: bool = False,
    facade: bool = False,
) -> None:
    """Both ranks alike, or, on groups of one, each in its own way: `boundaries` has one compiled way for each."""
    split = Split(mode, sequence_parallel, alone() if world_size == 1 else world())
    recipe, whole, dtype = RECIPES[recipe_name], problem(bias=bias), torch.bfloat16
    layer = parallel_linear(split, whole, bias=bias, keep=keep, facade=facade, dtype=dtype)
    eager_random: list[Tensor] = []
    ways = boundaries if world_size > 1 else [boundaries[rank()]]
    for boundary in (None, *[way for way in ways if way is not None]):
        counter = CompileCounterWithBackend("aot_eager")
        with lowp.compile_boundary(boundary or "operation"):
            call = compiled(layer, boundary, counter)
            check(run(layer, call, split, whole, recipe, dtype), split, whole, f"{boundary or 'eager'}")
            results = run(layer, call, split, random_problem(1), recipe, dtype)
        if boundary is None:
            eager_random = results
        assert counter.frame_count == (boundary is not None)
        assert all(map(torch.equal, results, eager_random)), f"{boundary}: random inputs differ from eager"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_equal_to_float64(ranks: Ranks, world_size, mode, sequence_parallel, bias, recipe):
    ranks(matches_float64, world_size, mode, sequence_parallel, bias, recipe, BOUNDARIES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_kept_gathered_input(ranks: Ranks, recipe):
    ranks(matches_float64, 2, "column", True, True, recipe, BOUNDARIES if recipe == "fp8" else [], keep=True)


@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_facade(ranks: Ranks, mode, sequence_parallel):
    boundaries = ["operation"] if sequence_parallel else []
    ranks(matches_float64, 2, mode, sequence_parallel, True, "fp8", boundaries, facade=True)


def matches_under_inductor(mode: str) -> None:
    split, whole, dtype = Split(mode, True, world()), problem(bias=True), torch.bfloat16
    for name in ("bf16", "fp8"):
        layer = parallel_linear(split, whole, bias=True, keep=False, facade=True, dtype=dtype)
        for boundary in HOW[1:]:
            with lowp.compile_boundary(boundary):
                call = compiled(layer, boundary, "inductor")
                check(run(layer, call, split, whole, RECIPES[name], dtype), split, whole, f"{name} {boundary}")
            torch.compiler.reset()


@pytest.mark.parametrize("mode", ["column", "row"])
def test_inductor(ranks: Ranks, mode):
    ranks(matches_under_inductor, mode)


# ---- what travels


class Collectives(TorchDispatchMode):
    """Records the collectives that run inside: name and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and func._opname != "wait_tensor":
            self.seen.append((func._opname, args[0].dtype))
        return func(*args, **(kwargs or {}))


GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
AGREE = (REDUCE, torch.float32)


def collectives_of(mode: str, sequence_parallel: bool, recipe_name: str, keep: bool) -> list[list[Any]]:
    """What runs in forward and in backward."""
    split, whole, dtype = Split(mode, sequence_parallel, world()), problem(bias=False), torch.bfloat16
    layer = parallel_linear(split, whole, bias=False, keep=keep, facade=False, dtype=dtype)
    x = split.input(whole.x).to(device(), dtype).requires_grad_()
    recipe = RECIPES[recipe_name]
    with Collectives() as forward, lowp.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    with Collectives() as backward:
        y.backward(split.output(whole.dy).to(device(), dtype))
    return [forward.seen, backward.seen]


BF16, BYTES = torch.bfloat16, torch.uint8


@pytest.mark.parametrize(
    ("mode", "sequence_parallel", "recipe", "keep", "forward", "backward"),
    [
        ("column", False, "fp8", False, [], [(REDUCE, BF16)]),
        ("row", False, "fp8", False, [(REDUCE, BF16)], []),
        ("column", True, "bf16", False, [(GATHER, BF16)], [(GATHER, BF16), (SCATTER, BF16)]),
        ("row", True, "bf16", False, [(SCATTER, BF16)], [(GATHER, BF16)]),
        ("column", True, "fp8", False, [AGREE, (GATHER, BYTES)], [(GATHER, BYTES), (SCATTER, BF16)]),
        ("column", True, "fp8", True, [AGREE, (GATHER, BYTES)], [(SCATTER, BF16)]),
        ("row", True, "fp8", False, [(SCATTER, BF16)], [AGREE, (GATHER, BYTES)]),
        (
            "column",
            True,
            "fp8_backward_dequantized",
            False,
            [AGREE, (GATHER, BYTES)],
            [(GATHER, BYTES), (SCATTER, BF16)],
        ),
        (
            "column",
            True,
            "fp8_backward_high_precision",
            False,
            [AGREE, (GATHER, BYTES)],
            [(GATHER, BF16), (SCATTER, BF16)],
        ),
        ("row", True, "fp8_backward_high_precision", False, [(SCATTER, BF16)], [(GATHER, BF16)]),
    ],
)
def test_what_travels(ranks: Ranks, mode, sequence_parallel, recipe, keep, forward, backward):
    """Quantized gathers send bytes and agree on one amax; each collective runs once, and dgrad's starts last."""
    for seen in ranks(collectives_of, mode, sequence_parallel, recipe, keep):
        assert seen == [forward, backward]


class Order(TorchDispatchMode):
    """Records in which order GEMMs and collectives start and are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" or "gemm" in func._opname or func._opname in ("cast", "transpose"):
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


def order_of(mode: str) -> list[list[str]]:
    split, whole, dtype = Split(mode, True, world()), problem(bias=False), torch.bfloat16
    layer = parallel_linear(split, whole, bias=False, keep=False, facade=False, dtype=dtype)
    x = split.input(whole.x).to(device(), dtype).requires_grad_()
    with Order() as forward, lowp.autocast():
        y = layer(x)
    with Order() as backward:
        y.backward(split.output(whole.dy).to(device(), dtype))
    return [forward.seen, backward.seen]


WAIT, GEMM = "wait_tensor", "scaled_gemm"


def test_independent_work_runs_between_start_and_wait(ranks: Ranks):
    agree = [REDUCE, WAIT]
    (forward, backward), _ = ranks(order_of, "column")
    assert forward == [*agree, "cast", GATHER, "cast", WAIT, GEMM]  # the weight's cast
    assert backward == [GATHER, "cast", "cast", GEMM, SCATTER, WAIT, "transpose", GEMM, WAIT]  # dgrad, then wgrad
    (forward, backward), _ = ranks(order_of, "row")
    assert forward == ["cast", "cast", GEMM, SCATTER, WAIT]
    assert backward == [*agree, "cast", GATHER, "cast", WAIT, "transpose", GEMM, GEMM]


# ---- cases of docs/cases.md that need ranks


def scales_agree() -> list[Tensor]:
    """The codes that wgrad reads, where one rank's input is 100 times larger."""
    split = Split("column", True, world())
    layer = ops.BasicLinear(
        K, N, device=device(), tensor_parallel_mode="column", tensor_parallel_group=world(), sequence_parallel=True
    )
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(M, K, generator=generator) * torch.linspace(1, 100, M)[:, None]
    x = split.input(whole).to(device())
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), lowp.autocast():
        layer(x)
    codes, scale = [tensor for tensor in saved if tensor.dtype != torch.float32 or tensor.ndim == 0][:2]
    expected = lowp.quantize(whole.to(device()), Float8CurrentScaling().quantizer("input"))
    assert torch.equal(scale, expected.row_scale)
    assert torch.equal(codes.view(torch.uint8), split.input(expected.row_data).view(torch.uint8))
    return [scale.cpu()]


def test_gathered_shards_share_the_scale_of_the_group(ranks: Ranks):
    first, second = ranks(scales_agree)
    assert torch.equal(first[0], second[0])


def shards_of_other_magnitude() -> None:
    """Row-parallel: shards with amaxes of 1.75 and 1.75 * 2^7 have scales of their own, and the sum is exact."""
    split, whole = Split("row", False, world()), problem(bias=False)
    grow = torch.ones(K, dtype=torch.float64)
    grow[K // 2 :] = 2.0**7
    whole = whole._replace(x=whole.x * grow, w=whole.w / grow, dx=whole.dx / grow, dw=whole.dw * grow)
    layer = parallel_linear(split, whole, bias=False, keep=False, facade=False, dtype=torch.bfloat16)
    for _ in range(3):
        check(run(layer, layer, split, whole, Float8CurrentScaling(), torch.bfloat16), split, whole, "shards")


def test_each_shard_has_its_own_scale(ranks: Ranks):
    ranks(shards_of_other_magnitude)


def row_bias_counts_once() -> None:
    for sequence_parallel in (False, True):
        split, whole = Split("row", sequence_parallel, world()), problem(bias=True)
        whole = whole._replace(b=torch.ones_like(whole.b), y=whole.x @ whole.w.T + 1)
        layer = parallel_linear(split, whole, bias=True, keep=False, facade=True, dtype=torch.bfloat16)
        check(run(layer, layer, split, whole, Float8CurrentScaling(), torch.bfloat16), split, whole, "bias")


def test_row_bias_counts_once(ranks: Ranks):
    ranks(row_bias_counts_once)


def local_features_of_8() -> None:
    """A shard of 8 in features is padded in the casts."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 16, generator=generator).double() for rows in (M, 24))
    split = Split("row", False, world())
    layer = ops.BasicLinear(16, 24, device=device(), tensor_parallel_mode="row", tensor_parallel_group=world())
    with torch.no_grad():
        layer.weight.copy_(split.weight(w))
    with lowp.autocast():
        y = layer(split.input(x).to(device(), torch.float32))
    y.sum().backward()
    # each operand is rounded by at most eps / 2 = 2^-4 of its value (codes below the normal range: of 2^-6 amax / 448)
    error = (x.abs() @ w.abs().T) * (2 * 2**-4 + 2**-8) + 1e-2
    assert ((y.double().cpu() - x @ w.T).abs() <= error).all()
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (24, 8)


def test_local_features_of_8(ranks: Ranks):
    ranks(local_features_of_8)


def outputs_on_both_ranks() -> bytes:
    """The whole output of a column and row pair, whose ranks sum the same parts."""
    torch.manual_seed(0)
    pair = ops.Sequential(
        ops.Linear(K, N, device=device(), tensor_parallel_mode="column", tensor_parallel_group=world()),
        ops.Linear(N, K, device=device(), tensor_parallel_mode="row", tensor_parallel_group=world()),
    )
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(0)).to(device())
    with lowp.autocast():
        return pair(x).detach().cpu().numpy().tobytes()


def test_ranks_give_the_same_bits(ranks: Ranks):
    first, second = ranks(outputs_on_both_ranks)
    assert first == second


def errors() -> dict[str, str]:
    """Messages for a sequence, and for features, that two ranks can't share."""
    group, odd = world(), torch.ones(5, 4, device=device())
    options: dict[str, Any] = {"device": device(), "tensor_parallel_group": group}
    row = ops.BasicLinear(8, 4, tensor_parallel_mode="row", sequence_parallel=True, **options)
    return {
        "row": message(row, odd),
        "row, quantized": message(ops.Sequential(ops.Quantize(), row, recipe=Float8CurrentScaling()), odd),
        "scatter": message(ops.ReduceScatter(group), odd),
        "compiled": message(torch.compile(row, backend="aot_eager", fullgraph=True), odd),
        "in": message(lambda: ops.BasicLinear(9, 4, tensor_parallel_mode="row", **options)),
        "out": message(lambda: ops.BasicLinear(4, 9, tensor_parallel_mode="column", **options)),
        "bias": message(lambda: ops.Bias(9, **options)),
    }


def test_errors_name_axis_and_size(ranks: Ranks):
    for found in ranks(errors):
        for name in ("row", "row, quantized", "scatter", "compiled"):
            assert "dim 0 to be divisible by the 2 ranks of the tensor-parallel group, got 5. Pad" in found[name]
        assert "in_features must be divisible by the 2 ranks of the tensor-parallel group, got 9" in found["in"]
        assert "out_features must be divisible by the 2 ranks" in found["out"]
        assert "size must be divisible by the 2 ranks" in found["bias"]


def copies() -> None:
    """Copies share the group, are independent otherwise, and keep what marks a partial gradient."""
    split, whole = Split("row", True, world()), problem(bias=True)
    for facade in (False, True):
        layer = parallel_linear(split, whole, bias=True, keep=False, facade=facade, dtype=torch.bfloat16)
        run(layer, layer, split, whole, Float8CurrentScaling(), torch.bfloat16)
        saved = io.BytesIO()
        torch.save(layer, saved)
        saved.seek(0)
        twins = {
            "deepcopy": copy.deepcopy(layer),
            "pickle": pickle.loads(pickle.dumps(layer)),
            "torch.save": torch.load(saved, weights_only=False),
            "to_empty": copy.deepcopy(layer).to("meta").to_empty(device=device()),
        }
        for name, twin in twins.items():
            twin.load_state_dict(layer.state_dict())
            parameters = list(twin.parameters())
            assert [getattr(p, "sequence_parallel", False) for p in parameters] == [False, True], name
            check(run(twin, twin, split, whole, Float8CurrentScaling(), torch.bfloat16), split, whole, name)
            with torch.no_grad():
                parameters[0].zero_()
        check(run(layer, layer, split, whole, Float8CurrentScaling(), torch.bfloat16), split, whole, "original")
        replaced = layer if facade else layer[1]
        replaced.bias = nn.Parameter(replaced.bias.detach().clone())
        check(run(layer, layer, split, whole, Float8CurrentScaling(), torch.bfloat16), split, whole, "replaced")


def test_copies(ranks: Ranks):
    ranks(copies)


def main_grad() -> None:
    """The weight's gradient goes into main_grad, and the bias's is completed in main_grad and grad."""
    split, whole = Split("row", True, world()), problem(bias=True)
    for boundary in HOW:
        linear = ops.Linear(
            K,
            N,
            device=device(),
            dtype=torch.bfloat16,
            tensor_parallel_mode="row",
            tensor_parallel_group=world(),
            sequence_parallel=True,
            accumulate_into_main_grad=True,
        )
        with torch.no_grad():
            linear.weight.copy_(split.weight(whole.w))
            linear.bias.copy_(whole.b)
        linear.weight.main_grad = torch.ones_like(linear.weight, dtype=torch.float32)
        linear.bias.main_grad = torch.zeros_like(linear.bias, dtype=torch.float32)

        def collect(parameter: nn.Parameter) -> None:
            parameter.main_grad += parameter.grad  # type: ignore[attr-defined]
            parameter.grad = None

        linear.bias.register_post_accumulate_grad_hook(collect)
        with lowp.compile_boundary(boundary or "operation"):
            results = run(linear, compiled(linear, boundary), split, whole, Float8CurrentScaling(), torch.bfloat16)
        assert results[2] is None
        check_equal(linear.weight.main_grad, split.weight(whole.dw) + 1, f"{boundary} weight.main_grad")
        check_equal(linear.bias.main_grad, whole.db, f"{boundary} bias.main_grad")


def test_main_grad(ranks: Ranks):
    ranks(main_grad)


def test_amax_reduction_group_is_carried():
    """Current scaling needs no agreement; the group that another recipe would use is in force inside, and nests."""
    current = lowp.ambient.current_amax_reduction_group
    outer, inner = object(), object()
    assert current() is None
    with lowp.autocast(amax_reduction_group=outer):
        with lowp.autocast(amax_reduction_group=inner):
            assert current() is inner
        assert current() is outer
    assert current() is None


def other_device() -> None:
    """Kernels launch on their tensors' device, whatever the current one is."""
    elsewhere = torch.device("cuda", 1 - torch.cuda.current_device())
    whole = problem(bias=True)
    linear = ops.Linear(K, N, device=elsewhere, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(whole.w)
        linear.bias.copy_(whole.b)
    for call in (linear, torch.compile(linear, fullgraph=True)):
        linear.zero_grad()
        x = whole.x.to(elsewhere, torch.bfloat16).requires_grad_()
        with lowp.autocast():
            y = call(x)
        y.backward(whole.dy.to(elsewhere, torch.bfloat16))
        for result, reference in ((y, whole.y), (x.grad, whole.dx), (linear.weight.grad, whole.dw)):
            check_equal(result, reference, "other device")  # type: ignore[arg-type]


@pytest.mark.gpu2
def test_kernels_launch_on_the_device_of_their_tensors():
    other_device()
