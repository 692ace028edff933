"""Launch parameters of the norms' forward kernels: see lowp.kernels.norm_kernel.

Shape legend: M = rows (tokens), K = features.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from lowp.kernels.amax import PARTIALS


def power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`, and at least 1."""
    return 1 << max(size - 1, 0).bit_length()


class Config(NamedTuple):
    """Launch parameters of `norm_kernel`.

    Attributes:
        block_m: rows of a tile.
        num_warps: warps of a program.
        programs: at most so many, each with several tiles in turn; 0: one program a tile.
        keep: whether a program keeps the parameters in registers.
        prefetch: whether a program reads its next tile before it works on this one.
        columns: how amax is found. 0: element by element; 1 or `block_m`: column by column, from the extremes of all
            rows or of each row of a tile, which takes less work and more registers.
        maxnreg: registers of a thread at most; None: as many as the compiler likes.
    """

    block_m: int
    num_warps: int
    programs: int = 0
    keep: bool = False
    prefetch: bool = False
    columns: int = 0
    maxnreg: int | None = None


class LongConfig(NamedTuple):
    """Launch parameters of `norm_long_kernel`."""

    block_k: int
    num_warps: int
    programs: int = 0
    maxnreg: int | None = None


LONGEST = 16384
"""Features of the longest row that is held in registers."""
LONG = LongConfig(block_k=8192, num_warps=16)
TILE = 4096
"""Elements of a tile where rows are shorter, unless they are so short that it has `ROWS` rows."""
ROWS = 16
_WHOLE = 1024
"""Features from which on all threads of a program share each row of a tile: each of them then holds whole columns."""
_MULTIPROCESSORS = 132
_RESIDENT = _MULTIPROCESSORS * 16384
"""Elements on which an H200 works at a time."""

# Features of a tile, whether a mean is subtracted, whether y is written. Measured on an H200, for full tiles of 16-bit
# elements; rows that leave part of a tile empty are not measured. As many programs as fit the registers, or so few
# registers that one more fits, even if some are spilled.
_WITH_AMAX = {
    (4096, False, False): Config(1, 4, PARTIALS, prefetch=True, columns=1),
    (4096, False, True): Config(1, 4, 3 * _MULTIPROCESSORS, keep=True, prefetch=True, columns=1),
    (4096, True, False): Config(1, 4, PARTIALS, prefetch=True, columns=1, maxnreg=128),
    (4096, True, True): Config(2, 4, 2 * _MULTIPROCESSORS, prefetch=True, columns=1),
    (8192, False, False): Config(1, 8, 2 * _MULTIPROCESSORS, prefetch=True, columns=1),
    (8192, False, True): Config(1, 8, 2 * _MULTIPROCESSORS, prefetch=True, columns=1, maxnreg=128),
    (8192, True, False): Config(1, 8, 2 * _MULTIPROCESSORS, prefetch=True, columns=1, maxnreg=128),
    (8192, True, True): Config(2, 8, 1 * _MULTIPROCESSORS, prefetch=True, columns=1),
}
_FULL_8192 = Config(1, 8, maxnreg=64)
"""Likewise, without an amax, of 8192 features: a fourth program fits the registers."""


@lru_cache
def config_for(K: int, itemsize: int, *, centered: bool, output: bool, amax: bool) -> Config | LongConfig:
    """The launch parameters for rows of K features of so many bytes.

    Sums over a row are in an order that follows from `num_warps` and the features of a tile: both are the same with
    and without an amax. With one, each program writes a part of it: there are at most `PARTIALS`.
    """
    block_k = power_of_2(K)
    if block_k > LONGEST:
        return LONG._replace(programs=PARTIALS if amax else 0)
    block_m = min(max(TILE // block_k, 1), ROWS)
    tile = block_m * block_k
    num_warps = 32 if tile == LONGEST else max(tile // 1024, 1)
    if not amax:
        return _FULL_8192 if K == 8192 and itemsize == 2 else Config(block_m, num_warps)
    if itemsize == 2 and (block_k, centered, output) in _WITH_AMAX:
        return _WITH_AMAX[block_k, centered, output]
    programs = min(_RESIDENT // tile, PARTIALS)
    if tile == LONGEST:
        return Config(block_m, num_warps, programs, prefetch=itemsize == 2)
    columns = 1 if block_k >= _WHOLE else block_m
    return Config(block_m, num_warps, programs, keep=not centered, prefetch=True, columns=columns)
