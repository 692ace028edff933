"""Three training steps on one and on two ranks: the same bits on exact inputs, within a derived bound on random ones.

Ways to use two ranks: TP (a column- and a row-parallel layer, with sequence parallelism), DDP and FSDP2 (half of the
tokens each). Shape legend: M = tokens, D = features, H = hidden features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp import ops
from lowp.distributed import reduce_sequence_parallel_grads
from lowp.formats import E4M3, E5M2, ElementFormat
from lowp.recipe import Float8CurrentScaling, Recipe
from tests.distributed.ranks import Ranks, alone, device, rank, world

STEPS = 3
M, D, H = 8, 16, 32
RECIPES: dict[str, Recipe | None] = {
    "high precision": None,
    # Multipliers that are powers of two: a shard with another amax rounds its elements as the whole tensor does.
    "fp8": Float8CurrentScaling(use_power_2_scales=True),
}


def layers(group: Any, container: type[nn.Sequential] = ops.Sequential) -> nn.Sequential:
    """Two linear layers with bias, one pipeline or two; on one rank the parallel modes change nothing."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device(), "tensor_parallel_group": group, "sequence_parallel": True}
    return container(
        ops.Linear(D, H, tensor_parallel_mode="column", **options),
        ops.Linear(H, D, tensor_parallel_mode="row", **options),
    )


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def fill_exactly(model: nn.Sequential) -> None:
    """Integers in all parameters: the whole ones', from which this rank takes its part."""
    whole = {"0.weight": (H, D), "0.bias": (H,), "1.weight": (D, H), "1.bias": (D,)}
    state = {name: integers(*shape, seed=seed) for seed, (name, shape) in enumerate(whole.items())}
    lowp.distributed.load_sharded_state(model, state)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def step_by_sign(model: nn.Module) -> None:
    """Move every weight by the sign of its gradient, within [-1, 1]: weights stay integers, so that all stays exact."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        weight, grad = local(parameter), local(parameter.grad)
        weight.copy_((weight - grad.sign()).clamp(-1, 1))
        parameter.grad = None


class Way(NamedTuple):
    """A way to train on the ranks of a group: a wrapped model, this rank's tokens, and what completes gradients."""

    model: nn.Module
    tokens: Callable[[Tensor], Tensor]
    complete: Callable[[], None]


def model_for(way: str, group: Any) -> nn.Sequential:
    """FSDP shards pipelines, so there each layer is one of its own."""
    return layers(group if way == "tp" else None, nn.Sequential if way == "fsdp" else ops.Sequential)


def prepare(way: str, plain: nn.Sequential, group: Any, compile_: Callable[[Any], Any]) -> Way:
    """Wrap `plain`, compiled by `compile_`, as `way` says."""

    def half(x: Tensor) -> Tensor:
        return x.chunk(group.size())[group.rank()]

    if way == "tp":
        return Way(compile_(plain), half, lambda: reduce_sequence_parallel_grads(plain, group))
    if way == "ddp":
        return Way(DistributedDataParallel(compile_(plain), process_group=group), half, lambda: None)
    mesh = DeviceMesh.from_group(group, device().type)
    for index, layer in enumerate(plain):
        plain[index] = fully_shard(compile_(layer), mesh=mesh)
    return Way(fully_shard(plain, mesh=mesh), half, lambda: None)


def gradient_share(way: str, group: Any) -> float:
    """DDP and FSDP average over the ranks; a rank's loss is therefore weighted by their number."""
    return 1.0 if way == "tp" else float(group.size())


def train(way: str, group: Any, recipe: Recipe | None, compile_: Callable[[Any], Any]) -> list[Tensor]:
    """Every step's output, and the parameters after the last."""
    plain = model_for(way, group)
    fill_exactly(plain)
    model, tokens, complete = prepare(way, plain, group, compile_)
    found = []
    for index in range(STEPS):
        x = tokens(integers(M, D, seed=20 + index)).to(device())
        dy = tokens(integers(M, D, seed=30 + index)).to(device()) * gradient_share(way, group)
        with lowp.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.backward(dy)
        complete()
        step_by_sign(model)
        found.append(y.detach())
    return [*found, *whole_parameters(model, plain, way)]


