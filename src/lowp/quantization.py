"""Quantization as users and operations call it: `quantize`, and the operand copies of GEMMs.

To add a way to quantize, register its spec's class here once with `register_quantizer`.

Shape legend: M = rows, K = features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.errors import require
from lowp.formats import HIGH_PRECISION
from lowp.kernels.amax import amax
from lowp.kernels.cast import cast, cast_bias_grad
from lowp.kernels.cast_kernel import finds_amax
from lowp.kernels.dequantize import dequantize_data
from lowp.kernels.materialize import materialize
from lowp.kernels.sources import Source
from lowp.quantizers import Float8CurrentScalingQuantizer, Quantizer
from lowp.replay import forget_all


class Quantized(NamedTuple):
    """A quantized matrix: either copy may be absent.

    Attributes:
        row_data: `[..., K]` quantized along the last axis, row-major.
        row_scale: fp32; multiplies to dequantize `row_data`.
        column_data: `[K, M]` quantized along the first axes, stored transposed, row-major.
        column_scale: fp32; multiplies to dequantize `column_data`.
    """

    row_data: Tensor | None
    row_scale: Tensor | None
    column_data: Tensor | None
    column_scale: Tensor | None

    @property
    def row(self) -> tuple[Tensor, Tensor]:
        """`row_data` and `row_scale`, which must be there."""
        return self.row_data, self.row_scale  # type: ignore[return-value]

    @property
    def column(self) -> tuple[Tensor, Tensor]:
        """`column_data` and `column_scale`, which must be there."""
        return self.column_data, self.column_scale  # type: ignore[return-value]


class QuantizeRequest(NamedTuple):
    """What a neighbouring operation wants to be handed.

    Attributes:
        quantizer: how it quantizes what it reads.
        row, column: the copies that it reads.
        size: of the last axis.
        high_precision: it reads the values in high precision too.
    """

    quantizer: Quantizer
    row: bool
    column: bool
    size: int
    high_precision: bool = False


class _Method(NamedTuple):
    measure: Callable[[Any], Tensor | None]
    cast: Callable[..., Quantized]
    cast_bias_grad: Callable[..., tuple[Quantized, Tensor]]
    takes_sources: bool
    measures_itself: Callable[[int, int], bool] | None

    def values(self, x_MK: Tensor | Source) -> Tensor | Source:
        """What the method takes: a source as it is, or its values."""
        return materialize(x_MK) if isinstance(x_MK, Source) and not self.takes_sources else x_MK

    def statistics(self, x_MK: Tensor | Source, given: Tensor | None) -> Tensor | None:
        """What the method is given."""
        return self.measure(x_MK) if given is None and self.measures_itself is None else given


_METHODS: dict[type[Quantizer], _Method] = {}


def register_quantizer(
    spec: type[Quantizer],
    *,
    measure: Callable[[Any], Tensor | None],
    cast: Callable[..., Quantized],
    cast_bias_grad: Callable[..., tuple[Quantized, Tensor]],
    takes_sources: bool = False,
    measures_itself: Callable[[int, int], bool] | None = None,
) -> None:
    """Say how a class of quantizer specs is applied.

    Args:
        spec: the class of the specs.
        measure: `x_MK -> statistics`, what the scale needs to know of the whole tensor; None: nothing.
        cast: `(x_MK, statistics, spec, row, column) -> Quantized`, data padded along the contraction axis.
        cast_bias_grad: `(x_MK, statistics, spec, row, column, dtype) -> (Quantized, column sums of x_MK [K])`.
        takes_sources: whether `x_MK` may be a source (lowp.kernels.sources), whose values are then never written to
            memory; otherwise the three are given tensors only.
        measures_itself: `(M, K) -> whether finding the statistics is cheaper in a cast than in a launch of its own`;
            the two casts are then given None for statistics that nobody asked for, whatever the size, and find them.
            None: they are always given what `measure` gives.
    """
    forget_all()  # another class may have had this one's name
    _METHODS[spec] = _Method(measure, cast, cast_bias_grad, takes_sources, measures_itself)


def _per_tensor(row_data: Tensor | None, column_data: Tensor | None, scale: Tensor) -> Quantized:
    return Quantized(
        row_data, scale if row_data is not None else None, column_data, scale if column_data is not None else None
    )


def _cast_per_tensor(
    x_MK: Tensor | Source, statistics: Tensor | None, spec: Float8CurrentScalingQuantizer, row: bool, column: bool
) -> Quantized:
    return _per_tensor(*cast(x_MK, statistics, spec, row=row, column=column))


def _cast_bias_grad_per_tensor(
    x_MK: Tensor | Source,
    statistics: Tensor | None,
    spec: Float8CurrentScalingQuantizer,
    row: bool,
    column: bool,
    dtype: torch.dtype,
) -> tuple[Quantized, Tensor]:
    row_data, column_data, scale, bias_grad = cast_bias_grad(
        x_MK, statistics, spec, row=row, column=column, dtype=dtype
    )
    return _per_tensor(row_data, column_data, scale), bias_grad


register_quantizer(
    Float8CurrentScalingQuantizer,
    measure=amax,
    cast=_cast_per_tensor,
    cast_bias_grad=_cast_bias_grad_per_tensor,
    takes_sources=True,
    measures_itself=finds_amax,
)


def measure(x_MK: Tensor | Source, spec: Quantizer) -> Tensor | None:
    """What the scale of `spec` needs to know of the whole tensor (the amax), before it is cast."""
    method = _METHODS[type(spec)]
    return method.measure(method.values(x_MK))


def measure_once(x_MK: Tensor, spec: Quantizer) -> Tensor | None:
    """The same for a tensor that is cast several times; None where each cast finds it itself for less."""
    measures_itself = _METHODS[type(spec)].measures_itself
    if measures_itself is not None and measures_itself(*x_MK.shape):
        return None
    return measure(x_MK, spec)


def measures_amax(spec: Quantizer) -> bool:
    """Whether `measure` gives the amax: who worked it out already needn't ask."""
    return _METHODS[type(spec)].measure is amax


