"""Private torch API, all of it, each with a fallback that is slower but right."""

from __future__ import annotations

from typing import Any

import torch


def _dispatch_modes() -> int:
    return torch._C._len_torch_dispatch_stack()


def _functorch_level() -> int | None:
    return torch._C._functorch.maybe_current_level()


def _private_api_present() -> bool:
    try:
        _dispatch_modes(), _functorch_level()
    except (AttributeError, RuntimeError):
        return False
    return True


_PRESENT = _private_api_present()


def dispatch_is_interposed() -> bool:
    """Whether a dispatch mode (fake tensors, selective checkpointing, counters) or a transform is active."""
    if not _PRESENT:
        return True
    return _dispatch_modes() > 0 or _functorch_level() is not None


def constant(number: Any) -> Any:
    """The number itself, also where it is symbolic in traced code: the graph then holds for this number only."""
    if not torch.compiler.is_compiling():
        return number
    from torch.fx.experimental import symbolic_shapes

    guard: Any = symbolic_shapes.__dict__.get("guard_scalar")
    return number if guard is None else guard(number)


def process_group(name: str) -> torch.distributed.ProcessGroup:
    """The process group of this name."""
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d.__dict__["_resolve_process_group"]
    return resolve(name)