def whole_parameters(model: nn.Module, plain: nn.Sequential, way: str) -> list[Tensor]:
    """All parameters, gathered."""
    if way == "tp":
        values = lowp.distributed.sharded_state(plain).values()
    else:
        values = [parameter.detach() for parameter in model.parameters()]  # type: ignore[assignment]
    return [value.full_tensor() if isinstance(value, DTensor) else value.clone() for value in values]


def three_steps(way: str, recipe_name: str, boundary: str | None) -> None:
    recipe = RECIPES[recipe_name]
    reference = train("tp", alone(), recipe, lambda module: module)
    counter = CompileCounterWithBackend("aot_eager")

    def compile_(module: nn.Module) -> Any:
        return module if boundary is None else torch.compile(module, fullgraph=True, backend=counter)

    with lowp.compile_boundary(boundary or "operation"):  # type: ignore[arg-type]
        results = train(way, world(), recipe, compile_)
    for index, (result, whole) in enumerate(zip(results, reference, strict=True)):
        expected = whole.chunk(2)[rank()] if index < STEPS else whole
        assert expected.abs().max() > 0
        assert torch.equal(result, expected), f"{way} {boundary}: result {index}"
    graphs = {"tp": 1, "ddp": 1, "fsdp": 2}[way]  # FSDP: two blocks
    assert counter.frame_count == (graphs if boundary else 0), "recompiled"


@pytest.mark.parametrize(
    ("recipe", "boundary"),
    [
        ("high precision", None),
        ("high precision", "operation"),
        *(("fp8", way) for way in (None, "operation", "kernel")),
    ],
)
@pytest.mark.parametrize("way", ["tp", "ddp", "fsdp"])
def test_three_steps_on_exact_inputs(ranks: Ranks, way, recipe, boundary):
    ranks(three_steps, way, recipe, boundary)


# ---- random inputs


class Bounded(NamedTuple):
    """A float64 value, and how far a computed one may be from it, element by element."""

    value: Tensor
    error: Tensor


SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}
"""The spacing of the smallest codes."""
FP32 = 2.0**-24
"""Half a unit in the last place of 1."""
TENSOR_CORE = 2.0**-13
"""What Hopper's tensor cores lose of an FP8 sum, relative to its largest term. Source: DeepSeek-V3 technical report."""


def quantized(x: Bounded, fmt: ElementFormat | None) -> Bounded:
    """Rounding to `fmt` with a scale of at most amax / fmt.max: half a step of a normal code, or of the smallest."""
    if fmt is None:
        return x
    magnitude = x.value.abs() + x.error
    rounding = magnitude * (fmt.eps / 2) + SMALLEST[fmt] / 2 * magnitude.max() / fmt.max
    return Bounded(x.value, x.error + rounding + magnitude * 4 * FP32)  # the multiplier and the product in fp32


def product(a: Bounded, b: Bounded, fmt: ElementFormat | None) -> Bounded:
    """`a @ b.T`, in any order, and in two parts or one: C terms are rounded at most C + 2 times each."""
    unit = FP32 if fmt is None or device().type == "cpu" else TENSOR_CORE
    size_a, size_b = a.value.abs() + a.error, b.value.abs() + b.error
    error = size_a @ size_b.T - a.value.abs() @ b.value.abs().T
    return Bounded(a.value @ b.value.T, error + (a.value.shape[1] + 2) * unit * (size_a @ size_b.T))


def rows_sum(a: Bounded) -> Bounded:
    magnitude = (a.value.abs() + a.error).sum(0)
    return Bounded(a.value.sum(0), a.error.sum(0) + len(a.value) * FP32 * magnitude)


