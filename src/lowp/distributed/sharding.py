"""State that is sharded over a tensor-parallel group: saving it, loading it, and completing its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lowp.distributed.collectives import all_reduce, group_size
from lowp.errors import Unsupported, fail


class Sharding(NamedTuple):
    """How a parameter is split: along `dim`, over `group`."""

    dim: int
    group: ProcessGroup


def sharded_state(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` with every tensor-parallel parameter as a DTensor of its whole size.

    `torch.distributed.checkpoint` saves and loads it whatever the number of ranks: the DTensors share memory with the
    parameters, so that loading into the result loads the module.

        torch.distributed.checkpoint.save(sharded_state(model), checkpoint_id=path)
        torch.distributed.checkpoint.load(sharded_state(model), checkpoint_id=path)

    Args:
        module: any module; operations inside tell which of their parameters are sharded.

    Returns:
        Names as in `state_dict`, to DTensors of the sharded parameters and plain tensors of all others.

    Raises:
        Unsupported: a tensor-parallel parameter is sharded by FSDP as well.
    """
    state = module.state_dict()
    meshes: dict[str, DeviceMesh] = {}
    for prefix, operation in module.named_modules():
        for name, sharding in _shardings(operation).items():
            key = f"{prefix}.{name}" if prefix else name
            local = state[key].detach()
            if isinstance(local, DTensor):
                fail(
                    "sharded_state",
                    "parameters must not be sharded by FSDP as well",
                    got=key,
                    hint="Save one checkpoint for each tensor-parallel rank with torch.distributed.checkpoint instead.",
                    error=Unsupported,
                )
            group_name = sharding.group.group_name
            if group_name not in meshes:
                meshes[group_name] = DeviceMesh.from_group(sharding.group, local.device.type)
            state[key] = DTensor.from_local(local, meshes[group_name], [Shard(sharding.dim)], run_check=False)
    return state


def load_sharded_state(module: nn.Module, state: dict[str, Any], *, strict: bool = True) -> Any:
    """`module.load_state_dict` of what `sharded_state` gave under the same group, or of whole tensors.

    Args:
        module: as for `sharded_state`.
        state: DTensors, or tensors of the whole size, of which each rank takes its part.
        strict: as for `load_state_dict`.

    Returns:
        As `load_state_dict`.
    """
    local = {key: value.to_local() if isinstance(value, DTensor) else value for key, value in state.items()}
    for prefix, operation in module.named_modules():
        for name, sharding in _shardings(operation).items():
            key = f"{prefix}.{name}" if prefix else name
            parameter = operation.get_parameter(name)
            if key in local and local[key].shape != parameter.shape:
                local[key] = shard_of(local[key], sharding)
    return module.load_state_dict(local, strict=strict)


def shard_of(whole: Tensor, sharding: Sharding) -> Tensor:
    """This rank's part of a whole tensor."""
    return whole.tensor_split(group_size(sharding.group), sharding.dim)[sharding.group.rank()]


def init_sharded_(
    parameter: Tensor, whole_shape: tuple[int, ...], sharding: Sharding | None, init: Callable[[Tensor], Any]
) -> None:
    """Initialise a parameter by the same function of the seed on any number of ranks.

    Args:
        parameter: this rank's part.
        whole_shape: of the whole parameter, which is drawn on every rank.
        sharding: how it is split; None: it is whole.
        init: fills a tensor in place.
    """
    if not parameter.numel():
        return
    if sharding is None:
        init(parameter)
        return
    whole = torch.empty(whole_shape, device=parameter.device, dtype=parameter.dtype)
    init(whole)
    with torch.no_grad():
        parameter.copy_(shard_of(whole, sharding))


def reduce_sequence_parallel_grads(module: nn.Module, group: ProcessGroup) -> None:
    """Sum the partial gradients of parameters that sequence parallelism leaves partial.

    Such parameters carry `sequence_parallel = True`, or are named by their operation: FSDP replaces parameters and
    drops what they carried. Call it once, after backward and before the optimizer.

    Args:
        module: its parameters' `grad` and `main_grad`, where there are any, are summed in place.
        group: the tensor-parallel group.
    """
    partial = _partial_parameters(module)
    found = [grad for p in partial for grad in (p.grad, getattr(p, "main_grad", None)) if grad is not None]
    grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in found]
    with torch.no_grad():
        sums = [all_reduce(grad, group) for grad in grads]
        for grad, total in zip(grads, sums, strict=True):
            grad.copy_(total.wait())


def _partial_parameters(module: nn.Module) -> list[nn.Parameter]:
    found = {id(p): p for p in module.parameters() if getattr(p, "sequence_parallel", False)}
    for operation in module.modules():
        named = getattr(operation, "partial_gradients", None)
        for name in named() if callable(named) else ():
            parameter = operation._parameters.get(name)
            if parameter is not None:
                found[id(parameter)] = parameter
    return list(found.values())


def _shardings(operation: nn.Module) -> dict[str, Sharding]:
    shardings = getattr(operation, "shardings", None)
    return shardings() if callable(shardings) else {}
