"""LayerNorm, RMSNorm and L2 normalization: the statistics of rows, the normalized rows, and their largest magnitude.

    layer   mean_M = mean_K x_MK        rstd_M = 1 / sqrt(mean_K (x_MK - mean_M)^2 + eps)
    rms                                 rstd_M = 1 / sqrt(mean_K x_MK^2 + eps)
    l2                                  rstd_M = 1 / sqrt(sum_K x_MK^2 + eps)

    y_MK = (x_MK - mean_M) * rstd_M * w_K + b_K                                  (see lowp.kernels.normalized)
    amax_P[p] = max |y_MK| over the finite y_MK of part p, after rounding        (see lowp.kernels.amax)

Statistics are fp32, whatever the dtypes.

Shape legend: M = rows (tokens), K = features, over which the statistics are; P = parts of amax.
Source: Ba et al., Layer Normalization (2016); Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowp.errors import fail
from lowp.formats import HIGH_PRECISION
from lowp.kernels._triton import cdiv, launch
from lowp.kernels.amax import PARTIALS, amax, num_partials
from lowp.kernels.norm_config import Config, LongConfig, config_for, power_of_2
from lowp.kernels.norm_kernel import norm_kernel, norm_long_kernel
from lowp.kernels.normalized import normalize_ref
from lowp.kernels.sources import TRITON_DTYPES, check_matrix
from lowp.registration import register

KINDS = ("layer", "rms", "l2")

Outputs = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]


def norm_forward(
    x_MK: Tensor,
    weight_K: Tensor | None,
    bias_K: Tensor | None,
    *,
    kind: str,
    eps: float,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype | None = None,
    output: bool = True,
    amax: bool = False,
) -> Outputs:
    """Normalize the rows of `x_MK`.

    Args:
        x_MK: `[M, K]` bf16 | fp16 | fp32, any strides.
        weight_K: `[K]` bf16 | fp16 | fp32, or None: 1.
        bias_K: `[K]` bf16 | fp16 | fp32, or None: 0.
        kind: "layer", "rms" or "l2".
        eps: added under the root, >= 0.
        zero_centered_gamma: the weight is `1 + weight_K`.
        dtype: bf16 | fp16 | fp32, to which y is rounded; that of `x_MK` by default.
        output: whether to write y.
        amax: whether to work out amax, which is that of the rounded y.

    Returns:
        y_MK: `[M, K]` `dtype`, row-major, or None.
        mean_M: `[M]` fp32, or None where no mean is subtracted.
        rstd_M: `[M]` fp32.
        amax_P: as from `lowp.kernels.amax.amax`, or None.

    Raises:
        ValueError: `x_MK` is not 2-D; a parameter has another size; `kind` or `eps` is none of these.
        TypeError: a dtype is another.
    """
    check_rows("norm_forward", kind, x_MK, ("weight_K", weight_K), ("bias_K", bias_K))
    dtype = dtype or x_MK.dtype
    if dtype not in HIGH_PRECISION:
        fail("norm_forward", f"dtype must be one of {HIGH_PRECISION}", got=dtype, error=TypeError)
    if not eps >= 0:
        fail("norm_forward", "eps must be >= 0", got=eps)
    return _norm_forward(x_MK, weight_K, bias_K, kind, eps, zero_centered_gamma, dtype, output, amax)


def centered(kind: str) -> bool:
    """Whether the mean is subtracted."""
    return kind == "layer"


def share_of_row(kind: str, K: int) -> float:
    """What a sum over a row is multiplied by; 1 where there are no features."""
    return 1.0 if kind == "l2" else 1.0 / max(K, 1)


def sums_of_equals_are_exact(dtype: torch.dtype, K: int) -> bool:
    """Whether fp32 holds the sum of up to K equal values of a dtype: then the mean of a constant row is exact.

    Otherwise it is corrected by the mean deviation from it.
    """
    return power_of_2(K) * torch.finfo(torch.float32).eps <= torch.finfo(dtype).eps


def check_rows(op: str, kind: str, x_MK: Tensor, *vectors: tuple[str, Tensor | None]) -> None:
    """Raise unless kind and matrix are such as norms take, and each `(name, vector)` has an element for each column."""
    if kind not in KINDS:
        fail(op, f"kind must be one of {KINDS}", got=repr(kind))
    check_matrix(op, "x_MK", x_MK)
    for name, vector in vectors:
        if vector is None:
            continue
        if vector.shape != x_MK.shape[1:]:
            rule = f"{name} must have one element for each of the {x_MK.shape[1]} columns of x_MK"
            fail(op, rule, got=tuple(vector.shape))
        if vector.dtype not in HIGH_PRECISION:
            fail(op, f"{name} must be one of {HIGH_PRECISION}", got=vector.dtype, error=TypeError)


def _norm_forward_ref(
    x_MK: Tensor,
    weight_K: Tensor | None,
    bias_K: Tensor | None,
    kind: str,
    eps: float,
    zero_centered: bool,
    dtype: torch.dtype,
    output: bool,
    with_amax: bool,
) -> Outputs:
    """The formulas; in one memory layout, since torch's order of sums follows from it."""
    exact = sums_of_equals_are_exact(x_MK.dtype, x_MK.shape[1])
    x_MK = x_MK.to(torch.float32, memory_format=torch.contiguous_format)
    share = share_of_row(kind, x_MK.shape[1])
    mean_M, off_MK = None, x_MK
    if centered(kind):
        mean_M = x_MK.sum(1) / max(x_MK.shape[1], 1)
        if not exact:
            mean_M += (x_MK - mean_M[:, None]).sum(1) * share
        off_MK = x_MK - mean_M[:, None]
    rstd_M = (off_MK.square().sum(1) * share + eps).sqrt().reciprocal()
    if not (output or with_amax):
        return None, mean_M, rstd_M, None
    y_MK = normalize_ref(x_MK, mean_M, rstd_M, weight_K, bias_K, zero_centered).to(dtype)
    return y_MK if output else None, mean_M, rstd_M, amax(y_MK) if with_amax else None


