"""Dequantization with one scale for the tensor.

    x = q * scale, computed in fp32 and rounded once

Shape legend: K = features, Kp = K padded to the contraction alignment.
Source: OCP 8-bit Floating Point Specification (OFP8), rev 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowp.errors import fail
from lowp.kernels._triton import cdiv, jit, launch, tl
from lowp.registration import register

_BLOCK = 2048


def dequantize_data(data: Tensor, scale: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Dequantize `data` and drop its padding.

    Args:
        data: `[..., Kp]` fp8, row-major.
        scale: fp32, one element; multiplies to dequantize.
        columns: K, the size of the last axis without padding.
        dtype: fp32 | bf16 | fp16, of the result.

    Returns:
        x: `[..., K]` `dtype`.

    Raises:
        ValueError: `data` is not row-major, or has fewer than K columns.
    """
    if not data.is_contiguous() or columns > data.shape[-1]:
        rule = f"data must be row-major, with at least {columns} columns"
        fail("dequantize_data", rule, got=(tuple(data.shape), data.stride()))
    return _dequantize(data, scale, columns, dtype)


def _dequantize_ref(data: Tensor, scale: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return (data.narrow(-1, 0, columns).to(torch.float32) * scale).to(dtype).contiguous()


@jit
def _dequantize_kernel(data, scale, out, total, columns, padded_columns, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < total
    source = index if columns == padded_columns else index // columns * padded_columns + index % columns
    q = tl.load(data + source, mask=inside)
    tl.store(out + index, (q.to(tl.float32) * tl.load(scale)).to(out.dtype.element_ty), mask=inside)


def _dequantize_launch(data: Tensor, scale: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    out = _dequantize_allocate(data, scale, columns, dtype)
    if out.numel():
        args = (data, scale, out, out.numel(), columns, data.shape[-1])
        launch(_dequantize_kernel, cdiv(out.numel(), _BLOCK), args, (_BLOCK,), num_warps=8)
    return out


def _dequantize_allocate(data: Tensor, scale: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return data.new_empty((*data.shape[:-1], columns), dtype=dtype)


_dequantize = register(
    "dequantize(Tensor data, Tensor scale, SymInt columns, ScalarType dtype) -> Tensor",
    ref=_dequantize_ref,
    launch=_dequantize_launch,
    allocate=_dequantize_allocate,
)
