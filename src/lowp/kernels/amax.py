"""The largest finite magnitude of a tensor, as partial maxima.

    amax_P[p] = max |x| over the finite x of part p      amax = max_P amax_P      (0 where nothing is finite)

Shape legend: P = parts, a constant of the device type. Which elements make up a part is not specified.
Whoever uses amax takes the maximum of the parts itself, so that no second launch and no atomics are needed. Of a
rising activation's values only the largest is worked out, unless all are small or one overflows.
Source: current scaling of NVIDIA Transformer Engine 2.20, over finite elements only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowp.errors import fail
from lowp.formats import HIGH_PRECISION
from lowp.kernels._triton import cdiv, jit, launch, tl
from lowp.kernels.activation_functions import RISES_FROM, identity
from lowp.kernels.sources import PLAIN, Kernel, Plain, Source, SourceSpec, Tensors, load_plain, rounded
from lowp.registration import register
from lowp.values import decode

PARTIALS = 512
"""Parts on CUDA: one a program, enough programs to fill every GPU."""


def amax(x: Tensor | Source) -> Tensor:
    """The largest finite magnitude of `x`, as partial maxima.

    Args:
        x: any shape, bf16 | fp16 | fp32, any strides; or a source, whose rounded values count.

    Returns:
        amax_P: `[P]` fp32, finite and >= 0, with `P = num_partials(x.device)`; its maximum is amax.

    Raises:
        TypeError: `x` has another dtype.
        ValueError: the source's tensors don't fit each other.
    """
    if isinstance(x, Source):
        x.spec.check("amax", x.tensors)
        return _amax(x.tensors, x.spec.bundle)
    if x.dtype not in HIGH_PRECISION:
        fail("amax", f"x must be one of {HIGH_PRECISION}", got=x.dtype, error=TypeError)
    return _amax((x,), PLAIN[x.dtype].bundle)


def num_partials(device: torch.device) -> int:
    """How many partial maxima `amax` gives on a device."""
    return PARTIALS if device.type == "cuda" else 1


def _amax_ref(tensors: Tensors, spec: str) -> Tensor:
    """The amax of a source's values."""
    return amax_ref(decode(spec).produce_ref(tuple(tensors)))


def amax_ref(x: Tensor) -> Tensor:
    """One part: the whole tensor."""
    if x.numel() == 0:
        return x.new_zeros(1, dtype=torch.float32)
    return x.abs().nan_to_num(nan=0.0, posinf=0.0).amax().float().reshape(1)


@jit
def _largest_of_blocks(
    places,
    first,
    step,
    LOAD: tl.constexpr,
    DTYPE: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATE: tl.constexpr,
    PARAMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
    SIGNED: tl.constexpr,
):
    """At each place of a block, the largest finite magnitude; SIGNED: the largest finite value, and at least 0."""
    operands, rows, cols, blocks, col_blocks = places
    largest_RC = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for block in tl.range(first, blocks, step, num_stages=STAGES):
        r = (block // col_blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        c = (block % col_blocks).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        tiles = LOAD(operands, r, c, rows, cols, DTYPE, FUNCTION, GATE, PARAMS)
        for half in tl.static_range(len(tiles)):
            x = tiles[half].to(tl.float32)
            finite = tl.fma(x, 0.0, x)  # NaN where x is not, which counts for none
            largest_RC = tl.maximum(largest_RC, finite if SIGNED else tl.abs(finite))
    return largest_RC


@jit
def amax_of_blocks(
    places,
    first,
    step,
    LOAD: tl.constexpr,
    DTYPE: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATE: tl.constexpr,
    PARAMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The largest finite magnitude in every `step`-th block of a source, from the `first` one on."""
    return tl.max(
        _largest_of_blocks(
            places, first, step, LOAD, DTYPE, FUNCTION, GATE, PARAMS, BLOCK_R, BLOCK_C, STAGES, SIGNED=False
        )
    )


@jit
def _amax_kernel(
    amax_ptr,
    operands,
    rows,
    cols,
    blocks,
    col_blocks,
    LOAD: tl.constexpr,
    DTYPE: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATE: tl.constexpr,
    PARAMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
    RISING: tl.constexpr,
):
    part, step = tl.program_id(0), tl.num_programs(0)
    places = (operands, rows, cols, blocks, col_blocks)
    if RISING:
        top_RC = _largest_of_blocks(
            places, part, step, LOAD, tl.float32, identity, None, PARAMS, BLOCK_R, BLOCK_C, STAGES, SIGNED=True
        )
        y, _ = FUNCTION(top_RC, PARAMS)
        amax = tl.max(tl.where(top_RC >= RISES_FROM, rounded(y, DTYPE), 0.0))
        if (amax == 0.0) | (amax == float("inf")):
            amax = amax_of_blocks(places, part, step, LOAD, DTYPE, FUNCTION, GATE, PARAMS, BLOCK_R, BLOCK_C, STAGES)
    else:
        amax = amax_of_blocks(places, part, step, LOAD, DTYPE, FUNCTION, GATE, PARAMS, BLOCK_R, BLOCK_C, STAGES)
    tl.store(amax_ptr + part, amax)


class Config(NamedTuple):
    """Launch parameters of `_amax_kernel`."""

    block_r: int
    block_c: int
    num_warps: int
    stages: int = 3


DENSE = Config(block_r=1, block_c=4096, num_warps=4)
STRIDED = Config(block_r=32, block_c=128, num_warps=4)
COMPUTED = Config(block_r=2, block_c=1024, num_warps=4)
"""Of values that are worked out."""


def amax_launch(tensors: Tensors, spec: str, config: Config | None = None) -> Tensor:
    """Launch the kernel; for casts of many values too."""
    source: SourceSpec = decode(spec)
    amax_P = _amax_allocate(tensors, spec)
    if isinstance(source, Plain):
        kernel, rows, cols = _plain(tensors[0])
        config = config or (DENSE if rows == 1 else STRIDED)
    else:
        kernel, (rows, cols) = source.kernel(tensors), source.shape(tensors)
        cols //= source.halves
        config = config or COMPUTED
    block_r, block_c, num_warps, stages = config
    col_blocks = cdiv(cols, block_c)
    launch(
        _amax_kernel,
        PARTIALS,
        (amax_P, kernel.operands, rows, cols, cdiv(rows, block_r) * col_blocks, col_blocks),
        (*kernel.constants(source.dtype), block_r, block_c, stages, kernel.rising),
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
    return amax_P


def _plain(x: Tensor) -> tuple[Kernel, int, int]:
    """A tensor of any shape as rows and columns: one long row, if it is contiguous."""
    if x.is_contiguous():
        rows, cols, stride_r, stride_c = 1, x.numel(), 0, 1
    else:
        x, (rows, cols, stride_r, stride_c) = _two_axes(x)
    return Kernel(load_plain, (x, stride_r, stride_c)), rows, cols


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


def _amax_allocate(tensors: Tensors, spec: str) -> Tensor:
    return tensors[0].new_empty(num_partials(tensors[0].device), dtype=torch.float32)


_amax = register(
    "amax(Tensor[] source, str spec) -> Tensor", ref=_amax_ref, launch=amax_launch, allocate=_amax_allocate
)