def plus(a: Bounded, b: Bounded, factor: float = 1.0) -> Bounded:
    value = a.value + factor * b.value
    error = a.error + abs(factor) * b.error
    return Bounded(value, error + 2 * FP32 * (a.value.abs() + a.error + abs(factor) * (b.value.abs() + b.error)))


def transposed(a: Bounded) -> Bounded:
    return Bounded(a.value.T, a.error.T)


RATE = 2.0**-4


def bounded_training(
    parameters: list[Tensor], data: list[tuple[Tensor, Tensor]], recipe: Recipe | None
) -> list[list[Bounded]]:
    """Outputs of all steps, and parameters after the last, as float64 values with bounds.

    Every quantized operand is within `quantized`'s bound of the value that it stands for, whatever its scale; the rest
    is interval arithmetic. Two runs differ by at most twice the bound.
    """
    forward, backward = (None, None) if recipe is None else (E4M3, E5M2)
    exactly = [Bounded(p.double().cpu(), torch.zeros_like(p.double().cpu())) for p in parameters]
    w1, b1, w2, b2 = exactly
    outputs = []
    for x_, dy_ in data:
        x, dy = (Bounded(t.double(), torch.zeros_like(t.double())) for t in (x_, dy_))
        h = plus(product(quantized(x, forward), quantized(w1, forward), forward), b1)
        outputs.append(plus(product(quantized(h, forward), quantized(w2, forward), forward), b2))
        dh = product(quantized(dy, backward), quantized(transposed(w2), forward), forward)
        dw2 = product(quantized(transposed(dy), backward), quantized(transposed(h), forward), forward)
        dw1 = product(quantized(transposed(dh), backward), quantized(transposed(x), forward), forward)
        db1, db2 = rows_sum(dh), rows_sum(dy)
        w1, b1 = plus(w1, dw1, -RATE), plus(b1, db1, -RATE)
        w2, b2 = plus(w2, dw2, -RATE), plus(b2, db2, -RATE)
    return [outputs, [w1, b1, w2, b2]]


def random_steps(way: str, recipe_name: str) -> list[float]:
    """Check two ranks against one, and both against the bounds; how much of the bound the outputs' difference takes."""
    recipe = Float8CurrentScaling() if recipe_name == "fp8" else None
    generator = torch.Generator().manual_seed(7)
    data = [(torch.randn(M, D, generator=generator), torch.randn(M, D, generator=generator) / 8) for _ in range(STEPS)]
    results = {}
    start = [parameter.detach().clone() for parameter in layers(None).parameters()]
    for name, group in (("one", alone()), ("two", world())):
        plain = model_for(way, group)
        model, tokens, complete = prepare(way, plain, group, lambda module: module)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        outputs = []
        for x, dy in data:
            optimizer.zero_grad()
            with lowp.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(tokens(x).to(device()))
            y.backward(tokens(dy).to(device()) * gradient_share(way, group))
            complete()
            optimizer.step()
            outputs.append(y.detach())
        results[name] = (outputs, whole_parameters(model, plain, way))
    bounds = bounded_training(start, data, recipe)
    shares = []
    for kind, both in enumerate(zip(*results.values(), strict=True)):
        for bound, one, two in zip(bounds[kind], *both, strict=True):
            value, error = bound
            if kind == 0:
                value, error, one = (t.chunk(2)[rank()] for t in (value, error, one))
            one, two = one.double().cpu(), two.double().cpu()
            for name, result in (("one", one), ("two", two)):
                assert ((result - value).abs() <= error).all(), f"{way}: {name} rank(s) leave the bound"
            assert ((one - two).abs() <= 2 * error).all()
            shares.append(float(((one - two).abs() / error).max()))
    return shares


