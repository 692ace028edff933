"""Private Python names of torch, and what replaces them where a torch version lacks them.

Operators (`torch.ops`, `torch._scaled_mm`) are called where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_dispatch_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)
_functorch_level: Callable[[], int | None] | None = getattr(
    getattr(torch._C, "_functorch", None), "maybe_current_level", None
)


def dispatch_is_interposed() -> bool:
    """Whether a dispatch mode (fake tensors, selective checkpointing, counters) or a transform is active."""
    if _dispatch_modes is None or _functorch_level is None:
        return True
    return _dispatch_modes() > 0 or _functorch_level() is not None


_graph_task: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)


def backward_is_running() -> bool:
    """Whether this thread is inside a backward pass; False where torch can't tell."""
    return _graph_task is not None and _graph_task() != -1


def release_saved_tensors(ctx: Any) -> None:
    """Let an autograd.Function's context, in its backward, drop what it saved, unless the graph is kept."""
    release: Callable[[], None] | None = getattr(ctx, "maybe_clear_saved_tensors", None)
    if release is not None:
        release()


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` for plain tensors outside of all transforms, without the host work of looking for these."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def forward_ad_is_active() -> bool:
    """Whether a level of forward-mode differentiation is entered; False where torch can't tell."""
    return getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


current_cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""`torch.cuda.current_device()` where CUDA is known to be initialised, since a tensor is there."""

_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_cuda_stream(device: int) -> int:
    """The handle of the device's current stream."""
    return torch.cuda.current_stream(device).cuda_stream if _raw_stream is None else _raw_stream(device)


def fast_empty_strided(device: torch.device) -> Callable[[Any, Any, torch.dtype], torch.Tensor] | None:
    """`torch.empty_strided(shape, strides, dtype)` with less host work, on a CPU or on what is then the current GPU."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    return getattr(guards, f"_empty_strided_{device.type}", None) if device.type in ("cpu", "cuda") else None


def constant(number: Any) -> Any:
    """The number itself, also where it is symbolic in traced code: the graph then holds for this number only."""
    if not torch.compiler.is_compiling():
        return number
    from torch.fx.experimental import symbolic_shapes

    guard: Any = symbolic_shapes.__dict__.get("guard_scalar")
    return number if guard is None else guard(number)


def process_group(name: str) -> torch.distributed.ProcessGroup:
    """The process group of this name; there is no public way to look one up."""
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d.__dict__["_resolve_process_group"]
    return resolve(name)
