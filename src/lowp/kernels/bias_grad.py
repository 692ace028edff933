"""Bias gradient: sums over the rows of the output gradient.

    partial_GN  = sum of each group of 64 rows of dy_MN, in fp32
    bias_grad_N = sum of 64 running sums, the r-th of partial_GN[r], partial_GN[r + 64], ... in this order

    sum of 64 rows: row r + row r + 32, then row r + row r + 16, then four times row 2r + row 2r + 1

Shape legend: M = rows (tokens), N = features, G = ceil(M / 64) groups of rows.
The order of the additions is part of the definition on CUDA, whatever the tiles and the layouts of a kernel: so a
kernel that computes the bias gradient beside something else gives the same bits. All steps add two numbers, and a sum
of two has one order only, which leaves the compiler no choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowp.errors import fail
from lowp.formats import HIGH_PRECISION
from lowp.kernels._triton import cdiv, jit, launch, tl
from lowp.kernels.sources import Source, SourceSpec, Tensors, as_source, is_by_rows, is_wide
from lowp.registration import register
from lowp.values import decode

GROUP = 64
"""Rows that are summed to one partial sum."""


def bias_grad(dy_MN: Tensor | Source, dtype: torch.dtype | None = None) -> Tensor:
    """Sum `dy_MN` over its rows, in fp32 and in one fixed order.

    Args:
        dy_MN: `[M, N]` bf16 | fp16 | fp32, any strides; or a source, whose rounded values are summed.
        dtype: bf16 | fp16 | fp32 of the result; that of `dy_MN` by default.

    Returns:
        bias_grad_N: `[N]` `dtype`; zeros where M is 0.

    Raises:
        ValueError: `dy_MN` is not 2-D, or the source's tensors don't fit each other.
        TypeError: `dy_MN` or the result would have another dtype.
    """
    source = as_source("bias_grad", dy_MN, "dy_MN")
    dtype = dtype or source.dtype
    if dtype not in HIGH_PRECISION:
        fail("bias_grad", f"dtype must be one of {HIGH_PRECISION}", got=dtype, error=TypeError)
    return _bias_grad(source.tensors, source.spec.bundle, dtype)


def bias_grad_ref(dy_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum in fp32, in torch's order for row-major matrices."""
    return dy_MN.contiguous().sum(0, dtype=torch.float32).to(dtype)


@jit
def sum_group(x_RN):
    """Sum 64 fp32 rows to one: `[64, N]` to `[1, N]`; two steps within a thread, then one exchange between threads."""
    return _sum_sixteen(_sum_quarters(x_RN))


@jit
def sum_group_of_two(a_RN, b_RN):
    """The sums of two tiles, in one exchange: of twice as many columns, which as many more threads take."""
    quarters = tl.join(_sum_quarters(a_RN), _sum_quarters(b_RN))
    sums = _sum_sixteen(tl.reshape(quarters, [16, 2 * a_RN.shape[1]]))
    return tl.split(tl.reshape(sums, [1, a_RN.shape[1], 2]))


@jit
def _sum_quarters(x_RN):
    """Rows r, r + 16, r + 32 and r + 48, which a thread holds: `[64, N]` to `[16, N]`."""
    x_RN = tl.sum(tl.reshape(x_RN, [2, 32, x_RN.shape[1]]), axis=0)
    return tl.sum(tl.reshape(x_RN, [2, 16, x_RN.shape[1]]), axis=0)


