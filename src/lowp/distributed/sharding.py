"""State that is sharded over a tensor-parallel group: saving it, loading it, and completing its gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lowp.distributed.collectives import all_reduce, group_size
from lowp.errors import Unsupported, fail


@dataclass(frozen=True)
class Initialization:
    """How a parameter is initialised.

    Attributes:
        method: fills a tensor in place; None: the operation's own.
        rng_state_tracker: gives an object whose `fork()` is a context manager, as Megatron's does. A split parameter
            is drawn inside it, so that ranks draw from generators of their own.
    """

    method: Callable[[Tensor], Any] | None = None
    rng_state_tracker: Callable[[], Any] | None = None


DEFAULT_INITIALIZATION = Initialization()


class Sharding(NamedTuple):
    """How a parameter is split.

    Attributes:
        dim: the axis.
        group: the ranks; None: it is whole.
        parts: the axis is this many equal parts, each of which is split: a rank has its share of every part. As in the
            first layer of a gated MLP, whose rows are those of the gate, then those of the other factor.
    """

    dim: int
    group: ProcessGroup | None
    parts: int = 1


def sharded_state(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` with every tensor-parallel parameter as a DTensor of its whole size.

    `torch.distributed.checkpoint` saves and loads it whatever the number of ranks: the DTensors share memory with the
    parameters, so that loading into the result loads the module.

        torch.distributed.checkpoint.save(sharded_state(model), checkpoint_id=path)
        torch.distributed.checkpoint.load(sharded_state(model), checkpoint_id=path)

    Args:
        module: any module; operations inside tell which of their parameters are sharded.

    Returns:
        Names as in `state_dict`, to DTensors of the sharded parameters and plain tensors of all others. A parameter of
        several parts (see `Sharding`) has an axis of its own for them, on any number of ranks.

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
            local, dim = _by_part(local, sharding)
            state[key] = local
            if sharding.group is not None:
                group_name = sharding.group.group_name
                if group_name not in meshes:
                    meshes[group_name] = DeviceMesh.from_group(sharding.group, local.device.type)
                state[key] = DTensor.from_local(local, meshes[group_name], [Shard(dim)], run_check=False)
    return state


def _by_part(x: Tensor, sharding: Sharding) -> tuple[Tensor, int]:
    """A parameter with an axis of its own for the parts, if there are several, and the axis that is split."""
    if sharding.parts == 1:
        return x, sharding.dim
    return x.unflatten(sharding.dim, (sharding.parts, -1)), sharding.dim + 1


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
            if key not in local:
                continue
            value = local[key].flatten(sharding.dim, sharding.dim + local[key].ndim - parameter.ndim)
            local[key] = value if value.shape == parameter.shape else shard_of(value, sharding)
    return module.load_state_dict(local, strict=strict)


def shard_of(whole: Tensor, sharding: Sharding) -> Tensor:
    """This rank's part of a whole tensor."""
    if sharding.group is None:
        return whole
    by_part, dim = _by_part(whole, sharding)
    own = by_part.tensor_split(group_size(sharding.group), dim)[sharding.group.rank()]
    return own.flatten(sharding.dim, dim)


def init_sharded_(
    parameter: Tensor,
    whole_shape: tuple[int, ...],
    sharding: Sharding | None,
    initialization: Initialization,
    default: Callable[[Tensor], Any],
) -> None:
    """Initialise a parameter: by the same function of the seed on any number of ranks, unless a tracker says otherwise.

    Args:
        parameter: this rank's part.
        whole_shape: of the whole parameter, which is drawn on every rank.
        sharding: how it is split; None: it is whole, or it isn't known yet which part this rank has.
        initialization: how.
        default: fills a tensor in place, where `initialization` has no method.
    """
    if not parameter.numel():
        return
    fill, is_whole = initialization.method or default, parameter.shape == whole_shape
    tracker = None if is_whole else initialization.rng_state_tracker
    with nullcontext() if tracker is None else tracker().fork(), torch.no_grad():
        if is_whole:
            fill(parameter)
            return
        whole = torch.empty(whole_shape, device=parameter.device, dtype=parameter.dtype)
        fill(whole)
        known = sharding is not None and sharding.group is not None
        parameter.copy_(shard_of(whole, sharding) if known else whole[tuple(slice(n) for n in parameter.shape)])  # type: ignore[arg-type]


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
