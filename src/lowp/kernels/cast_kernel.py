"""The Triton kernel behind `lowp.kernels.cast`: one pass over the values of a source.

A program takes a tile of rows and columns, writes it along either axis or both, and sums its rows. A source with two
halves gives two tiles at a time, so that what both need is read and worked out once. Without an amax, each program
finds that of all values first: of few, so that it is cheaper than another launch.

Shape legend: M = rows (tokens), K = features, P = parts of amax, G = groups of rows (see lowp.kernels.bias_grad).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lowp.kernels._triton import cdiv, constexpr, jit, launch, tl
from lowp.kernels.amax import amax_of_blocks
from lowp.kernels.bias_grad import GROUP, sum_group, sum_group_of_two
from lowp.kernels.float8 import encode, first_parts_of_amax, largest_part, multiplier_of
from lowp.kernels.sources import Plain, SourceSpec, Tensors, is_by_rows, is_wide, load_plain_kept
from lowp.quantizers import Float8CurrentScalingQuantizer
from lowp.values import decode

CONTRACTION_ALIGNMENT = 16
"""FP8 GEMMs want rows of a multiple of 16 bytes along the contraction axis (cuBLAS, torch._scaled_mm)."""


def pad_contraction(size: int) -> int:
    """The size of a contraction axis in FP8 data: `size` rounded up to the alignment of FP8 GEMMs."""
    return (size + CONTRACTION_ALIGNMENT - 1) // CONTRACTION_ALIGNMENT * CONTRACTION_ALIGNMENT


_AMAX_STAGES = constexpr(3)  # as in lowp.kernels.amax


@jit
def _store_sums(sums_ptr, tiles, tile_m, k, M, K, HALVES: tl.constexpr):
    """Store the sums of a tile's rows; those of two halves go through one exchange."""
    pointers = sums_ptr + tile_m * (HALVES * K) + k
    stored = (tile_m * tiles[0].shape[0] < M) & (k < K)
    if HALVES == 2:
        first, last = sum_group_of_two(tiles[0].to(tl.float32), tiles[1].to(tl.float32))
        tl.store(pointers, first, mask=stored)
    else:
        last = sum_group(tiles[0].to(tl.float32))
    tl.store(pointers + (HALVES - 1) * K, last, mask=stored)


@jit
def _cast_kernel(
    scale_ptr,
    operands,
    amax_ptr,
    row_ptr,
    column_ptr,
    sums_ptr,
    M,
    K,
    M_padded,
    K_padded,
    P,
    epsilon,
    LOAD: tl.constexpr,
    DTYPE: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATE: tl.constexpr,
    PARAMS: tl.constexpr,
    HALVES: tl.constexpr,
    LOAD_FIRST: tl.constexpr,
    FMT_MAX: tl.constexpr,
    POWER_2: tl.constexpr,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    K_before = (HALVES - 1) * K  # columns before the last half, which is the one that is padded
    tiles_k = tl.maximum(tl.cdiv(K_padded - K_before, BLOCK_K), 1)
    tile_m = program // tiles_k
    row, column = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_K)[None, :]
    if BIAS and HALVES == 2:  # eight neighbours a thread: with more, rows that it is to add lie in several warps
        row, column = tl.max_contiguous(row, [8, 1]), tl.max_contiguous(column, [1, 8])
    m, k = tile_m * BLOCK_M + row, program % tiles_k * BLOCK_K + column
    EARLY: tl.constexpr = (amax_ptr is not None) and HALVES == 1 and not BIAS  # elsewhere no registers are left for it
    if EARLY:
        parts_P = first_parts_of_amax(amax_ptr, P, BLOCK_P)
    if LOAD_FIRST is not None:
        tiles = LOAD_FIRST(operands, m, k, M, K, DTYPE, FUNCTION, GATE, PARAMS)
    else:
        tiles = LOAD(operands, m, k, M, K, DTYPE, FUNCTION, GATE, PARAMS)
    if BIAS:
        _store_sums(sums_ptr, tiles, tile_m, k, M, K, HALVES)
    if LOAD_FIRST is not None:
        tiles = LOAD(operands, m, k, M, K, DTYPE, FUNCTION, GATE, PARAMS)
    if amax_ptr is None:
        col_blocks = tl.cdiv(K, BLOCK_C)
        blocks = tl.cdiv(M, BLOCK_R) * col_blocks
        places = (operands, M, K, blocks, col_blocks)
        amax = amax_of_blocks(places, 0, 1, LOAD, DTYPE, FUNCTION, GATE, PARAMS, BLOCK_R, BLOCK_C, _AMAX_STAGES)
    else:
        if not EARLY:
            parts_P = first_parts_of_amax(amax_ptr, P, BLOCK_P)
        amax = largest_part(parts_P, amax_ptr, P, BLOCK_P)
    multiplier = multiplier_of(amax, epsilon, FMT_MAX, POWER_2)
    if program == 0:
        tl.store(scale_ptr, tl.div_rn(1.0, multiplier))
    for half in tl.static_range(HALVES):
        q = encode(tiles[half].to(tl.float32), multiplier, row_ptr.dtype.element_ty)
        if ROW:
            width = K if half < HALVES - 1 else K_padded - K_before
            tl.store(row_ptr + m * K_padded + half * K + k, q, mask=(m < M) & (k < width))
        if COLUMN:
            columns = tl.trans((half * K + k) * M_padded + m)
            tl.store(column_ptr + columns, tl.trans(q), mask=tl.trans((k < K) & (m < M_padded)))


class Config(NamedTuple):
    """Launch parameters of `_cast_kernel`; with a bias gradient, `block_m` is `GROUP`."""

    block_m: int
    block_k: int
    num_warps: int
    maxnreg: int | None = None


