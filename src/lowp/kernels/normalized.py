"""Normalized rows as a source, from the statistics of the rows.

    y_MK = (x_MK - mean_M) * rstd_M * w_K + b_K         computed in fp32, in this order

Without a mean it is RMSNorm's; without `w_K` or `b_K` that step is left out; zero-centered: 1 + w_K is the weight.

Shape legend: M = rows (tokens), K = features, over which the statistics are.
Source: Ba et al., Layer Normalization (2016); Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowp.errors import fail
from lowp.formats import HIGH_PRECISION
from lowp.kernels._triton import constexpr, jit, tl
from lowp.kernels.sources import Kernel, Source, SourceSpec, Tensors, check_count, check_matrix, rounded, widened


@dataclass(frozen=True, kw_only=True)
class Normalized(SourceSpec):
    """Rows of a matrix, normalized.

    Tensors: `x_MK` bf16 | fp16 | fp32, any strides; `mean_M` fp32 if `mean`; `rstd_M` fp32; `w_K` bf16 | fp16 | fp32 if
    `weight`; `b_K` likewise if `bias`; in this order.

    Attributes:
        dtype: to which the values are rounded.
        mean: whether a mean is subtracted.
        weight: whether there is a weight.
        bias: whether there is a bias.
        zero_centered: whether the weight is stored as its difference from 1.
    """

    dtype: torch.dtype
    mean: bool = False
    weight: bool = True
    bias: bool = False
    zero_centered: bool = False

    def split(self, tensors: Tensors) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
        """`x_MK, mean_M, rstd_M, w_K, b_K`, None for what is not there."""
        rest = iter(tensors)
        x_MK = next(rest)
        mean_M = next(rest) if self.mean else None
        rstd_M = next(rest)
        return x_MK, mean_M, rstd_M, next(rest) if self.weight else None, next(rest) if self.bias else None

    def check(self, op: str, tensors: Tensors) -> None:
        """Raise unless statistics and parameters fit the matrix."""
        check_count(op, tensors, 2 + self.mean + self.weight + self.bias)
        x_MK, mean_M, rstd_M, w_K, b_K = self.split(tensors)
        check_matrix(op, "x_MK", x_MK)
        for name, statistic in (("mean_M", mean_M), ("rstd_M", rstd_M)):
            if statistic is None:
                continue
            if statistic.shape != x_MK.shape[:1]:
                fail(op, f"{name} must have one element for each row of x_MK", got=tuple(statistic.shape))
            if statistic.dtype != torch.float32:
                fail(op, f"{name} must be fp32", got=statistic.dtype, error=TypeError)
        for name, parameter in (("w_K", w_K), ("b_K", b_K)):
            if parameter is None:
                continue
            if parameter.shape != x_MK.shape[1:]:
                fail(op, f"{name} must have one element for each column of x_MK", got=tuple(parameter.shape))
            if parameter.dtype not in HIGH_PRECISION:
                fail(op, f"{name} must be one of {HIGH_PRECISION}", got=parameter.dtype, error=TypeError)

    def shape(self, tensors: Tensors) -> tuple[int, int]:
        """That of `x_MK`."""
        M, K = tensors[0].shape
        return M, K

    def produce_ref(self, tensors: Tensors) -> Tensor:
        """The formula, in fp32."""
        x_MK, mean_M, rstd_M, w_K, b_K = self.split(tensors)
        return normalize_ref(x_MK.float(), mean_M, rstd_M, w_K, b_K, self.zero_centered).to(self.dtype)

    def kernel(self, tensors: Tensors) -> Kernel:
        """One load of the matrix beside its vectors."""
        x_MK, *vectors = self.split(tensors)
        rows = [None if vector is None else vector.contiguous() for vector in vectors]
        return Kernel(load_normalized, (x_MK, *x_MK.stride(), *rows), params=(self.zero_centered,))


def normalized(
    x_MK: Tensor,
    mean_M: Tensor | None,
    rstd_M: Tensor,
    w_K: Tensor | None = None,
    b_K: Tensor | None = None,
    *,
    zero_centered: bool = False,
    dtype: torch.dtype | None = None,
) -> Source:
    """The source `(x - mean) * rstd * w + b`.

    Args:
        x_MK: `[M, K]` bf16 | fp16 | fp32, any strides.
        mean_M: `[M]` fp32; None: no mean is subtracted.
        rstd_M: `[M]` fp32.
        w_K: `[K]` bf16 | fp16 | fp32; None: 1.
        b_K: `[K]` bf16 | fp16 | fp32; None: 0.
        zero_centered: `1 + w_K` is the weight.
        dtype: to which the values are rounded; that of `x_MK` by default.
    """
    spec = Normalized(
        dtype=dtype or x_MK.dtype,
        mean=mean_M is not None,
        weight=w_K is not None,
        bias=b_K is not None,
        zero_centered=zero_centered,
    )
    return Source(tuple(x for x in (x_MK, mean_M, rstd_M, w_K, b_K) if x is not None), spec)


def normalize_ref(
    x_MK: Tensor, mean_M: Tensor | None, rstd_M: Tensor, w_K: Tensor | None, b_K: Tensor | None, zero_centered: bool
) -> Tensor:
    """The formula in the dtype of `x_MK`, step by step."""
    y_MK = x_MK if mean_M is None else x_MK - mean_M[:, None]
    y_MK = y_MK * rstd_M[:, None]
    if w_K is not None:
        w_K = w_K.to(x_MK.dtype)
        y_MK = y_MK * (1.0 + w_K if zero_centered else w_K)
    return y_MK if b_K is None else y_MK + b_K.to(x_MK.dtype)


@jit
def standardize(x, mean, rstd):
    """`(x - mean) * rstd` in fp32, step by step; None: no mean is subtracted."""
    y = x.to(tl.float32)
    if mean is not None:
        y = y - mean
    return y * rstd


@jit
def scale_and_shift(z, w, b, ZERO_CENTERED: tl.constexpr):
    """`z * w + b` in fp32, step by step; None for what is not there."""
    if w is not None:
        weight = w.to(tl.float32)
        if ZERO_CENTERED:
            weight = 1.0 + weight
        z = z * weight
    if b is not None:
        z = z + b.to(tl.float32)
    return z


@jit
def normalize(x, mean, rstd, w, b, ZERO_CENTERED: tl.constexpr):
    """The formula in fp32, step by step, for whatever broadcasts; None for what is not there.

    The steps are rounded one by one: launch with `enable_fp_fusion=False`.
    """
    return scale_and_shift(standardize(x, mean, rstd), w, b, ZERO_CENTERED)


_FEW_ROWS, _MANY_ROWS = constexpr(4), constexpr(16)


@jit
def _load_parameter(pointer, m, k, present, K):
    """A parameter beside a tile of rows m: of the shape of `k`, or of the tile's.

    In a tile of few rows and many columns, Triton works all out in the layout of the parameter, and turns the tile
    there and back through shared memory; a parameter of the tile's shape has the tile's layout. Measured on an H200: a
    row cast's tiles of 8 rows gain by it, 79 to 85 % of copy bandwidth; those of 2 (amax) and of 64 rows lose.
    """
    if (m.shape[0] >= _FEW_ROWS) and (m.shape[0] < _MANY_ROWS):
        parameter = tl.load(pointer + (k + m * 0), mask=present, other=0.0)
    else:
        parameter = tl.load(pointer + k, mask=k < K, other=0.0)
    return parameter


@jit
def load_normalized(
    operands,
    m,
    k,
    M,
    K,
    DTYPE: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATE: tl.constexpr,
    PARAMS: tl.constexpr,
):
    """Load a tile and the vectors beside it, and normalize."""
    x_ptr, stride_m, stride_k, mean_ptr, rstd_ptr, w_ptr, b_ptr = operands
    present = (m < M) & (k < K)
    x = widened(tl.load(x_ptr + m * stride_m + k * stride_k, mask=present, other=0.0))
    mean = None if mean_ptr is None else tl.load(mean_ptr + m, mask=m < M, other=0.0)
    rstd = tl.load(rstd_ptr + m, mask=m < M, other=0.0)
    w = None if w_ptr is None else _load_parameter(w_ptr, m, k, present, K)
    b = None if b_ptr is None else _load_parameter(b_ptr, m, k, present, K)
    y = normalize(x, mean, rstd, w, b, PARAMS[0])
    return (tl.where(present, rounded(y, DTYPE), 0.0),)
