"""Numbers that NVIDIA Transformer Engine 2.20.2 computed on an H200, from `tests/data/goldens.npz`.

Keys: `quant/<kind>/<M>x<K>/x`, `quant/<kind>/<M>x<K>/current_<fmt>_pow2<0|1>_eps<epsilon>/{data, scale_inv}`,
`module/<name>/param/<p>`, `module/<name>/<recipe>/step0/{x, y0, y1, gy0, gy1, dx, grad/<p>}`. The file has each array
once, and under `same`, as JSON, the keys of arrays that equal one under another key.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@functools.cache
def goldens() -> dict[str, Tensor]:
    """Every golden tensor by its key: bf16, uint8 (FP8 codes) or fp32."""
    tensors = {}
    with np.load(Path(__file__).parent / "data" / "goldens.npz") as archive:
        arrays = dict(archive)
    same = json.loads(arrays.pop("same").tobytes())
    for stored in (*arrays, *same):
        key, _, kind = stored.partition(":")
        tensor = torch.from_numpy(arrays[same.get(stored, stored)])
        tensors[key] = tensor.view(torch.bfloat16) if kind == "bf16" else tensor
    return tensors


def module_goldens(module: str, recipe: str, device: str) -> dict[str, Tensor]:
    """One module's numbers under one recipe: `param/<p>`, `x`, `y0`, `y1`, `gy0`, `gy1`, `dx`, `grad/<p>`."""
    prefix, step = f"module/{module}/", f"{recipe}/step0/"
    own = {key.removeprefix(prefix): value.to(device) for key, value in goldens().items() if key.startswith(prefix)}
    return {key.removeprefix(step): value for key, value in own.items() if key.startswith(("param/", step))}
