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

from lowp.errors import require
from lowp.formats import HIGH_PRECISION
from lowp.kernels._triton import cdiv, jit, launch, tl
from lowp.registration import register

GROUP = 64
"""Rows that are summed to one partial sum."""


def bias_grad(dy_MN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum `dy_MN` over its rows, in fp32 and in one fixed order.

    Args:
        dy_MN: `[M, N]` bf16 | fp16 | fp32, any strides.
        dtype: bf16 | fp16 | fp32 of the result; that of `dy_MN` by default.

    Returns:
        bias_grad_N: `[N]` `dtype`; zeros where M is 0.

    Raises:
        ValueError: `dy_MN` is not 2-D.
        TypeError: `dy_MN` or the result would have another dtype.
    """
    dtype = dtype or dy_MN.dtype
    require(
        dy_MN.ndim == 2,
        "bias_grad",
        "dy_MN must be 2-D",
        got=tuple(dy_MN.shape),
        hint="Flatten leading dimensions with dy.flatten(0, -2).",
    )
    for name, value in (("dy_MN", dy_MN.dtype), ("dtype", dtype)):
        require(
            value in HIGH_PRECISION, "bias_grad", f"{name} must be one of {HIGH_PRECISION}", got=value, error=TypeError
        )
    return _bias_grad(dy_MN, dtype)


def bias_grad_ref(dy_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum in fp32, in torch's order."""
    return dy_MN.sum(0, dtype=torch.float32).to(dtype)


@jit
def sum_group(x_RN):
    """Sum 64 fp32 rows to one: `[64, N]` to `[1, N]`; two steps within a thread, then one exchange between threads."""
    x_RN = tl.sum(tl.reshape(x_RN, [2, 32, x_RN.shape[1]]), axis=0)
    x_RN = tl.sum(tl.reshape(x_RN, [2, 16, x_RN.shape[1]]), axis=0)
    x_NR = tl.trans(x_RN)
    for _ in tl.static_range(4):
        even, odd = tl.split(tl.reshape(x_NR, [x_NR.shape[0], x_NR.shape[1] // 2, 2]))
        x_NR = even + odd
    return tl.trans(x_NR)


@jit
def _partial_kernel(
    dy_ptr,
    partial_ptr,
    M,
    N,
    stride_m,
    stride_n,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0).to(tl.int64) // tiles_n
    m = group * GROUP + tl.arange(0, GROUP)[:, None]
    n = tl.program_id(0).to(tl.int64) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    dy = tl.load(dy_ptr + m * stride_m + n * stride_n, mask=(m < M) & (n < N), other=0.0)
    tl.store(partial_ptr + group * N + n, sum_group(dy.to(tl.float32)), mask=n < N)


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


PARTIAL = Config(block_n=128, num_warps=8)
TOTAL = Config(block_n=16, num_warps=2)


def _bias_grad_launch(dy_MN: Tensor, dtype: torch.dtype, config: Config = PARTIAL) -> Tensor:
    M, N = dy_MN.shape
    partial_GN = allocate_partial(dy_MN)
    block_n, num_warps = config
    programs = cdiv(M, GROUP) * cdiv(N, block_n)
    args = (dy_MN, partial_GN, M, N, *dy_MN.stride())
    launch(_partial_kernel, programs, args, (GROUP, block_n), num_warps=num_warps)
    return total_launch(partial_GN, dtype)


def total_launch(partial_GN: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the partial sums: the second launch of every kernel that computes a bias gradient."""
    G, N = partial_GN.shape
    bias_grad_N = partial_GN.new_empty(N, dtype=dtype)
    block_n, num_warps = TOTAL
    launch(_total_kernel, cdiv(N, block_n), (partial_GN, bias_grad_N, G, N), (GROUP, block_n), num_warps=num_warps)
    return bias_grad_N


def allocate_partial(dy_MN: Tensor) -> Tensor:
    """Memory for `partial_GN`, for the rows of `dy_MN`."""
    M, N = dy_MN.shape
    return dy_MN.new_empty(cdiv(M, GROUP), N, dtype=torch.float32)


def _bias_grad_allocate(dy_MN: Tensor, dtype: torch.dtype) -> Tensor:
    return dy_MN.new_empty(dy_MN.shape[1], dtype=dtype)


_bias_grad = register(
    "bias_grad(Tensor dy, ScalarType dtype) -> Tensor",
    ref=bias_grad_ref,
    launch=_bias_grad_launch,
    allocate=_bias_grad_allocate,
)
