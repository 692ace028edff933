"""AllGather, ReduceScatter and AllReduce as operations; collectives inside registered operators and compiled graphs.

Shape legend: T = ranks, M = rows of one rank.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import lowp
from lowp import ops
from lowp.formats import ElementFormat
from lowp.ops import pipeline
from lowp.recipe import Float8CurrentScaling
from lowp.registration import REGISTRY
from tests.distributed.ranks import WORLD_SIZE, Ranks, alone, device, message, rank, world

BOUNDARIES = ["operation", "kernel"]
FP8 = tuple(fmt.dtype for fmt in ElementFormat)
ROWS, COLUMNS = 4, 6


def rows_of(index: int, rows: int, seed: int) -> Tensor:
    """What rank `index` holds: small integers, so that sums are exact."""
    generator = torch.Generator().manual_seed(10 * seed + index)
    return torch.randint(-8, 9, (rows, COLUMNS), generator=generator).to(device(), torch.bfloat16)


def expected(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, output, output's gradient and input's gradient of this rank, by the formulas of the module."""
    scattered, reduced = kind == "ReduceScatter", kind != "AllGather"
    x_T = [rows_of(index, ROWS, 1) for index in range(WORLD_SIZE)]
    y = sum(x_T[1:], x_T[0]) if reduced else torch.cat(x_T)
    y = y.chunk(WORLD_SIZE)[rank()] if scattered else y
    dy_T = [rows_of(index, len(y), 2) for index in range(WORLD_SIZE)]
    if kind == "AllGather":
        dx = sum(dy_T[1:], dy_T[0]).chunk(WORLD_SIZE)[rank()]
    else:
        dx = torch.cat(dy_T) if scattered else dy_T[rank()]
    return x_T[rank()], y, dy_T[rank()], dx


def collective(kind: str) -> None:
    op = getattr(ops, kind)(world())
    x, y, dy, dx = expected(kind)
    for boundary in (None, *BOUNDARIES):
        counter = CompileCounterWithBackend("aot_eager")
        with lowp.compile_boundary(boundary or "operation"):
            call = op if boundary is None else torch.compile(op, fullgraph=True, backend=counter)
            for _ in range(2):
                given = x.clone().requires_grad_()
                result = call(given)
                result.backward(dy)
                assert torch.equal(result, y), f"{boundary} output"
                assert torch.equal(given.grad, dx), f"{boundary} gradient"
                assert torch.equal(given, x), f"{boundary} changed its input"
        assert counter.frame_count == (boundary is not None)
    empty = torch.zeros(0, COLUMNS, device=device(), requires_grad=True)
    op(empty).sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == empty.shape
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert torch.equal(twin(x), y)
    on_one = getattr(ops, kind)(alone())
    given = x.clone().requires_grad_()
    on_one(given).backward(x)
    assert torch.equal(on_one(given), x)
    assert torch.equal(given.grad, x)


@pytest.mark.parametrize("kind", ["AllGather", "ReduceScatter", "AllReduce"])
def test_values_and_gradients(ranks: Ranks, kind):
    ranks(collective, kind)


def unsplittable() -> dict[str, str]:
    scalar = torch.ones((), device=device())
    return {kind: message(getattr(ops, kind)(world()), scalar) for kind in ("AllGather", "ReduceScatter")}


def test_an_input_without_axes(ranks: Ranks):
    for found in ranks(unsplittable):
        for name in ("AllGather", "ReduceScatter"):
            assert found[name].startswith(f"{name}: sequence parallelism splits the first axis")


