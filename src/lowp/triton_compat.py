"""Triton or stand-ins for it, and its private names with what replaces them in other versions.

Without Triton, `jit` leaves a kernel as it is: only launchers, which run for CUDA tensors alone, ever call one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl

    jit: Any = triton.jit
    constexpr: Any = tl.constexpr
    _HOOKS: Any = triton.knobs.runtime
except ImportError:

    def jit(kernel: Any) -> Any:
        """Leave the kernel as it is: nothing can launch it."""
        return kernel

    def constexpr(value: Any) -> Any:
        """Leave the value as it is."""
        return value

    triton = tl = _HOOKS = None

__all__ = ["constexpr", "jit", "launches_are_hooked", "short_launch", "tl", "triton"]


def launches_are_hooked() -> bool:
    """Whether something, a profiler say, wants to hear of launches: only Triton's own call tells it.

    Triton 3.6 has a chain of hooks that is always there and holds those added in `calls`; other versions have None or
    a function.
    """
    if _HOOKS is None:
        return False
    for hook in (_HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def short_launch(kernel: Any) -> tuple[Callable[..., None] | None, tuple[Any, ...]]:
    """The C function behind Triton 3.6's launcher, and its arguments between stream and kernel arguments.

    Triton's own call costs the host twice as much. Other versions, and kernels that need scratch memory, have None.

    Args:
        kernel: a compiled kernel.
    """
    launcher = kernel.run
    if not triton.__version__.startswith("3.6.") or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None, ()
    options = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
    return launcher.launch, (kernel.function, *options, kernel.packed_metadata, None, None, None)
