"""Triton, or stand-ins that let kernel files be imported without it.

Without Triton, `jit` leaves a kernel as it is: only launchers, which run for CUDA tensors alone, ever call one.
"""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl

    jit: Any = triton.jit
except ImportError:

    def jit(kernel: Any) -> Any:
        """Leave the kernel as it is: nothing can launch it."""
        return kernel

    triton = tl = None

__all__ = ["jit", "tl", "triton"]
