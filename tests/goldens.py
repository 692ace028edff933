"""Numbers that NVIDIA Transformer Engine 2.20.2 computed on an H200, from `tests/data/goldens.npz`.

Keys: `quant/<kind>/<M>x<K>/x`, `quant/<kind>/<M>x<K>/current_<fmt>_pow2<0|1>_eps<epsilon>/{data, scale_inv}`,
`module/<name>/param/<p>`, `module/<name>/<recipe>/step0/{x, y0, gy0, dx, grad/<p>}`.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@functools.cache
def goldens() -> dict[str, Tensor]:
    """Every golden tensor by its key: bf16, uint8 (FP8 codes) or fp32."""
    tensors = {}
    with np.load(Path(__file__).parent / "data" / "goldens.npz") as archive:
        for stored in archive.files:
            key, _, kind = stored.partition(":")
            tensor = torch.from_numpy(archive[stored])
            tensors[key] = tensor.view(torch.bfloat16) if kind == "bf16" else tensor
    return tensors