@jit
def _sum_sixteen(x_RN):
    """`[16, N]` to `[1, N]`, neighbours first: the exchange between threads."""
    x_NR = tl.trans(x_RN)
    for _ in tl.static_range(4):
        even, odd = tl.split(tl.reshape(x_NR, [x_NR.shape[0], x_NR.shape[1] // 2, 2]))
        x_NR = even + odd
    return tl.trans(x_NR) + 0.0  # not -0, which the total of several groups never is


@jit
def _partial_kernel(
    sums_ptr,
    operands,
    M,
    N,
    LOAD: tl.constexpr,
    DTYPE: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATE: tl.constexpr,
    PARAMS: tl.constexpr,
    HALVES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0).to(tl.int64) // tiles_n
    m = group * GROUP + tl.arange(0, GROUP)[:, None]
    n = tl.program_id(0).to(tl.int64) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tiles = LOAD(operands, m, n, M, N, DTYPE, FUNCTION, GATE, PARAMS)
    for half in tl.static_range(HALVES):
        pointers = sums_ptr + group * (HALVES * N) + half * N + n
        tl.store(pointers, sum_group(tiles[half].to(tl.float32)), mask=n < N)


@jit
def _total_kernel(partial_ptr, out_ptr, G, N, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    running = tl.zeros([GROUP, BLOCK_N], tl.float32)
    for start in tl.range(0, G, GROUP, num_stages=4):
        g = start + tl.arange(0, GROUP)[:, None].to(tl.int64)
        running += tl.load(partial_ptr + g * N + n, mask=(g < G) & (n < N), other=0.0)
    tl.store(out_ptr + n, sum_group(running).to(out_ptr.dtype.element_ty), mask=n < N)


class Config(NamedTuple):
    """Launch parameters of `_partial_kernel` and of `_total_kernel`."""

    block_n: int
    num_warps: int
    maxnreg: int | None = None


PARTIAL = Config(block_n=128, num_warps=8, maxnreg=80)  # three programs share a multiprocessor
PARTIAL_ROOMY = PARTIAL._replace(maxnreg=None)  # where 80 registers don't suffice
TOTAL = Config(block_n=16, num_warps=2)


def partial_config(*, wide: bool, by_rows: bool) -> Config:
    """The launch parameters of `_partial_kernel`; wide: from fp32; by_rows: from matrices with contiguous rows."""
    return PARTIAL if by_rows and not wide else PARTIAL_ROOMY


def _bias_grad_ref(tensors: Tensors, spec: str, dtype: torch.dtype) -> Tensor:
    """The sums of the values."""
    return bias_grad_ref(decode(spec).produce_ref(tensors), dtype)


def _bias_grad_launch(tensors: Tensors, spec: str, dtype: torch.dtype, config: Config | None = None) -> Tensor:
    source: SourceSpec = decode(spec)
    kernel, (M, N) = source.kernel(tensors), source.shape(tensors)
    width = N // source.halves
    sums = allocate_sums(tensors[0], M, N, dtype)
    block_n, num_warps, maxnreg = config or partial_config(wide=is_wide(tensors), by_rows=is_by_rows(tensors))
    launch(
        _partial_kernel,
        cdiv(M, GROUP) * cdiv(width, block_n),
        (sums, kernel.operands, M, width),
        (*kernel.constants(source.dtype), source.halves, GROUP, block_n),
        num_warps=num_warps,
        maxnreg=maxnreg,
        enable_fp_fusion=False,
    )
    return total(sums, M, dtype)


def total_launch(partial_GN: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the partial sums of several groups: a second launch."""
    G, N = partial_GN.shape
    bias_grad_N = partial_GN.new_empty(N, dtype=dtype)
    block_n, num_warps, _ = TOTAL
    launch(_total_kernel, cdiv(N, block_n), (partial_GN, bias_grad_N, G, N), (GROUP, block_n), num_warps=num_warps)
    return bias_grad_N


def allocate_sums(x: Tensor, M: int, N: int, dtype: torch.dtype) -> Tensor:
    """Where a kernel writes the sums of groups of M rows: `partial_GN`, or of one group the bias gradient itself."""
    if _one_group(M):
        return x.new_empty(N, dtype=dtype)
    return x.new_empty(cdiv(M, GROUP), N, dtype=torch.float32)


def total(sums: Tensor, M: int, dtype: torch.dtype) -> Tensor:
    """The bias gradient, of what `allocate_sums` gave and a kernel filled."""
    return sums if _one_group(M) else total_launch(sums, dtype)


def _one_group(M: int) -> bool:
    return 0 < M <= GROUP


def _bias_grad_allocate(tensors: Tensors, spec: str, dtype: torch.dtype) -> Tensor:
    return tensors[0].new_empty(decode(spec).shape(tensors)[1], dtype=dtype)


_bias_grad = register(
    "bias_grad(Tensor[] source, str spec, ScalarType dtype) -> Tensor",
    ref=_bias_grad_ref,
    launch=_bias_grad_launch,
    allocate=_bias_grad_allocate,
)
