"""What is timed, as data: a new module is one entry of `MODULES`, a new kernel one of `KERNELS`.

Shape legend: T = tokens, N = out features, K = in features, M = rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lowp import ops
from lowp.formats import E4M3, E5M2
from lowp.kernels.amax import amax
from lowp.kernels.bias_grad import bias_grad
from lowp.kernels.cast import cast, cast_bias_grad
from lowp.quantizers import Float8CurrentScalingQuantizer

BF16_BYTES = 2
FP8_BYTES = 1


@dataclass(frozen=True, kw_only=True)
class ModuleCase:
    """A module's forward and backward.

    Attributes:
        name: of the table and of `--only`.
        tokens: T, one measurement each.
        linears: `(N, K)` of each linear layer, in order; the first one's K is the module's input.
        reference: builds torch's own module.
        lowp: builds lowp's, with parameters in the same order as the reference's.
        other_elements: bf16 values a token that must be read or written besides quantizing the GEMMs' operands.
        host: report the time on the host, in us, on sizes where the device's time doesn't matter.
    """

    name: str
    tokens: tuple[int, ...]
    linears: tuple[tuple[int, int], ...]
    reference: Callable[[], nn.Module]
    lowp: Callable[[], nn.Module]
    other_elements: int = 0
    host: bool = False

    def flop(self, tokens: int) -> int:
        """Floating-point operations of all GEMMs, forward and backward."""
        return sum(3 * 2 * tokens * n * k for n, k in self.linears)


def linear_bias(name: str, n: int, k: int, tokens: tuple[int, ...], *, host: bool = False) -> ModuleCase:
    """A linear layer with bias."""
    return ModuleCase(
        name=name,
        tokens=tokens,
        linears=((n, k),),
        reference=lambda: nn.Linear(k, n),
        lowp=lambda: ops.Sequential(ops.BasicLinear(k, n), ops.Bias(n)),
        host=host,
    )


MODULES: tuple[ModuleCase, ...] = (
    linear_bias("linear+bias 4096x4096", 4096, 4096, (8192, 16384)),
    linear_bias("host: linear+bias 256x256", 256, 256, (64,), host=True),
)

QUICK_MODULES: tuple[ModuleCase, ...] = (
    linear_bias("linear+bias 64x48", 64, 48, (32,)),
    linear_bias("host: linear+bias 32x32", 32, 32, (16,), host=True),
)
"""Tiny stand-ins for `--quick`, which only shows that everything runs."""


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """A kernel that moves memory.

    Attributes:
        name: of the table and of `--only`.
        shapes: `[M, K]` of the bf16 input, one measurement each.
        prepare: `x_MK -> call`; what `call` gives is what `check` gets.
        bytes_per_element: read and written, of one input value.
        check: `(x_MK, result) -> error`, a number that is at most `tolerance` where the kernel is right.
        tolerance: from the format.
    """

    name: str
    shapes: tuple[tuple[int, int], ...]
    prepare: Callable[[Tensor], Callable[[], object]]
    bytes_per_element: int
    check: Callable[[Tensor, object], float]
    tolerance: float


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """`|actual - expected| / |expected|` in the L2 norm, in fp32."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


_SPEC = Float8CurrentScalingQuantizer(fmt=E4M3)
_GRAD_SPEC = Float8CurrentScalingQuantizer(fmt=E5M2)
_SHAPES = ((8192, 4096), (16384, 4096), (16384, 14336))  # 64, 128 and 448 MiB of bf16


def _amax_error(x_MK: Tensor, result: object) -> float:
    return float((_tensor(result).max() - x_MK.abs().max().float()).abs())


def _cast_error(x_MK: Tensor, result: object) -> float:
    """Of what dequantizing gives, row and column copy alike."""
    assert isinstance(result, tuple)
    row, column, scale, *sums = result
    M, K = x_MK.shape
    errors = []
    if row is not None:
        errors.append(relative_error(row[:, :K].float() * scale, x_MK))
    if column is not None:
        errors.append(relative_error(column[:, :M].float().t() * scale, x_MK))
    errors += [relative_error(total, x_MK.float().sum(0)) for total in sums]
    return max(errors)


def _sum_error(x_MK: Tensor, result: object) -> float:
    return relative_error(_tensor(result), x_MK.float().sum(0))


def _tensor(result: object) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def _cast(row: bool, column: bool) -> Callable[[Tensor], Callable[[], object]]:
    def prepare(x_MK: Tensor) -> Callable[[], object]:
        amax_P = amax(x_MK)
        return lambda: cast(x_MK, amax_P, _SPEC, row=row, column=column)

    return prepare


def _cast_bias_grad(x_MK: Tensor) -> Callable[[], object]:
    amax_P = amax(x_MK)
    return lambda: cast_bias_grad(x_MK, amax_P, _GRAD_SPEC, row=True, column=True)


KERNELS: tuple[KernelCase, ...] = (
    KernelCase(
        name="kernel: amax",
        shapes=_SHAPES,
        prepare=lambda x_MK: lambda: amax(x_MK),
        bytes_per_element=BF16_BYTES,
        check=_amax_error,
        tolerance=0.0,
    ),
    KernelCase(
        name="kernel: cast",
        shapes=_SHAPES,
        prepare=_cast(row=True, column=False),
        bytes_per_element=BF16_BYTES + FP8_BYTES,
        check=_cast_error,
        tolerance=E4M3.eps / 2,
    ),
    KernelCase(
        name="kernel: cast + transpose",
        shapes=_SHAPES,
        prepare=_cast(row=True, column=True),
        bytes_per_element=BF16_BYTES + 2 * FP8_BYTES,
        check=_cast_error,
        tolerance=E4M3.eps / 2,
    ),
    KernelCase(
        name="kernel: bias gradient",
        shapes=_SHAPES,
        prepare=lambda x_MK: lambda: bias_grad(x_MK),
        bytes_per_element=BF16_BYTES,
        check=_sum_error,
        tolerance=torch.finfo(torch.bfloat16).eps,
    ),
    KernelCase(
        name="kernel: cast + transpose + bias gradient",
        shapes=_SHAPES,
        prepare=_cast_bias_grad,
        bytes_per_element=BF16_BYTES + 2 * FP8_BYTES,
        check=_cast_error,
        tolerance=E5M2.eps / 2,
    ),
)

QUICK_KERNELS = tuple(replace(case, shapes=((64, 48),)) for case in KERNELS)
