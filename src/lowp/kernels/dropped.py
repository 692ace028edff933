"""Dropout as a source: the same random bits on every device, in every kernel, forward and backward.

    y_MK = x_MK * keep_MK / (1 - p)             in fp32; 1 / (1 - p) is rounded to fp32 first
    keep_MK[m, k] = word k % 4 of philox(counter = (k // 4, m, offset), key = seed) >= p 2^32

The gradient of dropout is dropout of the gradient, from the same seed.

Shape legend: M = rows (tokens), K = features, G = groups of four columns, which share a counter.
Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011): Philox4x32-10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowp.errors import fail
from lowp.kernels._triton import jit, tl
from lowp.kernels.sources import Kernel, Source, SourceSpec, Tensors, check_count, check_matrix, rounded, widened

_MASK = 2**32 - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@dataclass(frozen=True, kw_only=True)
class Dropped(SourceSpec):
    """A matrix of which some elements are dropped, and the others scaled.

    Tensors: `x_MK` bf16 | fp16 | fp32, any strides; `seed` `[2]` int64 on the same device: seed and offset.

    Attributes:
        dtype: to which the values are rounded.
        p: the probability of an element to be dropped, from 0 to 1.

    Raises:
        ValueError: `p` is out of range.
        TypeError: `dtype` is another.
    """

    dtype: torch.dtype
    p: float

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            fail("Dropped", "p must be from 0 to 1", got=self.p)
        super().__post_init__()

    @property
    def threshold(self) -> int:
        """The least word whose element is kept."""
        return min(math.ceil(self.p * 2**32), _MASK)

    @property
    def scale(self) -> float:
        """The factor of what is kept; 0 where nothing is."""
        return 1.0 / (1.0 - self.p) if self.p < 1 else 0.0

    def check(self, op: str, tensors: Tensors) -> None:
        """Raise unless it is a matrix and a seed."""
        check_count(op, tensors, 2)
        x_MK, seed = tensors
        check_matrix(op, "x_MK", x_MK)
        if seed.dtype != torch.int64 or seed.shape != (2,):
            fail(op, "seed must be two int64, seed and offset", got=(seed.dtype, tuple(seed.shape)))

    def shape(self, tensors: Tensors) -> tuple[int, int]:
        """That of `x_MK`."""
        M, K = tensors[0].shape
        return M, K

    def produce_ref(self, tensors: Tensors) -> Tensor:
        """The formula, in fp32."""
        x_MK, seed = tensors
        words = words_ref(seed, x_MK.shape[0], (x_MK.shape[1] + 3) // 4)
        kept = words.flatten(1)[:, : x_MK.shape[1]] >= self.threshold
        return (x_MK.float() * torch.where(kept, self.scale, 0.0)).to(self.dtype)

    def kernel(self, tensors: Tensors) -> Kernel:
        """One load beside the random words."""
        x_MK, seed = tensors
        return Kernel(load_dropped, (x_MK, *x_MK.stride(), seed.contiguous()), params=(self.threshold, self.scale))


def dropped(x_MK: Tensor, seed: Tensor, p: float, *, dtype: torch.dtype | None = None) -> Source:
    """The source of dropout.

    Args:
        x_MK: `[M, K]` bf16 | fp16 | fp32, any strides.
        seed: `[2]` int64, on the device of `x_MK`: seed and offset. Other offsets give independent bits.
        p: the probability of an element to be dropped, from 0 to 1.
        dtype: to which the values are rounded; that of `x_MK` by default.

    Raises:
        ValueError: `p` is out of range.
        TypeError: `dtype` is another.
    """
    return Source((x_MK, seed), Dropped(dtype=dtype or x_MK.dtype, p=p))


def words_ref(seed: Tensor, M: int, G: int) -> Tensor:
    """`[M, G, 4]` random words of groups of four columns, as int64."""
    (seed_low, seed_high), (offset_low, offset_high) = [(n & _MASK, n >> 32 & _MASK) for n in seed]
    zero = torch.zeros(M, G, dtype=torch.int64, device=seed.device)
    group, row = torch.arange(G, device=seed.device), torch.arange(M, device=seed.device)[:, None]
    counter = (zero + group, zero + row, zero + offset_low, zero + offset_high)
    return torch.stack(philox_ref(counter, (seed_low, seed_high)), dim=-1)


def philox_ref(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-10 on words in int64: products wrap at 2^64, and both words of them come out right all the same."""
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        product_0, product_2 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product_2 >> 32 & _MASK) ^ c1 ^ key[0], product_2 & _MASK
        c2, c3 = (product_0 >> 32 & _MASK) ^ c3 ^ key[1], product_0 & _MASK
        key = tuple([(k + step) & _MASK for k, step in zip(key, _KEY_STEPS, strict=True)])
    return c0, c1, c2, c3


@jit
def load_dropped(
    operands,
    m,
    k,
    M,
    K,
    DTYPE: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATE: tl.constexpr,
    PARAMS: tl.constexpr,
):
    """Load a tile, whose first column is a multiple of 4, and drop some of it."""
    x_ptr, stride_m, stride_k, seed_ptr = operands
    x = widened(tl.load(x_ptr + m * stride_m + k * stride_k, mask=(m < M) & (k < K), other=0.0))
    seed, offset = tl.load(seed_ptr), tl.load(seed_ptr + 1)
    group = tl.min(tl.reshape(k, [k.shape[1] // 4, 4]), axis=1)[None, :] // 4
    zero = tl.zeros([m.shape[0], k.shape[1] // 4], tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        seed,
        zero + group.to(tl.uint32),
        zero + m.to(tl.uint32),
        zero + offset.to(tl.uint32),
        zero + (offset >> 32).to(tl.uint32),
    )
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [m.shape[0], k.shape[1]])
    return (rounded(x * tl.where(words >= PARAMS[0], PARAMS[1], 0.0), DTYPE),)
