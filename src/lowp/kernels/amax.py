"""The largest finite magnitude of a tensor, as partial maxima.

    amax_P[p] = max |x| over the finite x of part p      amax = max_P amax_P      (0 where nothing is finite)

Shape legend: P = parts, a constant of the device type. Which elements make up a part is not specified.
Whoever uses amax takes the maximum of the parts itself, so that no second launch and no atomics are needed.
Source: current scaling of NVIDIA Transformer Engine 2.20, over finite elements only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowp.errors import fail
from lowp.formats import HIGH_PRECISION
from lowp.kernels._triton import cdiv, jit, launch, tl
from lowp.registration import register

PARTIALS = 512
"""Parts on CUDA: one a program, enough programs to fill every GPU."""


def amax(x: Tensor) -> Tensor:
    """The largest finite magnitude of `x`, as partial maxima.

    Args:
        x: any shape, bf16 | fp16 | fp32, any strides.

    Returns:
        amax_P: `[P]` fp32, finite and >= 0, with `P = num_partials(x.device)`; its maximum is amax.

    Raises:
        TypeError: `x` has another dtype.
    """
    if x.dtype not in HIGH_PRECISION:
        fail("amax", f"x must be one of {HIGH_PRECISION}", got=x.dtype, error=TypeError)
    return _amax(x)


def num_partials(device: torch.device) -> int:
    """How many partial maxima `amax` gives on a device."""
    return PARTIALS if device.type == "cuda" else 1


def _amax_ref(x: Tensor) -> Tensor:
    """One part: the whole tensor."""
    if x.numel() == 0:
        return x.new_zeros(1, dtype=torch.float32)
    return x.abs().nan_to_num(nan=0.0, posinf=0.0).amax().float().reshape(1)


@jit
def _amax_kernel(
    x_ptr, amax_ptr, rows, cols, stride_r, stride_c, blocks, col_blocks, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    part = tl.program_id(0)
    amax_RC = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for block in tl.range(part, blocks, tl.num_programs(0), num_stages=3):
        r = (block // col_blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        c = (block % col_blocks).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        x = tl.load(x_ptr + r * stride_r + c * stride_c, mask=(r < rows) & (c < cols), other=0.0)
        magnitude = tl.abs(x.to(tl.float32))
        amax_RC = tl.maximum(amax_RC, tl.where(magnitude < float("inf"), magnitude, 0.0))
    tl.store(amax_ptr + part, tl.max(amax_RC))


class Config(NamedTuple):
    """Launch parameters of `_amax_kernel`."""

    block_r: int
    block_c: int
    num_warps: int


DENSE = Config(block_r=1, block_c=4096, num_warps=4)
STRIDED = Config(block_r=32, block_c=128, num_warps=4)


def _amax_launch(x: Tensor, config: Config | None = None) -> Tensor:
    amax_P = _amax_allocate(x)
    if x.is_contiguous():
        rows, cols, stride_r, stride_c = 1, x.numel(), 0, 1
    else:
        x, (rows, cols, stride_r, stride_c) = _two_axes(x)
    block_r, block_c, num_warps = config or (DENSE if rows == 1 else STRIDED)
    col_blocks = cdiv(cols, block_c)
    args = (x, amax_P, rows, cols, stride_r, stride_c, cdiv(rows, block_r) * col_blocks, col_blocks)
    launch(_amax_kernel, PARTIALS, args, (block_r, block_c), num_warps=num_warps)
    return amax_P


def _two_axes(x: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """View the elements of `x`, in any order, as rows and columns; copies `x` if that takes more than two axes."""
    axes: list[tuple[int, int]] = []
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if stride == 0 or size == 1:  # an expanded axis repeats its elements
            continue
        if axes and axes[-1][0] * axes[-1][1] == stride:
            axes[-1] = (axes[-1][0] * size, axes[-1][1])
        else:
            axes.append((size, stride))
    if len(axes) > 2:
        return x.contiguous(), (1, x.numel(), 0, 1)
    (cols, stride_c), (rows, stride_r) = [*axes, (1, 0), (1, 0)][:2]
    return x, (rows, cols, stride_r, stride_c)


def _amax_allocate(x: Tensor) -> Tensor:
    return x.new_empty(num_partials(x.device), dtype=torch.float32)


_amax = register("amax(Tensor x) -> Tensor", ref=_amax_ref, launch=_amax_launch, allocate=_amax_allocate)
