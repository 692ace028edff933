"""Modules on two ranks: as on one, eager and compiled; state that fits any number of ranks.

Shape legend: M = tokens, K = features, F = hidden features of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils.checkpoint import checkpoint

import lowp
from lowp.distributed import load_sharded_state, reduce_sequence_parallel_grads, sharded_state
from lowp.distributed.sharding import Sharding, shard_of
from lowp.recipe import Float8CurrentScaling
from tests.distributed.ranks import Ranks, alone, device, message, rank, world
from tests.distributed.test_sharding import quietly
from tests.modules.pairwise import sampled

M, K, N, F = 8, 32, 48, 64
HOW = ["eager", "operation", "kernel"]
NORM: dict[str, Any] = {"return_layernorm_output": True}
GATHERED: dict[str, Any] = {**NORM, "return_layernorm_output_gathered": True}


def linear(mode: str) -> Callable[..., nn.Module]:
    return lambda **options: lowp.Linear(K, N, parallel_mode=mode, **options)


def norm_linear(**more: Any) -> Callable[..., nn.Module]:
    return lambda **options: lowp.LayerNormLinear(K, N, parallel_mode="column", **more, **options)


def mlp(**more: Any) -> Callable[..., nn.Module]:
    return lambda **options: lowp.LayerNormMLP(K, F, set_parallel_mode=True, **more, **options)


KINDS: dict[str, Callable[..., nn.Module]] = {
    "column": linear("column"),
    "row": linear("row"),
    "norm_linear": norm_linear(),
    "norm_linear, norm": norm_linear(**NORM),
    "norm_linear, norm gathered": norm_linear(**GATHERED, normalization="RMSNorm"),
    "mlp": mlp(),
    "mlp, norm": mlp(**NORM),
    "mlp, norm gathered": mlp(**GATHERED),
    "gated mlp": mlp(activation="swiglu", normalization="RMSNorm"),
    "gated mlp, checkpoint": mlp(activation="geglu", checkpoint=True, bias=False),
}


def build(kind: str, seed: int = 0, **options: Any) -> Any:
    """A module whose values are a function of the seed, on any number of ranks."""
    torch.manual_seed(seed)
    module = KINDS[kind](device=device(), **options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith("layer_norm"):
                parameter.add_(torch.linspace(-0.3, 0.3, K, device=device()))
    return module


def part(x: Tensor, axis: int) -> Tensor:
    return x.tensor_split(2, axis)[rank()]


class Problem:
    """Inputs and gradients of the whole, and this rank's parts of them."""

    def __init__(self, kind: str, sequence_parallel: bool) -> None:
        self.row = kind == "row"
        self.rows_out = self.row or "mlp" in kind
        self.sequence_parallel = sequence_parallel
        self.gathered = "gathered" in kind
        torch.manual_seed(1)
        out = K if "mlp" in kind else N
        self.x = torch.randn(M, K).to(device())
        self.dy = torch.randn(M, out).to(device())
        self.d_norm = torch.randn(M, K).to(device()) if ", norm" in kind else None

    def input(self, x: Tensor) -> Tensor:
        if self.row:
            return part(x, 1)
        return part(x, 0) if self.sequence_parallel else x

    def output(self, y: Tensor) -> Tensor:
        if not self.rows_out:
            return part(y, 1)
        return part(y, 0) if self.sequence_parallel else y

    def norm(self, n: Tensor) -> Tensor:
        return part(n, 0) if self.sequence_parallel and not self.gathered else n

    def norm_grad(self, d_norm: Tensor) -> Tensor:
        """Of a gathered output every rank has a part of the gradient, and the sum counts."""
        if self.sequence_parallel and self.gathered:
            return d_norm * (0.25 if rank() == 0 else 0.75)
        return self.norm(d_norm)


def run(module: Any, how: str, x: Tensor, *dys: Tensor | None) -> list[Tensor]:
    """Outputs, dx and the parameters' gradients."""
    call = module if how == "eager" else torch.compile(module, backend="aot_eager", fullgraph=True)
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    with lowp.compile_boundary("operation" if how == "eager" else how):  # type: ignore[arg-type]
        outputs = call(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [dy for dy in dys if dy is not None])
    return [*[y.detach() for y in outputs], x.grad, *[p.grad for p in module.parameters()]]


