"""Element formats: the facts about each low-precision number type, in one table.

Source: OCP 8-bit Floating Point Specification (OFP8), rev 1.0.
"""

from __future__ import annotations

import enum

import torch


class ElementFormat(enum.Enum):
    """An 8-bit floating-point element format.

    Attributes:
        dtype: the torch dtype that stores it.
        max: the largest finite value.
        eps: the distance from 1 to the next value, the unit of every tolerance.
        inf_code: the byte of +Inf, or None where the format has none.
    """

    E4M3 = (torch.float8_e4m3fn, 448.0, 2.0**-3, None)
    E5M2 = (torch.float8_e5m2, 57344.0, 2.0**-2, 0x7C)

    def __init__(self, dtype: torch.dtype, largest: float, eps: float, inf_code: int | None) -> None:
        self.dtype = dtype
        self.max = largest
        self.eps = eps
        self.inf_code = inf_code

    def __repr__(self) -> str:
        return self.name


E4M3 = ElementFormat.E4M3
E5M2 = ElementFormat.E5M2

FP8 = tuple(fmt.dtype for fmt in ElementFormat)
"""The dtypes of quantized values."""

NAN_CODE = 0x7F
"""The byte written for NaN, in both formats."""

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of values before they are quantized."""
