"""A residual branch around a tensor-parallel layer: what is added is added once, on one rank and on two."""

from __future__ import annotations

import pytest
import torch

import lowp
from lowp import ops
from tests.distributed.exact import K, M, N, check_equal, exact, problem
from tests.distributed.ranks import Ranks, alone, device, world
from tests.distributed.test_tensor_parallel import RECIPES, Split

REASON = "it is applied once, after the sum over the ranks"


def matches_float64(world_size: int, mode: str, sequence_parallel: bool, recipe_name: str, compiled: bool) -> None:
    split = Split(mode, sequence_parallel, alone() if world_size == 1 else world())
    whole, dtype = problem(bias=False), torch.bfloat16
    linear = ops.BasicLinear(
        K,
        N,
        device=device(),
        dtype=dtype,
        tensor_parallel_mode="column" if split.column else "row",
        tensor_parallel_group=split.group,
        sequence_parallel=sequence_parallel,
    )
    with torch.no_grad():
        linear.weight.copy_(split.weight(whole.w))
    module = ops.Sequential(ops.MakeExtraOutput(), linear, ops.AddExtraInput(), recipe=RECIPES[recipe_name])
    declined = module.plan.splitlines()[3:]
    if world_size == 1:
        assert declined == []
    elif split.column:
        assert declined == [f"backward without BackwardLinearAdd[0]: {REASON}"]
    else:
        assert declined == [f"forward  without ForwardLinearAdd[1]: {REASON}"]
    added = exact(M, N, 7, odd_rows=False, odd_columns=False)
    d_extra = exact(M, K, 8, odd_rows=False, odd_columns=False)
    x, other = (t.to(device(), dtype).requires_grad_() for t in (split.input(whole.x), split.output(added)))
    grads = [split.output(whole.dy).to(device(), dtype), split.input(d_extra).to(device(), dtype)]
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    with lowp.compile_boundary("operation"):
        y, extra = call(x, other)
        torch.autograd.backward([y, extra], grads)
    check_equal(y.detach(), split.output(whole.y + added), "y")
    assert torch.equal(extra, x)
    check_equal(x.grad, split.input(whole.dx + d_extra), "dx")
    assert torch.equal(other.grad, grads[0])
    if not sequence_parallel:
        check_equal(linear.weight.grad, split.weight(whole.dw), "dw")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_equal_to_float64(ranks: Ranks, world_size, mode, sequence_parallel, recipe, compiled):
    ranks(matches_float64, world_size, mode, sequence_parallel, recipe, compiled)