def pipeline_of_collectives() -> None:
    """A column- and row-parallel pair written out: gather, two plain linears of shards, scatter."""
    torch.manual_seed(rank())
    up = ops.BasicLinear(COLUMNS, 16, device=device())
    down = ops.BasicLinear(16, COLUMNS, device=device())
    written = ops.Sequential(ops.AllGather(world()), up, down, ops.ReduceScatter(world()))
    options: dict[str, Any] = {
        "device": device(),
        "tensor_parallel_group": world(),
        "sequence_parallel": True,
    }
    pair = ops.Sequential(
        ops.BasicLinear(COLUMNS, 32, tensor_parallel_mode="column", **options),
        ops.BasicLinear(32, COLUMNS, tensor_parallel_mode="row", **options),
    )
    with torch.no_grad():
        pair[0].weight.copy_(up.weight)
        pair[1].weight.copy_(down.weight)
    x = rows_of(rank(), ROWS, 1).float()
    results = []
    for model in (written, pair):
        for boundary in (None, "operation"):
            call = model if boundary is None else torch.compile(model, fullgraph=True, backend="aot_eager")
            model.zero_grad()
            given = x.clone().requires_grad_()
            with lowp.autocast():  # the pair agrees on an amax before it gathers, `written` measures what was gathered
                y = call(given)
            y.backward(x)
            results.append([y.detach(), given.grad, *(p.grad for p in model.parameters())])
    # backward alike: `written` quantizes the gathered gradient, with the amax of it all
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_a_pair_written_out(ranks: Ranks):
    ranks(pipeline_of_collectives)


# ---- dead code


def unread_result(kind: str, boundary: str, backend: str, training: bool, checkpoint: bool) -> None:
    """Rank 1 doesn't read what rank 0 does; were its collective dropped, the next one would meet rank 0's first."""
    group = world()
    if kind == "row":
        op: Any = ops.BasicLinear(
            2 * COLUMNS, 4, device=device(), tensor_parallel_mode="row", tensor_parallel_group=group
        )
    else:
        op = getattr(ops, kind)(group)

    def program(x: Tensor) -> Tensor:
        y = op(x)
        return x * x + y.sum() if rank() == 0 else x * x

    function: Callable[[Tensor], Tensor] = program
    if checkpoint:
        function = lambda x: torch.utils.checkpoint.checkpoint(program, x, use_reentrant=False)  # noqa: E731
    with lowp.compile_boundary(boundary):  # type: ignore[arg-type]
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        for step in range(2):
            x = rows_of(rank(), ROWS, step).float().requires_grad_(training)
            result = compiled(x)
            if training and kind in ("row", "AllReduce"):  # whose backward has no collective: rank 1 runs none
                result.sum().backward()
            check = torch.full((3,), float(rank() + 1), device=device())
            dist.all_reduce(check)
            assert (check == 3).all()
            assert torch.equal(result if rank() else x * x, x * x)


@pytest.mark.parametrize(
    ("kind", "boundary", "backend", "training", "checkpoint"),
    [
        ("AllReduce", "operation", "aot_eager", False, False),
        ("AllReduce", "operation", "aot_eager", True, False),
        ("AllReduce", "operation", "inductor", True, False),
        ("AllReduce", "kernel", "aot_eager", True, False),
        ("AllReduce", "kernel", "inductor", False, False),
        ("AllGather", "operation", "aot_eager", True, False),
        ("ReduceScatter", "operation", "aot_eager", False, False),
        ("row", "operation", "aot_eager", True, False),
        ("row", "operation", "inductor", False, False),
        ("row", "operation", "inductor", True, True),
        ("row", "kernel", "inductor", True, True),
    ],
)
def test_a_collective_runs_though_nobody_reads_its_result(ranks: Ranks, kind, boundary, backend, training, checkpoint):
    ranks(unread_result, kind, boundary, backend, training, checkpoint)


# ---- registered operators with collectives inside


