"""Cast with one scale for the tensor: FP8 data for GEMMs, from the tensor's amax, given or found here.

    x_MK = the values of a source, a tensor's own or computed here              (see lowp.kernels.sources)
    q_MK = encode(x_MK * multiplier)            scale = 1 / multiplier          (see lowp.kernels.float8)
    row_data[m, k] = q_MK[m, k]                 column_data[k, m] = q_MK[m, k]
    bias_grad_K = sum of x_MK over M            (see lowp.kernels.bias_grad)

Shape legend: M = rows (tokens), K = features, P = parts of amax, K16 and M16 = K and M rounded up to a multiple of 16.
The last axis of both copies is a GEMM's contraction axis: it is padded with zeros to the multiple that the GEMM needs.
Source: OCP 8-bit Floating Point Specification (OFP8), rev 1.0; current scaling of NVIDIA Transformer Engine 2.20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowp.errors import fail, require
from lowp.formats import HIGH_PRECISION
from lowp.kernels.amax import amax_launch, amax_ref
from lowp.kernels.bias_grad import allocate_sums, bias_grad_ref, total
from lowp.kernels.cast_kernel import Config, cast_launch, finds_amax, pad_contraction
from lowp.kernels.float8 import encode_ref, multiplier_ref
from lowp.kernels.sources import Source, SourceSpec, Tensors, as_source
from lowp.quantizers import Float8CurrentScalingQuantizer
from lowp.registration import register
from lowp.values import decode


def cast(
    x_MK: Tensor | Source,
    amax_P: Tensor | None,
    quantizer: Float8CurrentScalingQuantizer,
    *,
    row: bool = True,
    column: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Quantize `x_MK` with one scale.

    Args:
        x_MK: `[M, K]` bf16 | fp16 | fp32, any strides; or a source, whose rounded values are quantized.
        amax_P: any shape, not empty, fp32, finite and >= 0; its maximum is amax, which may be that of more than `x_MK`;
            None: that of `x_MK`, which is found here, of few values in the same pass.
        quantizer: element format and rule of the scale.
        row: whether to write `row_data`.
        column: whether to write `column_data`.

    Returns:
        row_data: `[M, K16]` `quantizer.fmt.dtype`, or None.
        column_data: `[K, M16]` `quantizer.fmt.dtype`, the transpose, or None.
        scale: `[]` fp32; multiply to dequantize.

    Raises:
        ValueError: `x_MK` is not 2-D, or the source's tensors don't fit each other; `amax_P` is empty; neither `row`
            nor `column`.
        TypeError: a dtype or the quantizer is another.
    """
    source = _checked("cast", x_MK, amax_P, quantizer, row, column)
    return _cast(source.tensors, source.spec.bundle, amax_P, quantizer.bundle, row, column)


