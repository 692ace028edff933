"""Gradients of LayerNorm, RMSNorm and L2 normalization, from the statistics that the forward pass kept.

    xhat_MK = (x_MK - mean_M) * rstd_M              g_MK = dy_MK * w_K
    dx_MK = (g_MK - xhat_MK * share * sum_K (g_MK * xhat_MK) - share * sum_K g_MK) * rstd_M
    dx_MK = dx_MK + residual_MK                     of the rounded dx, rounded again: the bits of a separate addition
    dweight_K = sum_M dy_MK * xhat_MK               dbias_K = sum_M dy_MK

`share` is 1 / K, and 1 for L2 normalization; without a mean, the last sum over K is left out. Statistics and sums are
fp32. Sums over M are made of partial sums, each over a fixed set of rows, in a fixed order.

Shape legend: M = rows (tokens), K = features, P = partial sums.
Source: derived from the formulas of lowp.kernels.norm.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.errors import fail
from lowp.formats import HIGH_PRECISION
from lowp.kernels._triton import cdiv, launch
from lowp.kernels.bias_grad import total_launch
from lowp.kernels.norm import centered, check_rows, rows_in_order, share_of_row
from lowp.kernels.norm_config import LONGEST, ROWS, TILE, power_of_2
from lowp.kernels.norm_grad_kernel import norm_grad_kernel, norm_grad_long_kernel
from lowp.kernels.normalized import normalize_ref
from lowp.registration import register

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Sums = tuple[Tensor | None, Tensor | None]


def norm_backward(
    dy_MK: Tensor,
    x_MK: Tensor,
    mean_M: Tensor | None,
    rstd_M: Tensor,
    weight_K: Tensor | None,
    *,
    kind: str,
    zero_centered_gamma: bool = False,
    grad_input: bool = True,
    grad_weight: bool = False,
    bias_dtype: torch.dtype | None = None,
    residual_MK: Tensor | None = None,
) -> Gradients:
    """The gradients of `lowp.kernels.norm.norm_forward`.

    Args:
        dy_MK: `[M, K]` bf16 | fp16 | fp32, any strides.
        x_MK: `[M, K]` bf16 | fp16 | fp32, any strides: the input of the forward pass.
        mean_M: `[M]` fp32 for "layer", else None.
        rstd_M: `[M]` fp32.
        weight_K: `[K]` bf16 | fp16 | fp32, or None: 1.
        kind: "layer", "rms" or "l2".
        zero_centered_gamma: the weight is `1 + weight_K`.
        grad_input: whether to work out dx.
        grad_weight: whether to work out dweight.
        bias_dtype: bf16 | fp16 | fp32 of dbias; None: no dbias.
        residual_MK: `[M, K]`, of the dtype of `x_MK`, any strides: added to dx; None: nothing.

    Returns:
        dx_MK: `[M, K]`, of the dtype of `x_MK`, row-major, or None.
        dweight_K: `[K]`, of the dtype of `weight_K`, or None.
        dbias_K: `[K]` `bias_dtype`, or None.

    Raises:
        ValueError: shapes differ; `kind` is none of these; a mean is missing or too much; dweight without a weight.
        TypeError: a dtype is another.
    """
    op = "norm_backward"
    check_rows(op, kind, x_MK, ("weight_K", weight_K))
    for name, other in (("dy_MK", dy_MK), ("residual_MK", residual_MK)):
        if other is not None and other.shape != x_MK.shape:
            fail(op, f"{name} must have the shape {tuple(x_MK.shape)} of x_MK", got=tuple(other.shape))
    if dy_MK.dtype not in HIGH_PRECISION:
        fail(op, f"dy_MK must be one of {HIGH_PRECISION}", got=dy_MK.dtype, error=TypeError)
    if residual_MK is not None and residual_MK.dtype != x_MK.dtype:
        fail(op, f"residual_MK must be {x_MK.dtype}, as x_MK", got=residual_MK.dtype, error=TypeError)
    if (mean_M is not None) != centered(kind):
        fail(op, 'mean_M must be given for kind "layer", and for no other', got=kind)
    for name, statistic in (("mean_M", mean_M), ("rstd_M", rstd_M)):
        if statistic is not None and statistic.shape != x_MK.shape[:1]:
            fail(op, f"{name} must have one element for each row of x_MK", got=tuple(statistic.shape))
        if statistic is not None and statistic.dtype != torch.float32:
            fail(op, f"{name} must be fp32", got=statistic.dtype, error=TypeError)
    if grad_weight and weight_K is None:
        fail(op, "grad_weight needs weight_K", hint="Ask for no gradient of a weight that is not there.")
    if bias_dtype is not None and bias_dtype not in HIGH_PRECISION:
        fail(op, f"bias_dtype must be one of {HIGH_PRECISION}", got=bias_dtype, error=TypeError)
    options = (kind, zero_centered_gamma, grad_input, grad_weight, bias_dtype)
    return _norm_backward(dy_MK, x_MK, mean_M, rstd_M, weight_K, residual_MK, *options)


def _norm_backward_ref(
    dy_MK: Tensor,
    x_MK: Tensor,
    mean_M: Tensor | None,
    rstd_M: Tensor,
    weight_K: Tensor | None,
    residual_MK: Tensor | None,
    kind: str,
    zero_centered: bool,
    grad_input: bool,
    grad_weight: bool,
    bias_dtype: torch.dtype | None,
) -> Gradients:
    """The formulas; in one memory layout, since torch's order of sums follows from it."""
    x_dtype = x_MK.dtype
    dy_MK, x_MK = (x.to(torch.float32, memory_format=torch.contiguous_format) for x in (dy_MK, x_MK))
    xhat_MK = normalize_ref(x_MK, mean_M, rstd_M, None, None, False)
    dx_MK = dweight_K = dbias_K = None
    if grad_weight and weight_K is not None:
        dweight_K = (dy_MK * xhat_MK).sum(0).to(weight_K.dtype)
    if bias_dtype is not None:
        dbias_K = dy_MK.sum(0).to(bias_dtype)
    if grad_input:
        share = share_of_row(kind, x_MK.shape[1])
        g_MK = dy_MK
        if weight_K is not None:
            g_MK = dy_MK * (1.0 + weight_K.float() if zero_centered else weight_K.float())
        dx_MK = g_MK - xhat_MK * ((g_MK * xhat_MK).sum(1, keepdim=True) * share)
        if mean_M is not None:
            dx_MK -= g_MK.sum(1, keepdim=True) * share
        dx_MK = (dx_MK * rstd_M[:, None]).to(x_dtype)
        if residual_MK is not None:
            dx_MK += residual_MK
    return dx_MK, dweight_K, dbias_K


