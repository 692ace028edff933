"""The values of a source as a tensor.

    out_MK = values_MK          (see lowp.kernels.sources)

Shape legend: M = rows (tokens), K = columns of the values.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lowp.kernels._triton import cdiv, jit, launch, tl
from lowp.kernels.sources import Source, SourceSpec, Tensors, as_source
from lowp.registration import register
from lowp.values import decode


def materialize(x_MK: Tensor | Source) -> Tensor:
    """Write the values of a source.

    Args:
        x_MK: a source; or a tensor, `[M, K]` bf16 | fp16 | fp32, any strides, which is copied.

    Returns:
        out_MK: `[M, K]` of the source's dtype, row-major.

    Raises:
        ValueError: `x_MK` is not 2-D, or the source's tensors don't fit each other.
        TypeError: a dtype is another.
    """
    source = as_source("materialize", x_MK)
    return _materialize(source.tensors, source.spec.bundle)


def _materialize_ref(tensors: Tensors, spec: str) -> Tensor:
    """A copy of the values."""
    return _materialize_allocate(tensors, spec).copy_(decode(spec).produce_ref(tensors))


@jit
def _materialize_kernel(
    out_ptr,
    operands,
    M,
    K,
    LOAD: tl.constexpr,
    DTYPE: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATE: tl.constexpr,
    PARAMS: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_k = tl.cdiv(K, BLOCK_K)
    m = tl.program_id(0).to(tl.int64) // tiles_k * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    k = tl.program_id(0).to(tl.int64) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    tiles = LOAD(operands, m, k, M, K, DTYPE, FUNCTION, GATE, PARAMS)
    for half in tl.static_range(HALVES):
        tl.store(out_ptr + m * (HALVES * K) + half * K + k, tiles[half].to(DTYPE), mask=(m < M) & (k < K))


class Config(NamedTuple):
    """Launch parameters of `_materialize_kernel`."""

    block_m: int
    block_k: int
    num_warps: int


TILE = Config(block_m=4, block_k=512, num_warps=4)


def _materialize_launch(tensors: Tensors, spec: str, config: Config = TILE) -> Tensor:
    source: SourceSpec = decode(spec)
    out_MK = _materialize_allocate(tensors, spec)
    kernel, (M, K), halves = source.kernel(tensors), source.shape(tensors), source.halves
    block_m, block_k, num_warps = config
    if out_MK.numel():
        launch(
            _materialize_kernel,
            cdiv(M, block_m) * cdiv(K // halves, block_k),
            (out_MK, kernel.operands, M, K // halves),
            (*kernel.constants(source.dtype), halves, block_m, block_k),
            num_warps=num_warps,
            enable_fp_fusion=False,
        )
    return out_MK


def _materialize_allocate(tensors: Tensors, spec: str) -> Tensor:
    source: SourceSpec = decode(spec)
    return tensors[0].new_empty(source.shape(tensors), dtype=source.dtype)


_materialize = register(
    "materialize(Tensor[] source, str spec) -> Tensor",
    ref=_materialize_ref,
    launch=_materialize_launch,
    allocate=_materialize_allocate,
)