def cast_bias_grad(
    x_MK: Tensor | Source,
    amax_P: Tensor | None,
    quantizer: Float8CurrentScalingQuantizer,
    *,
    row: bool = True,
    column: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Quantize an output gradient and sum its rows in one pass.

    Args:
        x_MK: as for `cast`.
        amax_P: as for `cast`.
        quantizer: as for `cast`.
        row: as for `cast`.
        column: as for `cast`.
        dtype: bf16 | fp16 | fp32 of the bias gradient; that of `x_MK` by default.

    Returns:
        row_data, column_data, scale: as from `cast`.
        bias_grad_K: `[K]` `dtype`, the bits that `lowp.kernels.bias_grad.bias_grad` gives.

    Raises:
        ValueError: as for `cast`.
        TypeError: as for `cast`, or `dtype` is another.
    """
    op = "cast_bias_grad"
    source = _checked(op, x_MK, amax_P, quantizer, row, column)
    dtype = dtype or source.dtype
    require(dtype in HIGH_PRECISION, op, f"dtype must be one of {HIGH_PRECISION}", got=dtype, error=TypeError)
    return _cast_bias_grad(source.tensors, source.spec.bundle, amax_P, quantizer.bundle, row, column, dtype)


def _checked(op: str, x_MK: Tensor | Source, amax_P: Tensor | None, quantizer: Any, row: bool, column: bool) -> Source:
    """The source of the values, if everything is as it must be."""
    if not isinstance(quantizer, Float8CurrentScalingQuantizer):
        rule = "quantizer must be a Float8CurrentScalingQuantizer"
        fail(op, rule, got=type(quantizer).__name__, error=TypeError)
    source = as_source(op, x_MK)
    if amax_P is not None and amax_P.dtype != torch.float32:
        fail(op, "amax_P must be fp32", got=amax_P.dtype, error=TypeError)
    if amax_P is not None and amax_P.numel() == 0:
        fail(op, "amax_P must not be empty", got=tuple(amax_P.shape))
    if not (row or column):
        fail(op, "row or column must be True", hint="Ask for the copies that you need.")
    return source


def _cast_ref(
    tensors: Tensors, spec: str, amax_P: Tensor | None, quantizer: str, row: bool, column: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The formula, line by line."""
    return _quantize_ref(decode(spec).produce_ref(tensors), amax_P, quantizer, row, column)


def _quantize_ref(
    x_MK: Tensor, amax_P: Tensor | None, quantizer: str, row: bool, column: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The formula, of values that are there."""
    rule: Float8CurrentScalingQuantizer = decode(quantizer)
    multiplier = multiplier_ref(amax_ref(x_MK) if amax_P is None else amax_P, rule)
    codes_MK = encode_ref(x_MK, multiplier, rule.fmt)
    row_data, column_data, scale = _allocate(x_MK, x_MK.shape, quantizer, row, column)
    for data, codes in ((row_data, codes_MK), (column_data, codes_MK.t())):
        if data is not None:
            padded = data.view(torch.uint8)
            padded[:, : codes.shape[1]] = codes
            padded[:, codes.shape[1] :].zero_()
    return row_data, column_data, scale.fill_(1.0).div_(multiplier)


def _cast_bias_grad_ref(
    tensors: Tensors, spec: str, amax_P: Tensor | None, quantizer: str, row: bool, column: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """The two operations, one after the other."""
    x_MK = decode(spec).produce_ref(tensors)
    return *_quantize_ref(x_MK, amax_P, quantizer, row, column), bias_grad_ref(x_MK, dtype)


def _cast_launch(
    tensors: Tensors,
    spec: str,
    amax_P: Tensor | None,
    quantizer: str,
    row: bool,
    column: bool,
    config: Config | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    outputs = _cast_allocate(tensors, spec, amax_P, quantizer, row, column)
    cast_launch(tensors, decode(spec), _known(tensors, spec, amax_P), quantizer, outputs, None, config)
    return outputs


def _cast_bias_grad_launch(
    tensors: Tensors,
    spec: str,
    amax_P: Tensor | None,
    quantizer: str,
    row: bool,
    column: bool,
    dtype: torch.dtype,
    config: Config | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    source: SourceSpec = decode(spec)
    outputs = _cast_allocate(tensors, spec, amax_P, quantizer, row, column)
    M, K = source.shape(tensors)
    sums = allocate_sums(tensors[0], M, K, dtype)
    cast_launch(tensors, source, _known(tensors, spec, amax_P), quantizer, outputs, sums, config)
    return *outputs, total(sums, M, dtype)


def _known(tensors: Tensors, spec: str, amax_P: Tensor | None) -> Tensor | None:
    """The amax, or None where the cast finds it."""
    if amax_P is None and not finds_amax(*decode(spec).shape(tensors)):
        return amax_launch(tensors, spec)
    return None if amax_P is None else amax_P.contiguous()


def _allocate(
    x: Tensor, shape: Sequence[int], quantizer: str, row: bool, column: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    M, K = shape
    dtype = decode(quantizer).fmt.dtype
    row_data = x.new_empty(M, pad_contraction(K), dtype=dtype) if row else None
    column_data = x.new_empty(K, pad_contraction(M), dtype=dtype) if column else None
    return row_data, column_data, x.new_empty((), dtype=torch.float32)


def _cast_allocate(
    tensors: Tensors, spec: str, amax_P: Tensor | None, quantizer: str, row: bool, column: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    return _allocate(tensors[0], decode(spec).shape(tensors), quantizer, row, column)


def _cast_bias_grad_allocate(
    tensors: Tensors, spec: str, amax_P: Tensor | None, quantizer: str, row: bool, column: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    outputs = _cast_allocate(tensors, spec, amax_P, quantizer, row, column)
    return *outputs, tensors[0].new_empty(decode(spec).shape(tensors)[1], dtype=dtype)


_cast = register(
    "cast(Tensor[] source, str spec, Tensor? amax, str quantizer, bool row, bool column)"
    " -> (Tensor? row_data, Tensor? column_data, Tensor scale)",
    ref=_cast_ref,
    launch=_cast_launch,
    allocate=_cast_allocate,
)
_cast_bias_grad = register(
    "cast_bias_grad(Tensor[] source, str spec, Tensor? amax, str quantizer, bool row, bool column, ScalarType dtype)"
    " -> (Tensor? row_data, Tensor? column_data, Tensor scale, Tensor bias_grad)",
    ref=_cast_bias_grad_ref,
    launch=_cast_bias_grad_launch,
    allocate=_cast_bias_grad_allocate,
)
