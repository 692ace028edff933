"""Triton, or stand-ins that let kernel files be imported without it.

Without Triton, `jit` leaves a kernel as it is: only launchers, which run for CUDA tensors alone, ever call one.
"""

from __future__ import annotations

from typing import Any

from lowp.tape import active_tape
from lowp.torch_compat import current_cuda_stream

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


def cdiv(size: int, block: int) -> int:
    """Blocks that cover `size`; `triton.cdiv` on the host costs more than a torch call."""
    return -(-size // block)


class _Compiled:
    """A compiled kernel, launched with less host work than Triton's own call."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._launch, self._fixed = _private_launcher(kernel)

    def __call__(self, stream: int, grid: tuple[int, int, int], *args: Any) -> None:
        if self._launch is None or launches_are_hooked():
            self._kernel[grid](*args, stream=stream)
        else:
            self._launch(*grid, stream, *self._fixed, *args)


def launches_are_hooked() -> bool:
    """Whether something, a profiler say, wants to hear of launches: only Triton's own call tells it.

    Triton 3.6 has a chain of hooks that is always there and holds those added in `calls`; other versions have None or
    a function.
    """
    for hook in (_HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def _private_launcher(kernel: Any) -> tuple[Any, tuple[Any, ...]]:
    """The C function behind Triton 3.6's launcher, and its arguments between stream and kernel arguments.

    Triton's own call costs the host twice as much. Other versions, and kernels that need scratch memory, take that one.
    """
    launcher = kernel.run
    if not triton.__version__.startswith("3.6.") or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None, ()
    options = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
    return launcher.launch, (kernel.function, *options, kernel.packed_metadata, None, None, None)


_COMPILED: dict[Any, _Compiled] = {}


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
        compiled = _COMPILED[key] = _Compiled(kernel[grid](*args, *constants, **options))
    else:
        compiled(current_cuda_stream(device), grid, *args, *constants)
    tape = active_tape()
    if tape is not None:
        tape.launched(compiled, device, grid, (*args, *constants))


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
