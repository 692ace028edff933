"""Inputs of every layout that users hand in (CASES 22), and every value of the 16-bit formats."""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "every_other_column": lambda x: x[:, ::2],
    "every_other_row": lambda x: x[::2],
    "from_row_1": lambda x: x[1:],
    "from_column_1": lambda x: x[:, 1:],
    "half_of_the_columns": lambda x: x.chunk(2, dim=1)[1],
    "expanded_rows": lambda x: x[:1].expand(75, -1),
    "expanded_columns": lambda x: x[:, :1].expand(-1, 75),
    "expanded_number": lambda x: x[:1, :1].expand(33, 75),
}


def all_values(dtype: torch.dtype) -> Tensor:
    """`[256, 256]`, every value of a 16-bit format once: NaNs, Infs, subnormals and both zeros too."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256)


def bits(x: Tensor) -> Tensor:
    """The bits of `x` on the CPU, for comparisons that tell NaNs and zeros apart."""
    return x.cpu().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