@pytest.mark.parametrize("recipe", ["high precision", "fp8"])
@pytest.mark.parametrize("way", ["tp", "ddp", "fsdp"])
def test_three_steps_on_random_inputs(ranks: Ranks, way, recipe):
    for shares in ranks(random_steps, way, recipe):
        assert all(share <= 2 for share in shares)


# ---- DDP and FSDP2


def uneven_tokens(way: str, counts: tuple[int, int], boundary: str | None) -> None:
    """Ranks with other numbers of tokens call the same collectives: no amax is agreed on."""
    torch.manual_seed(0)
    plain = nn.Sequential(ops.Linear(D, H, device=device()), ops.Linear(H, D, device=device()))
    model, _, _ = prepare(
        way,
        plain,
        world(),
        lambda module: module if boundary is None else torch.compile(module, fullgraph=True, backend="aot_eager"),
    )
    for _ in range(2):
        x = torch.randn(counts[rank()], D, device=device())
        with lowp.autocast():
            y = model(x)
        assert y.shape == x.shape
        y.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert local(parameter.grad).isfinite().all()
    dist.barrier()


@pytest.mark.parametrize(("counts", "boundary"), [((16, 8), None), ((8, 0), None), ((8, 0), "operation")])
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_ranks_may_have_other_numbers_of_tokens(ranks: Ranks, way, boundary, counts):
    ranks(uneven_tokens, way, counts, boundary)


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Everything that autograd saves inside."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def kept_under_fsdp(boundary: str | None) -> None:
    """Between the passes: the input's fp8 copy, and of the weight only the parameter itself, whose memory is freed."""
    tokens, out_features = 48, 256  # the weight's copy must not be smaller than its statistics, 2 KiB on CUDA
    torch.manual_seed(0)
    linear = ops.Linear(D, out_features, device=device())
    compiled: Any = linear
    if boundary is not None:
        compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    mesh = DeviceMesh.from_group(world(), device().type)
    root = nn.Sequential(fully_shard(compiled, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    fully_shard(root, mesh=mesh)  # the root's own child is resharded after forward
    x = torch.randn(tokens, D, device=device(), requires_grad=True)
    with saved_tensors() as saved, lowp.autocast(), lowp.compile_boundary(boundary or "operation"):  # type: ignore[arg-type]
        y = root(x)
    fp8 = [tensor for tensor in saved if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    shapes = [tuple(tensor.shape) for tensor in fp8]
    assert shapes == [(D, tokens)], f"only the input's column copy is to be kept, not {shapes}"
    weights = [tensor for tensor in saved if tensor.numel() == out_features * D]
    assert len(weights) == 1
    assert weights[0].untyped_storage().nbytes() == 0, "the unsharded weight is kept"
    y.sum().backward()
    for parameter in root.parameters():
        assert isinstance(parameter.grad, DTensor)


@pytest.mark.parametrize("boundary", [None, "operation", "kernel"])
def test_fsdp_frees_unsharded_weights_between_the_passes(ranks: Ranks, boundary):
    ranks(kept_under_fsdp, boundary)


def both_parallelisms() -> None:
    """FSDP2 replaces parameters; the gradients that sequence parallelism leaves partial are completed all the same."""
    results = []
    x, dy = integers(M, D, seed=1).to(device()), integers(M, D, seed=2).to(device())
    for shard in (False, True):
        plain = layers(world())
        fill_exactly(plain)
        if shard:
            fully_shard(plain, mesh=DeviceMesh.from_group(alone(), device().type))
        y = plain(x.chunk(2)[rank()])
        y.backward(dy.chunk(2)[rank()])
        reduce_sequence_parallel_grads(plain, world())
        results.append([local(parameter.grad) for parameter in plain.parameters()])  # type: ignore[arg-type]
    assert all(map(torch.equal, *results))
    assert torch.equal(results[0][3], dy.sum(0))


def test_fsdp_around_tensor_parallel_layers(ranks: Ranks):
    ranks(both_parallelisms)
