"""Norms in front of a tensor-parallel layer: with split tokens each rank has part of the parameters' gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowp import ops
from lowp.distributed import reduce_sequence_parallel_grads
from tests.distributed.exact import K, M, N, exact
from tests.distributed.ranks import Ranks, device, world
from tests.distributed.test_tensor_parallel import RECIPES, Split

BF16 = torch.bfloat16


def norm_and_linear(kind: str, sequence_parallel: bool, group: Any) -> ops.Sequential:
    norms = {"layer": ops.LayerNorm, "rms": ops.RMSNorm}
    return ops.Sequential(
        ops.MakeExtraOutput(),
        norms[kind](K, device=device(), dtype=torch.float32, sequence_parallel=sequence_parallel),
        ops.BasicLinear(
            K,
            N,
            device=device(),
            dtype=BF16,
            tensor_parallel_mode="column" if group else None,
            tensor_parallel_group=group,
            sequence_parallel=sequence_parallel,
        ),
        ops.SwiGLU(),
    )


def equals_one_rank(kind: str, sequence_parallel: bool, recipe_name: str, compiled: bool) -> None:
    """Against the same operations on one rank, with the whole of everything; each gate's halves on one rank."""
    split = Split("column", sequence_parallel, world())
    torch.manual_seed(5)
    whole = norm_and_linear(kind, False, None)
    for parameter in whole[1].parameters():
        torch.nn.init.normal_(parameter)
    parallel = norm_and_linear(kind, sequence_parallel, world())
    halves = torch.arange(N).view(2, 2, N // 4).transpose(0, 1).reshape(N)  # rows of the weight, by rank
    with torch.no_grad():
        for name, parameter in parallel[1].named_parameters():
            parameter.copy_(whole[1].get_parameter(name))
        parallel[2].weight.copy_(split.weight(whole[2].weight[halves]))
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(1)).to(device(), BF16)
    dy = exact(M, N // 2, 3, odd_rows=True, odd_columns=True).to(device(), BF16)
    extra = exact(M, K, 4, odd_rows=True, odd_columns=True).to(device(), BF16)
    results = []
    for module, part in ((whole, lambda t: t), (parallel, split.input)):
        module.recipe = RECIPES[recipe_name]
        own = part(x).detach().requires_grad_()
        call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        y, copy = call(own)
        grad = dy if module is whole else split.output(dy)
        torch.autograd.backward([y, copy], [grad.contiguous(), part(extra).contiguous()])
        if module is parallel:
            reduce_sequence_parallel_grads(module, world())
        results.append([y.detach(), own.grad, *[p.grad for p in module[1].parameters()]])
    expected = [split.output(results[0][0]), split.input(results[0][1]), *results[0][2:]]
    eps = torch.finfo(BF16).eps if recipe_name == "bf16" else 2.0**-2
    for result, reference in zip(results[1], expected, strict=True):
        assert result.shape == reference.shape
        error = (result.double() - reference.double()).norm() / reference.double().norm()
        assert error <= 2 * eps, f"{error.item()}"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_equal_to_one_rank(ranks: Ranks, kind, sequence_parallel, recipe, compiled):
    ranks(equals_one_rank, kind, sequence_parallel, recipe, compiled)
