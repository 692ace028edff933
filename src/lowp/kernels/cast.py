"""Cast with one scale for the tensor: FP8 data for GEMMs, from the tensor's amax.

    q_MK = encode(x_MK * multiplier)            scale = 1 / multiplier          (see lowp.kernels.float8)
    row_data[m, k] = q_MK[m, k]                 column_data[k, m] = q_MK[m, k]
    bias_grad_K = sum of x_MK over M            (see lowp.kernels.bias_grad)

Shape legend: M = rows (tokens), K = features, P = parts of amax, K16 and M16 = K and M rounded up to a multiple of 16.
The last axis of both copies is a GEMM's contraction axis: it is padded with zeros to the multiple that the GEMM needs.
Source: OCP 8-bit Floating Point Specification (OFP8), rev 1.0; current scaling of NVIDIA Transformer Engine 2.20.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.errors import fail, require
from lowp.formats import HIGH_PRECISION
from lowp.kernels._triton import cdiv, jit, launch, tl
from lowp.kernels.bias_grad import GROUP, allocate_partial, bias_grad_ref, sum_group, total_launch
from lowp.kernels.float8 import encode, encode_ref, load_multiplier, multiplier_ref
from lowp.quantizers import Float8CurrentScalingQuantizer
from lowp.registration import register
from lowp.values import decode

CONTRACTION_ALIGNMENT = 16
"""FP8 GEMMs want rows of a multiple of 16 bytes along the contraction axis (cuBLAS, torch._scaled_mm)."""


def cast(
    x_MK: Tensor, amax_P: Tensor, quantizer: Float8CurrentScalingQuantizer, *, row: bool = True, column: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Quantize `x_MK` with one scale.

    Args:
        x_MK: `[M, K]` bf16 | fp16 | fp32, any strides.
        amax_P: any shape, not empty, fp32, finite and >= 0; its maximum is amax, which may be that of more than `x_MK`.
        quantizer: element format and rule of the scale.
        row: whether to write `row_data`.
        column: whether to write `column_data`.

    Returns:
        row_data: `[M, K16]` `quantizer.fmt.dtype`, or None.
        column_data: `[K, M16]` `quantizer.fmt.dtype`, the transpose, or None.
        scale: `[]` fp32; multiply to dequantize.

    Raises:
        ValueError: `x_MK` is not 2-D; `amax_P` is empty; neither `row` nor `column`.
        TypeError: a dtype or the quantizer is another.
    """
    _check("cast", x_MK, amax_P, quantizer, row, column)
    return _cast(x_MK, amax_P, quantizer.bundle, row, column)