class Samples(TorchDispatchMode):
    """Records the operators of `lowp::` that run inside, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "lowp":
            copies = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), args)
            self.found[func._opname] = (func, copies)
        return func(*args, **(kwargs or {}))


def samples() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every operator with a collective inside, with arguments of tensor-parallel layers."""
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def through_operator(op: Any, direction: str, args: Any) -> Any:
        with Samples() as seen:
            results = op.registered[direction](args)
        for name, sample in seen.found.items():
            found[f"{label} {name}"] = sample
        return results

    direct = pipeline.compute
    pipeline.compute = through_operator  # type: ignore[assignment]
    try:
        for mode in ("column", "row"):
            for sequence_parallel in (False, True):
                for recipe in (None, Float8CurrentScaling(), Float8CurrentScaling(backward_override="dequantized")):
                    override = None if recipe is None else recipe.backward_override
                    if not sequence_parallel and (recipe is None or override is not None):
                        continue  # no gather: nothing that the others lack
                    label = f"{mode} {sequence_parallel} {recipe is not None} {override}"
                    layer = ops.Linear(
                        16,
                        32,
                        device=device(),
                        dtype=torch.bfloat16,
                        tensor_parallel_mode=mode,
                        tensor_parallel_group=world(),
                        sequence_parallel=sequence_parallel,
                    )
                    x = torch.randn(2, 3, layer.basic_ops[0].local_in_features, device=device(), dtype=torch.bfloat16)
                    with lowp.autocast(enabled=recipe is not None, recipe=recipe):
                        layer(x.requires_grad_()).sum().backward()
        for label in ("AllGather", "ReduceScatter", "AllReduce"):
            getattr(ops, label)(world())(torch.randn(4, 3, device=device(), requires_grad=True)).sum().backward()
    finally:
        pipeline.compute = direct
    return {name: sample for name, sample in found.items() if name.endswith("_collective")}


def operators_pass_opcheck(part: int) -> list[str]:
    found = samples()
    for name in sorted(found)[part::4]:
        overload, args = found[name]
        tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        if any(isinstance(arg, Tensor) and arg.dtype in FP8 for arg in args):
            tests.remove("test_schema")  # its harness can't compare fp8
        torch.library.opcheck(overload, args, test_utils=tests)
    return sorted({name.split()[-1] for name in found})


@pytest.mark.parametrize("part", range(4))
def test_opcheck(ranks: Ranks, part):
    for names in ranks(operators_pass_opcheck, part):
        assert names == sorted(
            [f"{kind}_{way}_collective" for kind in ("AllGather", "AllReduce", "ReduceScatter") for way in WAYS]
            + [f"BasicLinear_{way}_collective" for way in WAYS]
            + ["ForwardLinearBias_forward_collective"]
        )


WAYS = ("forward", "backward")


def facts(value: Any) -> Any:
    """What a fake must tell about a tensor."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: (t.shape, t.stride(), t.dtype, str(t.device)), value)


def fakes_are_exact() -> int:
    found = samples()
    for name, (overload, args) in found.items():
        real = overload(*args)
        with FakeTensorMode() as mode:
            fake = overload(*torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, args))
        assert facts(fake) == facts(real), name
    return len(found)


def test_fakes_are_exact_after_collectives(ranks: Ranks):
    assert min(ranks(fakes_are_exact)) >= 20


def marked_operators() -> tuple[list[str], list[str]]:
    effects = torch.fx.node._side_effectful_functions
    marked = [name for name, op in REGISTRY.items() if op.overload in effects]
    return sorted(marked), sorted(name for name in REGISTRY if name.endswith("_collective"))


def test_exactly_the_collective_variants_are_marked():
    marked, variants = marked_operators()
    assert marked == variants
    assert "BasicLinear_forward_collective" in marked


def another_group() -> int:
    """A second group compiles once more; going back reuses the first graph."""
    second = dist.new_group(list(range(WORLD_SIZE)))
    counter = CompileCounterWithBackend("aot_eager")
    calls = [ops.AllReduce(group) for group in (world(), second, world(), second)]

    @torch.compile(fullgraph=True, backend=counter)
    def call(op: Any, x: Tensor) -> Tensor:
        return op(x)

    x = rows_of(rank(), ROWS, 1)
    for op in (*calls[:2], *calls[:2]):
        assert torch.equal(call(op, x), expected("AllReduce")[1])
    dist.destroy_process_group(second)
    return counter.frame_count


def test_another_group_compiles_once(ranks: Ranks):
    assert ranks(another_group) == [2, 2]
