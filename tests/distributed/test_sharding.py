"""Parameters that are split over ranks: initialised alike, saved and loaded on any number of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lowp import ops
from lowp.distributed import load_sharded_state, sharded_state
from tests.distributed.ranks import Ranks, alone, device, message, rank, world

D, H = 16, 32


class Block(nn.Module):
    """A parameter of every kind: split along either axis, owned by an operation or a facade, and whole."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device(), "tensor_parallel_group": group, "sequence_parallel": True}
        self.norm = nn.LayerNorm(D, device=device())
        self.up = ops.Linear(D, H, tensor_parallel_mode="column", **options)
        self.down = ops.Sequential(
            ops.BasicLinear(H, D, tensor_parallel_mode="row", **options),
            ops.Bias(D, device=device(), sequence_parallel=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


SPLIT_AXIS = {"up.weight": 0, "up.bias": 0, "down.0.weight": 1}


def seeded(group: Any, seed: int) -> Block:
    torch.manual_seed(seed)
    block = Block(group)
    with torch.no_grad():
        block.down[1].bias.copy_(torch.arange(D) + seed)
    return block


def part(name: str, whole: Tensor) -> Tensor:
    return whole.tensor_split(2, SPLIT_AXIS[name])[rank()] if name in SPLIT_AXIS else whole


def check_state(block: Block, whole: dict[str, Tensor], *, split: bool) -> None:
    assert list(block.state_dict()) == list(whole)
    for name, value in block.state_dict().items():
        assert torch.equal(value, part(name, whole[name]) if split else whole[name]), name


def same_initialisation() -> None:
    for seed in (0, 1):
        whole = seeded(alone(), seed).state_dict()
        plain = seeded(None, seed).state_dict()
        assert all(torch.equal(whole[name], plain[name]) for name in plain)
        split = seeded(world(), seed)
        check_state(split, whole, split=True)
        torch.manual_seed(seed + 10)
        split.up.reset_parameters()
        again = seeded(None, seed)
        torch.manual_seed(seed + 10)
        again.up.reset_parameters()
        check_state(split, again.state_dict(), split=True)
    torch.manual_seed(0)
    reference = nn.Linear(D, H, device=device())
    torch.manual_seed(0)
    ours = ops.Linear(D, H, device=device(), tensor_parallel_mode="column", tensor_parallel_group=world())
    assert torch.equal(ours.weight, part("up.weight", reference.weight))
    assert torch.equal(ours.bias, part("up.bias", reference.bias))


def test_initialisation_is_a_function_of_the_seed_alone(ranks: Ranks):
    ranks(same_initialisation)


def quietly(function: Any, *args: Any, **kwargs: Any) -> None:
    """Call a function of torch.distributed.checkpoint: it warns of a single process, and of its own API's future."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(*args, **kwargs)


def save_and_load(folder: str) -> None:
    """World 2, then world 1, then world 2 again; every load is into a module of other values."""
    split = seeded(world(), 0)
    whole = seeded(None, 0).state_dict()
    state = sharded_state(split)
    assert {name for name, value in state.items() if isinstance(value, DTensor)} == set(SPLIT_AXIS)
    assert all(value.shape == whole[name].shape for name, value in state.items())
    quietly(dcp.save, state, checkpoint_id=f"{folder}/two")

    one = seeded(None, 1)
    quietly(dcp.load, sharded_state(one), checkpoint_id=f"{folder}/two", no_dist=True)
    check_state(one, whole, split=False)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.mul_(2)
    whole = {name: value.clone() for name, value in one.state_dict().items()}
    if rank() == 0:
        quietly(dcp.save, sharded_state(one), checkpoint_id=f"{folder}/one", no_dist=True)
    dist.barrier()

    back = seeded(world(), 2)
    quietly(dcp.load, sharded_state(back), checkpoint_id=f"{folder}/one")
    check_state(back, whole, split=True)


def test_checkpoints_fit_any_number_of_ranks(ranks: Ranks, tmp_path):
    ranks(save_and_load, str(tmp_path))


def load_directly() -> None:
    whole = seeded(None, 0).state_dict()
    split = seeded(world(), 1)
    load_sharded_state(split, whole)
    check_state(split, whole, split=True)
    other = seeded(world(), 2)
    load_sharded_state(other, sharded_state(split))
    check_state(other, whole, split=True)
    load_sharded_state(seeded(None, 2), whole)
    torch_linear = nn.Linear(D, H, device=device())
    load_sharded_state(split.up, torch_linear.state_dict())
    assert torch.equal(split.up.weight, part("up.weight", torch_linear.weight))
    missing = load_sharded_state(split.up, {"weight": torch_linear.weight}, strict=False)
    assert missing.missing_keys == ["bias"]


def test_whole_and_sharded_states_load(ranks: Ranks):
    ranks(load_directly)


def fsdp_as_well() -> str:
    block = seeded(world(), 0)
    fully_shard(block, mesh=dist.device_mesh.DeviceMesh.from_group(alone(), device().type))
    return message(sharded_state, block)


def test_fsdp_and_tensor_parallelism_have_no_common_state(ranks: Ranks):
    for text in ranks(fsdp_as_well):
        assert text.startswith("sharded_state: parameters must not be sharded by FSDP as well, got up.weight")


@pytest.mark.parametrize("group", [None])
def test_without_a_group_the_state_is_the_state_dict(group):
    block = Block(group)
    assert sharded_state(block).keys() == block.state_dict().keys()
    assert not any(isinstance(value, DTensor) for value in sharded_state(block).values())