# Measured on an H200; 96 registers let five programs share a multiprocessor.
ROW_ONLY = Config(block_m=8, block_k=512, num_warps=4)
TRANSPOSING = Config(block_m=GROUP, block_k=128, num_warps=4, maxnreg=96)
TRANSPOSING_SCATTERED = TRANSPOSING._replace(maxnreg=None)  # where loads can't be wide, 96 registers don't suffice
COMPUTED = Config(block_m=GROUP, block_k=128, num_warps=8)
COMPUTED_NARROW = Config(block_m=GROUP, block_k=64, num_warps=4)
# With sums, as many threads as columns: one exchange between them, and no copies.
COMPUTED_SUMMING = Config(block_m=GROUP, block_k=128, num_warps=4)
COMPUTED_SUMMING_NARROW = Config(block_m=GROUP, block_k=64, num_warps=2)
COMPUTED_SUMMING_HALVES = Config(block_m=GROUP, block_k=64, num_warps=4, maxnreg=96)
COMPUTED_SUMMING_HALVES_ROOMY = COMPUTED_SUMMING_HALVES._replace(maxnreg=128)  # where 96 registers don't suffice
BLOCK_P = 512
"""Parts of amax that a program reads at a time."""
_AMAX_VALUES, _AMAX_VALUES_OF_A_WARP = 4096, 1024
"""Values of which a program finds the amax at a time, where it finds all of it: as many as fit the registers."""
_NARROWEST, _WIDEST = 16, 1024
"""Columns of such a block, a power of two between these: few shapes, and whole cache lines."""
_FEW_BLOCKS = 16
"""Of so many blocks each program finds the amax: 5.3 us on an H200, where two launches take 2.5 and 2.7 us."""


def finds_amax(M: int, K: int) -> bool:
    """Whether a cast of so many values finds their amax in the same launch."""
    rows, columns = amax_block(K, halves=1, num_warps=_AMAX_VALUES // _AMAX_VALUES_OF_A_WARP)
    return cdiv(M, rows) * cdiv(K, columns) <= _FEW_BLOCKS


def amax_block(width: int, halves: int, num_warps: int) -> tuple[int, int]:
    """Rows and columns of a block of values of which the amax is found."""
    columns = min(max(1 << (width - 1).bit_length(), _NARROWEST), _WIDEST)
    values = min(_AMAX_VALUES_OF_A_WARP * num_warps, _AMAX_VALUES) // halves
    return max(values // columns, 1), columns


def _config(source: SourceSpec, tensors: Tensors, transposing: bool, summing: bool) -> Config:
    if not (transposing or summing):
        return ROW_ONLY
    if not isinstance(source, Plain):
        return computed_config(source.halves, wide=is_wide(tensors), by_rows=is_by_rows(tensors), summing=summing)
    x_MK = tensors[0]
    return TRANSPOSING if x_MK.shape[1] % 16 == 0 and 1 in x_MK.stride() else TRANSPOSING_SCATTERED


def computed_config(halves: int, *, wide: bool, by_rows: bool, summing: bool) -> Config:
    """The tiles of values that are worked out: of two halves, or from fp32, half as many fit the registers.

    wide: from fp32. by_rows: from matrices whose rows are contiguous.
    """
    if summing and halves > 1:
        return COMPUTED_SUMMING_HALVES if by_rows and not wide else COMPUTED_SUMMING_HALVES_ROOMY
    if summing:
        return COMPUTED_SUMMING_NARROW if wide else COMPUTED_SUMMING
    return COMPUTED_NARROW if wide or halves > 1 else COMPUTED


def cast_launch(
    tensors: Tensors,
    source: SourceSpec,
    amax_P: Tensor | None,
    quantizer: str,
    outputs: tuple[Tensor | None, Tensor | None, Tensor],
    sums: Tensor | None,
    config: Config | None,
) -> None:
    """Fill `row_data`, `column_data`, `scale` and the sums of groups: the launch of every kernel that casts."""
    row_data, column_data, scale = outputs
    rule: Float8CurrentScalingQuantizer = decode(quantizer)
    kernel, halves, (M, K) = source.kernel(tensors), source.halves, source.shape(tensors)
    bias = sums is not None
    block_m, block_k, num_warps, maxnreg = config or _config(source, tensors, column_data is not None, bias)
    M_padded, K_padded, width = pad_contraction(M), pad_contraction(K), K // halves
    tiles_k = cdiv(K_padded - (halves - 1) * width, block_k)
    copies = (column_data if row_data is None else row_data, column_data, sums)
    amax_blocks: tuple[int | None, int | None] = (None, None)
    if amax_P is None:
        amax_blocks, maxnreg = amax_block(width, halves, num_warps), None  # the second loop needs registers too
    parts = 0 if amax_P is None else amax_P.numel()
    sizes = (M, width, M_padded, K_padded, parts, rule.amax_epsilon)
    load_first = load_plain_kept if bias and isinstance(source, Plain) else None
    flags = (rule.fmt.max, rule.power_2_scale, row_data is not None, column_data is not None, bias)
    launch(
        _cast_kernel,
        max(cdiv(M_padded, block_m) * tiles_k, 1),  # the scale is written even without data
        (scale, kernel.operands, amax_P, *copies, *sizes),
        (
            *kernel.constants(source.dtype),
            halves,
            load_first,
            *flags,
            block_m,
            block_k,
            BLOCK_P,
            *amax_blocks,
        ),
        num_warps=num_warps,
        maxnreg=maxnreg,
        enable_fp_fusion=False,
    )