def close(actual: Tensor, expected: Tensor, bound: float, name: str) -> None:
    assert actual.shape == expected.shape, name
    error = (actual - expected).norm() / expected.norm().clamp(min=1e-6)
    assert error <= bound, f"{name}: off by {error}"


def as_on_one_rank(kind: str, sequence_parallel: bool, how: str, fp8: bool) -> None:
    recipe = Float8CurrentScaling() if fp8 else None
    whole = build(kind, recipe=recipe)
    split = build(kind, recipe=recipe, tp_group=world(), sequence_parallel=sequence_parallel)
    problem = Problem(kind, sequence_parallel)
    expected = run(whole, "eager", problem.x, problem.dy, problem.d_norm)
    d_norm = None if problem.d_norm is None else problem.norm_grad(problem.d_norm)
    given = problem.input(problem.x), problem.output(problem.dy), d_norm
    results = run(split, how, *given)
    if how != "eager":
        again = run(split, "eager", *given)
        assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
    if sequence_parallel:
        reduce_sequence_parallel_grads(split, world())
        results[-len(list(split.parameters())) :] = [p.grad for p in split.parameters()]
    bound = 2.0**-3 if fp8 else 64 * torch.finfo(torch.float32).eps
    outputs = 1 if problem.d_norm is None else 2
    close(results[0], problem.output(expected[0]), bound, "y")
    if outputs == 2:
        close(results[1], problem.norm(expected[1]), bound, "norm output")
    close(results[outputs], problem.input(expected[outputs]), bound, "dx")
    shardings = split.shardings()
    for index, (name, _) in enumerate(split.named_parameters()):
        wanted = expected[outputs + 1 + index]
        wanted = shard_of(wanted, shardings[name]) if name in shardings else wanted
        close(results[outputs + 1 + index], wanted, bound, name)


@sampled(how=HOW, sequence_parallel=[False, True], kind=list(KINDS))
def test_as_on_one_rank(how, sequence_parallel, kind, ranks: Ranks):
    ranks(as_on_one_rank, kind, sequence_parallel, how, False)


@sampled(
    how=["operation", "kernel"],
    sequence_parallel=[False, True],
    kind=["norm_linear", "norm_linear, norm gathered", "mlp", "gated mlp"],
)
def test_under_a_recipe(how, sequence_parallel, kind, ranks: Ranks):
    """Scales are those of shards: near, not equal. Compiled equals eager all the same."""
    ranks(as_on_one_rank, kind, sequence_parallel, how, True)


def initialisation() -> None:
    for kind in KINDS:
        whole, split = build(kind), build(kind, tp_group=world(), sequence_parallel=True)
        shardings = split.shardings()
        for name, parameter in split.named_parameters():
            expected = whole.get_parameter(name)
            expected = shard_of(expected, shardings[name]) if name in shardings else expected
            assert torch.equal(parameter, expected), (kind, name)


def test_initial_values_are_those_of_one_rank(ranks: Ranks):
    ranks(initialisation)