def cast_bias_grad(
    x_MK: Tensor,
    amax_P: Tensor,
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
    dtype = dtype or x_MK.dtype
    _check(op, x_MK, amax_P, quantizer, row, column)
    require(dtype in HIGH_PRECISION, op, f"dtype must be one of {HIGH_PRECISION}", got=dtype, error=TypeError)
    return _cast_bias_grad(x_MK, amax_P, quantizer.bundle, row, column, dtype)


def _check(op: str, x_MK: Tensor, amax_P: Tensor, quantizer: Any, row: bool, column: bool) -> None:
    if not isinstance(quantizer, Float8CurrentScalingQuantizer):
        rule = "quantizer must be a Float8CurrentScalingQuantizer"
        fail(op, rule, got=type(quantizer).__name__, error=TypeError)
    if x_MK.ndim != 2:
        hint = "Flatten leading dimensions with x.flatten(0, -2)."
        fail(op, "x_MK must be 2-D", got=tuple(x_MK.shape), hint=hint)
    if x_MK.dtype not in HIGH_PRECISION:
        fail(op, f"x_MK must be one of {HIGH_PRECISION}", got=x_MK.dtype, error=TypeError)
    if amax_P.dtype != torch.float32:
        fail(op, "amax_P must be fp32", got=amax_P.dtype, error=TypeError)
    if amax_P.numel() == 0:
        fail(op, "amax_P must not be empty", got=tuple(amax_P.shape))
    if not (row or column):
        fail(op, "row or column must be True", hint="Ask for the copies that you need.")


def pad_contraction(size: int) -> int:
    """The size of a contraction axis in FP8 data: `size` rounded up to the alignment of FP8 GEMMs."""
    return (size + CONTRACTION_ALIGNMENT - 1) // CONTRACTION_ALIGNMENT * CONTRACTION_ALIGNMENT


def _cast_ref(
    x_MK: Tensor, amax_P: Tensor, quantizer: str, row: bool, column: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The formula, line by line."""
    spec: Float8CurrentScalingQuantizer = decode(quantizer)
    multiplier = multiplier_ref(amax_P, spec)
    codes_MK = encode_ref(x_MK, multiplier, spec.fmt)
    row_data, column_data, scale = _cast_allocate(x_MK, amax_P, quantizer, row, column)
    for data, codes in ((row_data, codes_MK), (column_data, codes_MK.t())):
        if data is not None:
            padded = data.view(torch.uint8)
            padded[:, : codes.shape[1]] = codes
            padded[:, codes.shape[1] :].zero_()
    return row_data, column_data, scale.fill_(1.0).div_(multiplier)


def _cast_bias_grad_ref(
    x_MK: Tensor, amax_P: Tensor, quantizer: str, row: bool, column: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """The two operations, one after the other."""
    return *_cast_ref(x_MK, amax_P, quantizer, row, column), bias_grad_ref(x_MK, dtype)


@jit
def _cast_kernel(
    x_ptr,
    amax_ptr,
    row_ptr,
    column_ptr,
    scale_ptr,
    partial_ptr,
    M,
    K,
    M_padded,
    K_padded,
    stride_m,
    stride_k,
    P,
    epsilon,
    FMT_MAX: tl.constexpr,
    POWER_2: tl.constexpr,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    tiles_k = tl.maximum(tl.cdiv(K_padded, BLOCK_K), 1)
    tile_m = program // tiles_k
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    k = program % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    x_pointers = x_ptr + m * stride_m + k * stride_k
    present = (m < M) & (k < K)
    if BIAS:  # loads the tile twice, the second time from L1: that takes half the registers
        x = tl.load(x_pointers, mask=present, other=0.0, eviction_policy="evict_last")
        tl.store(partial_ptr + tile_m * K + k, sum_group(x.to(tl.float32)), mask=(tile_m * BLOCK_M < M) & (k < K))
    x = tl.load(x_pointers, mask=present, other=0.0).to(tl.float32)
    multiplier = load_multiplier(amax_ptr, P, epsilon, FMT_MAX, POWER_2, BLOCK_P)
    if program == 0:
        tl.store(scale_ptr, tl.div_rn(1.0, multiplier))
    q = encode(x, multiplier, row_ptr.dtype.element_ty, FMT_MAX)
    if ROW:
        tl.store(row_ptr + m * K_padded + k, q, mask=(m < M) & (k < K_padded))
    if COLUMN:
        tl.store(column_ptr + tl.trans(k * M_padded + m), tl.trans(q), mask=tl.trans((k < K) & (m < M_padded)))


class Config(NamedTuple):
    """Launch parameters of `_cast_kernel`; with a bias gradient, `block_m` is `GROUP`."""

    block_m: int
    block_k: int
    num_warps: int
    maxnreg: int | None = None


# Measured on an H200; 96 registers let five programs share a multiprocessor.
ROW_ONLY = Config(block_m=8, block_k=512, num_warps=4)
TRANSPOSING = Config(block_m=GROUP, block_k=128, num_warps=4, maxnreg=96)
TRANSPOSING_SCATTERED = TRANSPOSING._replace(maxnreg=None)  # where loads can't be wide, 96 registers don't suffice
BLOCK_P = 512
"""Parts of amax that a program reads at a time."""


def _config(x_MK: Tensor, transposing: bool) -> Config:
    if not transposing:
        return ROW_ONLY
    return TRANSPOSING if x_MK.shape[1] % 16 == 0 and 1 in x_MK.stride() else TRANSPOSING_SCATTERED


def _launch(
    x_MK: Tensor,
    amax_P: Tensor,
    quantizer: str,
    outputs: tuple[Tensor | None, Tensor | None, Tensor],
    partial_GK: Tensor | None,
    config: Config,
) -> None:
    row_data, column_data, scale = outputs
    spec: Float8CurrentScalingQuantizer = decode(quantizer)
    M, K = x_MK.shape
    M_padded, K_padded = pad_contraction(M), pad_contraction(K)
    block_m, block_k, num_warps, maxnreg = config
    programs = max(cdiv(M_padded, block_m) * cdiv(K_padded, block_k), 1)  # the scale is written even without data
    copies = (column_data if row_data is None else row_data, column_data, scale, partial_GK)
    sizes = (M, K, M_padded, K_padded, *x_MK.stride(), amax_P.numel())
    launch(
        _cast_kernel,
        programs,
        (x_MK, amax_P.contiguous(), *copies, *sizes, spec.amax_epsilon),
        (
            spec.fmt.max,
            spec.power_2_scale,
            row_data is not None,
            column_data is not None,
            partial_GK is not None,
            block_m,
            block_k,
            BLOCK_P,
        ),
        num_warps=num_warps,
        maxnreg=maxnreg,
    )


def _cast_launch(
    x_MK: Tensor, amax_P: Tensor, quantizer: str, row: bool, column: bool, config: Config | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    outputs = _cast_allocate(x_MK, amax_P, quantizer, row, column)
    _launch(x_MK, amax_P, quantizer, outputs, None, config or _config(x_MK, column))
    return outputs


def _cast_bias_grad_launch(
    x_MK: Tensor,
    amax_P: Tensor,
    quantizer: str,
    row: bool,
    column: bool,
    dtype: torch.dtype,
    config: Config | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    outputs = _cast_allocate(x_MK, amax_P, quantizer, row, column)
    partial_GK = allocate_partial(x_MK)
    _launch(x_MK, amax_P, quantizer, outputs, partial_GK, config or _config(x_MK, True))
    return *outputs, total_launch(partial_GK, dtype)


def _cast_allocate(
    x_MK: Tensor, amax_P: Tensor, quantizer: str, row: bool, column: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    M, K = x_MK.shape
    dtype = decode(quantizer).fmt.dtype
    row_data = x_MK.new_empty(M, pad_contraction(K), dtype=dtype) if row else None
    column_data = x_MK.new_empty(K, pad_contraction(M), dtype=dtype) if column else None
    return row_data, column_data, x_MK.new_empty((), dtype=torch.float32)


def _cast_bias_grad_allocate(
    x_MK: Tensor, amax_P: Tensor, quantizer: str, row: bool, column: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    outputs = _cast_allocate(x_MK, amax_P, quantizer, row, column)
    return *outputs, x_MK.new_empty(x_MK.shape[1], dtype=dtype)


_cast = register(
    "cast(Tensor x, Tensor amax, str quantizer, bool row, bool column)"
    " -> (Tensor? row_data, Tensor? column_data, Tensor scale)",
    ref=_cast_ref,
    launch=_cast_launch,
    allocate=_cast_allocate,
)
_cast_bias_grad = register(
    "cast_bias_grad(Tensor x, Tensor amax, str quantizer, bool row, bool column, ScalarType dtype)"
    " -> (Tensor? row_data, Tensor? column_data, Tensor scale, Tensor bias_grad)",
    ref=_cast_bias_grad_ref,
    launch=_cast_bias_grad_launch,
    allocate=_cast_bias_grad_allocate,
)
