"""Triton, or stand-ins that let kernel files be imported without it.

Without Triton, `jit` leaves a kernel as it is: only launchers, which run for CUDA tensors alone, ever call one.
"""

from __future__ import annotations

from typing import Any

from lowp.torch_compat import current_cuda_stream

try:
    import triton
    import triton.language as tl

    jit: Any = triton.jit
    constexpr: Any = tl.constexpr
except ImportError:

    def jit(kernel: Any) -> Any:
        """Leave the kernel as it is: nothing can launch it."""
        return kernel

    def constexpr(value: Any) -> Any:
        """Leave the value as it is."""
        return value

    triton = tl = None


def cdiv(size: int, block: int) -> int:
    """Blocks that cover `size`; `triton.cdiv` on the host costs more than a torch call."""
    return -(-size // block)


_COMPILED: dict[Any, Any] = {}


def launch(
    kernel: Any,
    programs: int | tuple[int, int],
    args: tuple[Any, ...],
    constants: tuple[Any, ...],
    *,
    num_warps: int,
    maxnreg: int | None = None,
    enable_fp_fusion: bool = True,
) -> None:
    """Launch a kernel, whose `tl.constexpr` parameters come last, with less host work than `kernel[grid](...)`.

    The compiled kernel that Triton's own launch gives is kept under what Triton specializes on (dtypes, alignment,
    sizes of 1, multiples of 16, 64-bit sizes) and is called directly from then on.

    Args:
        kernel: a `jit` function.
        programs: the grid.
        args: all arguments but the constants: tensors, the first one too, None, numbers, and tuples of these.
        constants: the `tl.constexpr` arguments.
        num_warps: warps of a program.
        maxnreg: registers of a thread at most.
        enable_fp_fusion: whether the compiler may round a product and a sum once; always the same for a kernel.
    """
    device = args[0].device.index
    key = (id(kernel), device, num_warps, maxnreg, constants, *[_specialized(arg) for arg in args])
    compiled = _COMPILED.get(key)
    grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
    if compiled is None:
        options = {"num_warps": num_warps, "maxnreg": maxnreg, "enable_fp_fusion": enable_fp_fusion}
        _COMPILED[key] = kernel[grid](*args, *constants, **options)
    else:
        compiled[grid](*args, *constants, stream=current_cuda_stream(device))


def _specialized(arg: Any) -> Any:
    kind = type(arg)
    if kind is int:
        return arg == 1 or (arg > _INT32_MAX, arg % 16 == 0)
    if kind is float or arg is None:
        return kind
    if kind is tuple:
        return tuple([_specialized(item) for item in arg])
    return arg.dtype, arg.data_ptr() % 16 == 0


_INT32_MAX = 2**31 - 1

__all__ = ["cdiv", "constexpr", "jit", "launch", "tl", "triton"]