def late_group() -> None:
    """Built with a number of ranks, which are named later."""
    for kind in ("column", "norm_linear, norm gathered", "gated mlp"):
        problem = Problem(kind, True)
        known = build(kind, tp_group=world(), sequence_parallel=True)
        late = build(kind, seed=3, tp_size=2, sequence_parallel=True)
        assert "needs their group" in message(late, problem.input(problem.x))
        late.set_tensor_parallel_group(world())
        load_sharded_state(late, build(kind).state_dict())
        given = problem.input(problem.x), problem.output(problem.dy)
        given += () if problem.d_norm is None else (problem.norm_grad(problem.d_norm),)
        pairs = zip(run(known, "eager", *given), run(late, "eager", *given), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert "must have 2 ranks" in message(late.set_tensor_parallel_group, alone())


def test_the_ranks_may_be_named_later(ranks: Ranks):
    ranks(late_group)


def delayed() -> None:
    for kind in ("column", "norm_linear", "gated mlp"):
        problem = Problem(kind, True)
        options = {"tp_group": world(), "sequence_parallel": True, "recipe": Float8CurrentScaling()}
        direct, later = build(kind, **options), build(kind, **options, delay_wgrad_compute=True)
        given = problem.input(problem.x), problem.output(problem.dy)
        run(direct, "eager", *given)
        for how in HOW:
            run(later, how, *given)
            later.backward_dw()
            for (name, a), b in zip(direct.named_parameters(), later.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad), (kind, how, name)


def test_delayed_weight_gradients(ranks: Ranks):
    ranks(delayed)


def check_state(module: Any, whole: dict[str, Tensor]) -> None:
    shardings: dict[str, Sharding] = module.shardings()
    for name, value in module.state_dict().items():
        expected = whole[name]
        if name in shardings and shardings[name].group is not None:
            expected = shard_of(expected, shardings[name])
        assert torch.equal(value, expected), name


def checkpoints(folder: str) -> None:
    """World 2, then 1, then 2 again: halves of a gated MLP's first weight stay halves."""
    kind = "gated mlp"
    options = {"tp_group": world(), "sequence_parallel": True}
    split, whole = build(kind, **options), build(kind).state_dict()
    quietly(dcp.save, sharded_state(split), checkpoint_id=f"{folder}/two")
    one = build(kind, seed=1)
    quietly(dcp.load, sharded_state(one), checkpoint_id=f"{folder}/two", no_dist=True)
    check_state(one, whole)
    if rank() == 0:
        quietly(dcp.save, sharded_state(one), checkpoint_id=f"{folder}/one", no_dist=True)
    dist.barrier()
    back = build(kind, seed=2, **options)
    quietly(dcp.load, sharded_state(back), checkpoint_id=f"{folder}/one")
    check_state(back, whole)
    for state in (whole, sharded_state(split)):
        other = build(kind, seed=3, **options)
        load_sharded_state(other, state, strict=True)
        check_state(other, whole)


def test_checkpoints_fit_any_number_of_ranks(ranks: Ranks, tmp_path):
    ranks(checkpoints, str(tmp_path))


class Block(nn.Module):
    """A norm behind a tensor-parallel layer, in a checkpoint."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"tp_group": world(), "recipe": recipe, "device": device()}
        self.proj = lowp.Linear(K, K, parallel_mode="row", **options)
        self.norm = lowp.LayerNormLinear(K, N, parallel_mode="column", **options)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.norm(x + self.proj(part(x, 1))), x, use_reentrant=False)


def checkpointed_norm(fp8: bool) -> None:
    block = Block(Float8CurrentScaling() if fp8 else None)
    x, dy = torch.randn(M, K).to(device()), part(torch.randn(M, N).to(device()), 1)
    expected = run(block, "eager", x, dy)
    for how in ("operation", "kernel"):
        assert all(torch.equal(a, b) for a, b in zip(run(block, how, x, dy), expected, strict=True))


@pytest.mark.parametrize("fp8", [False, True])
def test_case_86_a_compiled_norm_behind_tensor_parallelism(fp8, ranks: Ranks):
    ranks(checkpointed_norm, fp8)


def async_input() -> None:
    """What torch's own collectives give is waited for when it is read."""
    module = build("norm_linear", recipe=Float8CurrentScaling())
    x = torch.randn(M, K).to(device())
    group = world()
    waited = torch.ops._c10d_functional.all_reduce.default(x, "sum", group.group_name)
    expected = module(torch.ops._c10d_functional.wait_tensor.default(waited))
    for call in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        pending = AsyncCollectiveTensor(torch.ops._c10d_functional.all_reduce.default(x, "sum", group.group_name))
        assert torch.equal(call(pending), expected)


def test_case_86_the_result_of_a_collective_that_is_not_waited_for(ranks: Ranks):
    ranks(async_input)