_VECTOR = 16
"""Triton tells strides and sizes that are multiples of 16, and pointers that are, from others: its loads differ."""


def rows_in_order(x_MK: Tensor) -> Tensor:
    """`x_MK`, or a copy where its rows can't be read as those of a copy are.

    Triton spreads a row over threads by what it knows of strides and alignment, and adds up in an order that follows
    from that. A copy of the rare layouts makes every layout give the same bits.
    """
    K = x_MK.shape[1]
    stride_m, stride_k = x_MK.stride()
    whole = K % _VECTOR == 0
    same = (stride_k == 1 or K == 1) and (stride_m % _VECTOR == 0) == whole
    if same and not (whole and x_MK.data_ptr() % _VECTOR):
        return x_MK
    return x_MK.clone(memory_format=torch.contiguous_format)


def _norm_forward_launch(
    x_MK: Tensor,
    weight_K: Tensor | None,
    bias_K: Tensor | None,
    kind: str,
    eps: float,
    zero_centered: bool,
    dtype: torch.dtype,
    output: bool,
    with_amax: bool,
    config: Config | LongConfig | None = None,
) -> Outputs:
    outputs = _norm_forward_allocate(x_MK, weight_K, bias_K, kind, eps, zero_centered, dtype, output, with_amax)
    M, K = x_MK.shape
    config = config or config_for(K, x_MK.element_size(), centered=centered(kind), output=output, amax=with_amax)
    x_MK = rows_in_order(x_MK)
    parameters = [None if vector is None else vector.contiguous() for vector in (weight_K, bias_K)]
    tiles = cdiv(M, config.block_m) if isinstance(config, Config) else M
    programs = min(tiles, config.programs or tiles, PARTIALS if with_amax else tiles)
    launch(
        norm_kernel if isinstance(config, Config) else norm_long_kernel,
        max(programs, 1),
        (x_MK, *parameters, *outputs, M, K, x_MK.stride(0), share_of_row(kind, K), float(eps)),
        _constants(config, K, x_MK.dtype, zero_centered, dtype),
        num_warps=config.num_warps,
        maxnreg=config.maxnreg,
        enable_fp_fusion=False,
    )
    return outputs


@lru_cache
def _constants(
    config: Config | LongConfig, K: int, x_dtype: torch.dtype, zero_centered: bool, dtype: torch.dtype
) -> tuple[Any, ...]:
    """The constants of the kernel that the configuration is for."""
    info = torch.finfo(dtype)
    # The least magnitude that becomes Inf when it is rounded: halfway to the value after the largest.
    overflow = math.inf if dtype == torch.float32 else info.max / (2 - info.eps) * (2 - info.eps / 2)
    rounding = (zero_centered, TRITON_DTYPES[dtype], overflow)
    if isinstance(config, LongConfig):
        return *rounding, config.block_k
    block_k = power_of_2(K)
    levels = 0 if K % _VECTOR or not K else {2: 3, 4: 2}[x_dtype.itemsize]  # neighbours that a thread loads at once
    exact = sums_of_equals_are_exact(x_dtype, K)
    how = (config.keep, config.prefetch, config.columns)
    return *rounding, config.block_m, block_k, K == block_k, levels, exact, *how


def _norm_forward_allocate(
    x_MK: Tensor,
    weight_K: Tensor | None,
    bias_K: Tensor | None,
    kind: str,
    eps: float,
    zero_centered: bool,
    dtype: torch.dtype,
    output: bool,
    with_amax: bool,
) -> Outputs:
    M, K = x_MK.shape
    y_MK = x_MK.new_empty(M, K, dtype=dtype) if output else None
    mean_M = x_MK.new_empty(M, dtype=torch.float32) if centered(kind) else None
    amax_P = x_MK.new_empty(num_partials(x_MK.device), dtype=torch.float32) if with_amax else None
    return y_MK, mean_M, x_MK.new_empty(M, dtype=torch.float32), amax_P


_norm_forward = register(
    "norm_forward(Tensor x, Tensor? weight, Tensor? bias, str kind, float eps, bool zero_centered, ScalarType dtype,"
    " bool output, bool amax) -> (Tensor? y, Tensor? mean, Tensor rstd, Tensor? amax)",
    ref=_norm_forward_ref,
    launch=_norm_forward_launch,
    allocate=_norm_forward_allocate,
)
