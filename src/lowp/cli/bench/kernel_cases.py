"""Which kernels are timed, as data: a new one is one entry of `KERNELS`.

Shape legend: M = rows, K = columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowp.cli.bench.cases import BF16_BYTES, FP8_BYTES
from lowp.cli.bench.check import relative_error
from lowp.formats import E4M3, E5M2
from lowp.kernels.amax import amax
from lowp.kernels.bias_grad import bias_grad
from lowp.kernels.cast import cast, cast_bias_grad
from lowp.quantizers import Float8CurrentScalingQuantizer


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
