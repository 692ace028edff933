"""Launches of kernels that are written in Triton."""

from __future__ import annotations

from typing import Any

from lowp.tape import active_tape
from lowp.torch_compat import current_cuda_stream
from lowp.triton_compat import constexpr, jit, launches_are_hooked, short_launch, tl, triton


def cdiv(size: int, block: int) -> int:
    """Blocks that cover `size`; `triton.cdiv` on the host costs more than a torch call."""
    return -(-size // block)


class Launcher:
    """A compiled kernel, launched with less host work than Triton's own call."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._short, self._fixed = short_launch(kernel)

    def way(self, grid: tuple[int, int, int]) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
        """`function, before, after`: `function(*before, stream, *after, *args)` launches, as things stand."""
        if self._short is None or launches_are_hooked():
            return self._of_triton, (), (grid,)
        return self._short, grid, self._fixed

    def _of_triton(self, stream: int, grid: tuple[int, int, int], *args: Any) -> None:
        self._kernel[grid](*args, stream=stream)

    def __call__(self, stream: int, grid: tuple[int, int, int], *args: Any) -> None:
        function, before, after = self.way(grid)
        function(*before, stream, *after, *args)


_LAUNCHERS: dict[Any, Launcher] = {}


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
    launcher = _LAUNCHERS.get(key)
    grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
    if launcher is None:
        options = {"num_warps": num_warps, "maxnreg": maxnreg, "enable_fp_fusion": enable_fp_fusion}
        launcher = _LAUNCHERS[key] = Launcher(kernel[grid](*args, *constants, **options))
    else:
        launcher(current_cuda_stream(device), grid, *args, *constants)
    tape = active_tape()
    if tape is not None:
        tape.launched(*launcher.way(grid), device, (*args, *constants))


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
