"""Bias gradient: sums over the rows of the output gradient.

    sums_RN[r]    = dy_MN[r] + dy_MN[r + 64] + dy_MN[r + 128] + dy_MN[r + 192]    within a group of 256 rows, in fp32
    partial_GN[g] = sums_RN folded: row r + row (r + 32), then row r + row (r + 16), ... down to one row
    bias_grad_N   = partial_GN summed over G in the same way

Shape legend: M = rows (tokens), N = features, G = ceil(M / 256) groups of rows, R = 64 running sums of a group.
The order of the additions is part of the definition on CUDA, whatever the tiles and the layouts of a kernel: so a
kernel that computes the bias gradient beside something else gives the same bits. A fold adds two halves, and the sum
of two numbers has one order only, which leaves the compiler no choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowp.errors import require
from lowp.formats import HIGH_PRECISION
from lowp.kernels._triton import jit, tl, triton
from lowp.registration import register

SUMS = 64
"""Running sums of a group, R: the rows of a tile."""
TILES = 4
"""Tiles of a group, one after the other."""
GROUP = SUMS * TILES


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
def fold(x_RN):
    """Sum the rows by adding halves: `[R, N]` to `[1, N]`, the same bits in any layout."""
    if x_RN.shape[0] == 1:
        return x_RN
    else:
        return fold(tl.sum(tl.reshape(x_RN, [2, x_RN.shape[0] // 2, x_RN.shape[1]]), axis=0))


@jit
def _partial_kernel(
    dy_ptr, partial_ptr, M, N, stride_m, stride_n, SUMS: tl.constexpr, TILES: tl.constexpr, BLOCK_N: tl.constexpr
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    g = tl.program_id(0).to(tl.int64) // tiles_n
    n = tl.program_id(0).to(tl.int64) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    m = g * SUMS * TILES + tl.arange(0, SUMS)[:, None]
    sums = tl.zeros([SUMS, BLOCK_N], tl.float32)
    for tile in range(TILES):
        row = m + tile * SUMS
        sums += tl.load(dy_ptr + row * stride_m + n * stride_n, mask=(row < M) & (n < N), other=0.0).to(tl.float32)
    tl.store(partial_ptr + g * N + n, fold(sums), mask=n < N)


@jit
def _total_kernel(partial_ptr, out_ptr, G, N, SUMS: tl.constexpr, BLOCK_N: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    sums = tl.zeros([SUMS, BLOCK_N], tl.float32)
    for start in range(0, G, SUMS):
        g = start + tl.arange(0, SUMS)[:, None].to(tl.int64)
        sums += tl.load(partial_ptr + g * N + n, mask=(g < G) & (n < N), other=0.0)
    tl.store(out_ptr + n, fold(sums).to(out_ptr.dtype.element_ty), mask=n < N)


class Config(NamedTuple):
    """Launch parameters of `_partial_kernel`."""

    block_n: int
    num_warps: int


PARTIAL = Config(block_n=128, num_warps=4)
TOTAL_BLOCK_N = 32
TOTAL_WARPS = 4


def _bias_grad_launch(dy_MN: Tensor, dtype: torch.dtype, config: Config = PARTIAL) -> Tensor:
    M, N = dy_MN.shape
    partial_GN = allocate_partial(dy_MN)
    block_n, num_warps = config
    _partial_kernel[(partial_GN.shape[0] * triton.cdiv(N, block_n),)](
        dy_MN, partial_GN, M, N, *dy_MN.stride(), SUMS, TILES, block_n, num_warps=num_warps
    )
    return total_launch(partial_GN, dtype)


def total_launch(partial_GN: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the partial sums: the second launch of every kernel that computes a bias gradient."""
    G, N = partial_GN.shape
    bias_grad_N = partial_GN.new_empty(N, dtype=dtype)
    _total_kernel[(triton.cdiv(N, TOTAL_BLOCK_N),)](
        partial_GN, bias_grad_N, G, N, SUMS, TOTAL_BLOCK_N, num_warps=TOTAL_WARPS
    )
    return bias_grad_N


def allocate_partial(dy_MN: Tensor) -> Tensor:
    """Memory for `partial_GN`, for the rows of `dy_MN`."""
    M, N = dy_MN.shape
    return dy_MN.new_empty((M + GROUP - 1) // GROUP, N, dtype=torch.float32)


def _bias_grad_allocate(dy_MN: Tensor, dtype: torch.dtype) -> Tensor:
    return dy_MN.new_empty(dy_MN.shape[1], dtype=dtype)


_bias_grad = register(
    "bias_grad(Tensor dy, ScalarType dtype) -> Tensor",
    ref=bias_grad_ref,
    launch=_bias_grad_launch,
    allocate=_bias_grad_allocate,
)
