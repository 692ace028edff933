"""Transposition of a quantized row copy into a column copy, where one scale holds for the whole tensor.

    column_data[k, m] = row_data[m, k]

Shape legend: M = rows, K = features, Mp and Kp = padded to the contraction alignment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowp.errors import fail
from lowp.kernels._triton import cdiv, jit, launch, tl
from lowp.kernels.cast_kernel import pad_contraction
from lowp.registration import register

BLOCK = 64


def transpose_data(row_data: Tensor, columns: int) -> Tensor:
    """Transpose fp8 data.

    Args:
        row_data: `[M, Kp]` fp8, row-major.
        columns: K, the size of the last axis without padding.

    Returns:
        column_data: `[K, Mp]`, row-major, padded with zeros.

    Raises:
        ValueError: `row_data` is not 2-D and row-major, or has fewer than K columns.
    """
    if row_data.ndim != 2 or not row_data.is_contiguous() or columns > row_data.shape[1]:
        rule = f"row_data must be 2-D and row-major, with at least {columns} columns"
        fail("transpose_data", rule, got=(tuple(row_data.shape), row_data.stride()))
    return _transpose(row_data, columns)


def _transpose_ref(row_data: Tensor, columns: int) -> Tensor:
    out = _transpose_allocate(row_data, columns)
    codes = out.view(torch.uint8).zero_()
    codes[:, : row_data.shape[0]] = row_data.view(torch.uint8)[:, :columns].t()
    return out


@jit
def _transpose_kernel(source, out, M, K, Kp, Mp, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(source + m[:, None] * Kp + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0)
    tl.store(out + k[:, None] * Mp + m[None, :], tl.trans(codes), mask=(k < K)[:, None] & (m < Mp)[None, :])


def _transpose_launch(row_data: Tensor, columns: int) -> Tensor:
    out = _transpose_allocate(row_data, columns)
    M, Kp = row_data.shape
    K, Mp = out.shape
    if out.numel():
        args = (row_data.view(torch.uint8), out.view(torch.uint8), M, K, Kp, Mp)
        launch(_transpose_kernel, (cdiv(Mp, BLOCK), cdiv(K, BLOCK)), args, (BLOCK,), num_warps=4)
    return out


def _transpose_allocate(row_data: Tensor, columns: int) -> Tensor:
    return row_data.new_empty(columns, pad_contraction(row_data.shape[0]))


_transpose = register(
    "transpose(Tensor row_data, SymInt columns) -> Tensor",
    ref=_transpose_ref,
    launch=_transpose_launch,
    allocate=_transpose_allocate,
)