class Config(NamedTuple):
    """Launch parameters of `norm_grad_kernel`.

    Attributes:
        block_m: rows of a tile.
        block_k: columns of a tile: all of them, where dx is worked out.
        num_warps: warps of a program.
        programs: at most so many for a block of columns, each with several tiles in turn and a partial sum of its
            own; 0: one program a tile.
        keep: whether a program keeps the weight in registers.
        stages: tiles that a program reads or works on at a time.
    """

    block_m: int
    block_k: int
    num_warps: int
    programs: int = 0
    keep: bool = False
    stages: int = 1


class LongConfig(NamedTuple):
    """Launch parameters of `norm_grad_long_kernel`."""

    block_k: int
    num_warps: int


class Plan(NamedTuple):
    """Up to two launches.

    Attributes:
        rows: for dx; or None.
        columns: for the sums over M, where they aren't left to the first launch; or None.
    """

    rows: Config | LongConfig | None
    columns: Config | None


LONG = LongConfig(block_k=4096, num_warps=8)
_LONGEST_WITH_SUMS = 8192
"""Features of the longest row that is held in registers beside its sums over M."""
_COLUMNS = 512
_COLUMN_PROGRAMS = 528


@lru_cache
def plan_for(K: int, *, grad_input: bool, sums: int) -> Plan:
    """The launches for dx, if it is wanted, and `sums` sums over M of rows of K features."""
    block_k = power_of_2(K)
    together = grad_input and block_k <= _LONGEST_WITH_SUMS
    columns = None if together or not sums else _columns(block_k)
    if not grad_input or block_k > LONGEST:
        return Plan(LONG if grad_input else None, columns)
    block_m = min(max(TILE // block_k, 1), ROWS)
    tile = block_m * block_k
    config = Config(block_m, block_k, num_warps=max(tile // 512, 1))
    if sums and together:
        config = config._replace(programs=264 if tile <= TILE else 132, keep=True, stages=3)
    return Plan(config, columns)


def _columns(block_k: int) -> Config:
    programs = min(max(_COLUMN_PROGRAMS * _COLUMNS // block_k, 1), _COLUMN_PROGRAMS)
    block_k = min(block_k, _COLUMNS)
    return Config(min(TILE // block_k, ROWS), block_k, num_warps=8, programs=programs, stages=2)


def _norm_backward_launch(
    dy_MK: Tensor,
    x_MK: Tensor,
    mean_M: Tensor | None,
    rstd_M: Tensor,
    weight_K: Tensor | None,
    residual_MK: Tensor | None,
    kind: str,
    zero_centered: bool,
    grad_input: bool,
    grad_weight: bool,
    bias_dtype: torch.dtype | None,
    plan: Plan | None = None,
) -> Gradients:
    M, K = x_MK.shape
    dtypes = (weight_K.dtype if grad_weight and weight_K is not None else None, bias_dtype)
    rows, columns = plan or plan_for(K, grad_input=grad_input, sums=sum(dtype is not None for dtype in dtypes))
    dy_MK, x_MK = rows_in_order(dy_MK), rows_in_order(x_MK)
    residual_MK = None if residual_MK is None else rows_in_order(residual_MK)
    strides = (dy_MK.stride(0), x_MK.stride(0), 0 if residual_MK is None else residual_MK.stride(0))
    vectors = [None if vector is None else vector.contiguous() for vector in (mean_M, rstd_M, weight_K)]
    inputs = (dy_MK, x_MK, *vectors, residual_MK)
    scalars = (M, K, *strides, share_of_row(kind, K))
    dx_MK = x_MK.new_empty(M, K) if grad_input else None
    sums: Sums = (None, None)
    if isinstance(rows, LongConfig):
        args, constants = (*inputs, dx_MK, *scalars[1:]), (zero_centered, rows.block_k)
        launch(norm_grad_long_kernel, M, args, constants, num_warps=rows.num_warps, enable_fp_fusion=False)
    elif rows is not None:
        sums = _launch(inputs, dx_MK, dtypes if columns is None else (None, None), scalars, zero_centered, rows)
    if columns is not None:
        sums = _launch(inputs, None, dtypes, scalars, zero_centered, columns)
    return dx_MK, *sums


def _launch(
    inputs: tuple[Any, ...],
    dx_MK: Tensor | None,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    scalars: tuple[Any, ...],
    zero_centered: bool,
    config: Config,
) -> Sums:
    """Work out dx, if it is there, and the sums over M that have a dtype."""
    M, K, *_ = scalars
    blocks = cdiv(M, config.block_m)
    programs = min(blocks, config.programs or blocks)
    empty = inputs[1].new_empty
    partials: list[Any] = [None if dtype is None else empty(programs, K, dtype=torch.float32) for dtype in dtypes]
    launch(
        norm_grad_kernel,
        (programs, cdiv(K, config.block_k)),
        (*inputs, dx_MK, *partials, *scalars),
        _constants(config, K, zero_centered),
        num_warps=config.num_warps,
        enable_fp_fusion=False,
    )
    dweight_K, dbias_K = (
        None if dtype is None else total_launch(partial, dtype) for partial, dtype in zip(partials, dtypes, strict=True)
    )
    return dweight_K, dbias_K


def _constants(config: Config, K: int, zero_centered: bool) -> tuple[Any, ...]:
    return zero_centered, config.block_m, config.block_k, K % config.block_k == 0, config.keep, config.stages


def _norm_backward_allocate(
    dy_MK: Tensor,
    x_MK: Tensor,
    mean_M: Tensor | None,
    rstd_M: Tensor,
    weight_K: Tensor | None,
    residual_MK: Tensor | None,
    kind: str,
    zero_centered: bool,
    grad_input: bool,
    grad_weight: bool,
    bias_dtype: torch.dtype | None,
) -> Gradients:
    M, K = x_MK.shape
    dx_MK = x_MK.new_empty(M, K) if grad_input else None
    dweight_K = x_MK.new_empty(K, dtype=weight_K.dtype) if grad_weight and weight_K is not None else None
    return dx_MK, dweight_K, None if bias_dtype is None else x_MK.new_empty(K, dtype=bias_dtype)


_norm_backward = register(
    "norm_backward(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? residual, str kind,"
    " bool zero_centered, bool grad_input, bool grad_weight, ScalarType? bias_dtype)"
    " -> (Tensor? dx, Tensor? dweight, Tensor? dbias)",
    ref=_norm_backward_ref,
    launch=_norm_backward_launch,
    allocate=_norm_backward_allocate,
)
