"""Seeds of random numbers, drawn from torch's generator of a device.

    seed = two int64 numbers, seed and offset        (see lowp.kernels.dropped)

An operator of its own, since compilers replace torch's generators by their own; it is tagged as random, so that
they neither merge two calls nor repeat one in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowp.registration import register


def draw_seed(like: Tensor) -> Tensor:
    """Draw a seed.

    Args:
        like: any tensor of the device.

    Returns:
        seed: `[2]` int64.
    """
    return _draw_seed(like)


def _draw_seed_ref(like: Tensor) -> Tensor:
    """From torch's generator."""
    return torch.randint(2**62, (2,), dtype=torch.int64, device=like.device)


def _draw_seed_allocate(like: Tensor) -> Tensor:
    return like.new_empty(2, dtype=torch.int64)


_draw_seed = register(
    "draw_seed(Tensor like) -> Tensor",
    ref=_draw_seed_ref,
    launch=_draw_seed_ref,
    allocate=_draw_seed_allocate,
    random=True,
)
