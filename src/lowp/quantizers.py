"""Quantizer specs: frozen values that say how one tensor is quantized.

A spec holds no tensors and no state; `lowp.quantize(x, spec)` applies it, and `recipe.quantizer(role)` gives the one
that a recipe uses for a role.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowp.errors import require
from lowp.formats import E4M3, ElementFormat
from lowp.values import Value


class Quantizer(Value):
    """Base of all quantizer specs."""

    fmt: ElementFormat


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScalingQuantizer(Quantizer):
    """One fp32 scale for the tensor, from the tensor's own amax.

        amax = max(max |x| over finite x, amax_epsilon)
        multiplier = fmt.max / amax     (1 where amax is 0; at most the largest fp32)
        q = saturate(x * multiplier)    scale = 1 / multiplier

    Attributes:
        fmt: element format of the quantized data.
        power_2_scale: round the multiplier down to a power of two.
        amax_epsilon: lower bound of amax, finite and >= 0.

    Raises:
        ValueError: `amax_epsilon` is negative or not finite.
        TypeError: `fmt` is not an `ElementFormat`.
    """

    fmt: ElementFormat = E4M3
    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        name = type(self).__name__
        require(
            isinstance(self.fmt, ElementFormat),
            name,
            "fmt must be an ElementFormat",
            got=self.fmt,
            hint="Use lowp.formats.E4M3 or E5M2.",
            error=TypeError,
        )
        require(
            math.isfinite(self.amax_epsilon) and self.amax_epsilon >= 0,
            name,
            "amax_epsilon must be finite and >= 0",
            got=self.amax_epsilon,
        )
        super().__post_init__()