def cast_operand(
    x_MK: Tensor | Source, statistics: Tensor | None, spec: Quantizer, *, row: bool, column: bool
) -> Quantized:
    """Cast `x_MK` to the operand copies that a GEMM reads, padded along the contraction axis.

    Args:
        x_MK: the values.
        statistics: that `measure` gave, of these values or of more; None: they are found here.
        spec: how.
        row: whether the copy along K is wanted.
        column: whether the copy along M is.
    """
    method = _METHODS[type(spec)]
    values = method.values(x_MK)
    return method.cast(values, method.statistics(values, statistics), spec, row, column)


def cast_operand_bias_grad(
    x_MK: Tensor | Source, statistics: Tensor | None, spec: Quantizer, *, row: bool, column: bool, dtype: torch.dtype
) -> tuple[Quantized, Tensor]:
    """`cast_operand` and the column sums of `x_MK` in one pass."""
    method = _METHODS[type(spec)]
    values = method.values(x_MK)
    return method.cast_bias_grad(values, method.statistics(values, statistics), spec, row, column, dtype)


def quantize_operand(x_MK: Tensor | Source, spec: Quantizer, *, row: bool, column: bool) -> Quantized:
    """`cast_operand` of values of which nothing is known yet."""
    return cast_operand(x_MK, None, spec, row=row, column=column)


def dequantize_rows(x: Quantized, columns: int, dtype: torch.dtype) -> Tensor:
    """The row copy in high precision.

    Args:
        x: the quantized matrix; its row copy must be there.
        columns: K, the unpadded size of the last axis.
        dtype: of the result.

    Returns:
        `[..., K]` `dtype`.
    """
    return dequantize_data(*x.row, columns, dtype)


def quantize(x: Tensor, spec: Quantizer, row: bool = True, column: bool = False) -> Quantized:
    """Quantize a tensor as `spec` says.

    Args:
        x: `[..., K]` bf16 | fp16 | fp32, any strides; the leading axes are M together.
        spec: how; `recipe.quantizer(role)` gives the one of a recipe's role.
        row: quantize along the last axis.
        column: quantize along the leading axes, stored transposed.

    Returns:
        `row_data [..., K]`, `row_scale`, `column_data [K, M]`, `column_scale`; None for a copy not asked for.
        Not differentiable.

    Raises:
        TypeError: `spec` is not a quantizer spec that was registered.
        ValueError: `x` has no axis or no supported dtype; neither copy is asked for.
    """
    require(
        type(spec) in _METHODS,
        "quantize",
        "spec must be a registered quantizer spec",
        got=type(spec).__name__,
        hint="recipe.quantizer(role) gives one.",
        error=TypeError,
    )
    require(x.ndim > 0, "quantize", "x must have at least one axis", got=tuple(x.shape))
    require(x.dtype in HIGH_PRECISION, "quantize", "x must be fp32, bf16 or fp16", got=x.dtype)
    require(row or column, "quantize", "row or column must be asked for", got=(row, column))
    x_MK = as_matrix(x)
    M, K = x_MK.shape
    padded = quantize_operand(x_MK.detach(), spec, row=row, column=column)
    return Quantized(
        padded.row_data[:, :K].reshape(x.shape) if row else None,  # type: ignore[index]
        padded.row_scale,
        padded.column_data[:, :M] if column else None,  # type: ignore[index]
        padded.column_scale,
    )


def as_matrix(x: Tensor) -> Tensor:
    """`[..., K] -> [M, K]`, all leading axes together."""
    if x.ndim == 2:
        return x
    K = x.shape[-1]
    return x.reshape(-1 if K else math.prod(x.shape[:-1]), K)
