"""What the quantizers must give, worked out in float64 from tables of all codes. Shares no code with the library."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Table:
    """An FP8 format: exponent and mantissa bits, the exponent's bias, and the code of the largest finite value."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest_code: int
    inf_code: int | None

    def value(self, code: int) -> float:
        """The value of a code from 0 to `largest_code`."""
        exponent, mantissa = divmod(code, 2**self.mantissa_bits)
        fraction = mantissa / 2**self.mantissa_bits
        if exponent == 0:
            return math.ldexp(fraction, 1 - self.bias)
        return math.ldexp(1 + fraction, exponent - self.bias)

    @functools.cached_property
    def values(self) -> Tensor:
        """The value of every code from 0 to `largest_code`, ascending."""
        return torch.tensor([self.value(code) for code in range(self.largest_code + 1)], dtype=torch.float64)

    @property
    def max(self) -> float:
        return self.value(self.largest_code)


E4M3 = Table(exponent_bits=4, mantissa_bits=3, bias=7, largest_code=0x7E, inf_code=None)
E5M2 = Table(exponent_bits=5, mantissa_bits=2, bias=15, largest_code=0x7B, inf_code=0x7C)
TABLES = {"E4M3": E4M3, "E5M2": E5M2}


def encode(x: Tensor, table: Table) -> Tensor:
    """The code nearest to each float64 value, the even one of two; beyond the largest value, the largest."""
    midpoints = (table.values[1:] + table.values[:-1]) / 2
    magnitudes = x.abs().contiguous()
    below = torch.searchsorted(midpoints, magnitudes, right=False)
    above = torch.searchsorted(midpoints, magnitudes, right=True)
    magnitude = torch.where((below != above) & (below % 2 == 1), above, below)
    return (magnitude + 128 * x.signbit()).to(torch.uint8)


def decode(codes: Tensor, table: Table) -> Tensor:
    """The float64 value of each code; NaN and Inf for the codes beyond the largest value."""
    magnitude = codes.long() & 0x7F
    values = torch.full([128], math.nan, dtype=torch.float64)
    values[: table.largest_code + 1] = table.values
    if table.inf_code is not None:
        values[table.inf_code] = math.inf
    return torch.where(codes >= 128, -values[magnitude], values[magnitude])


def multiplier(amax: float, table: Table, power_2: bool = False, epsilon: float = 0.0) -> float:
    """The multiplier, an fp32 value: divided in float64 and rounded to fp32, which equals one fp32 division."""
    amax = max(_fp32(amax), _fp32(epsilon))
    result = 1.0 if amax == 0 else min(_fp32(table.max / amax), FP32_MAX)
    return 2.0 ** (math.frexp(result)[1] - 1) if power_2 else result


def scale(amax: float, table: Table, power_2: bool = False, epsilon: float = 0.0) -> Tensor:
    """The fp32 scale, 0-d."""
    return torch.tensor(1 / multiplier(amax, table, power_2, epsilon), dtype=torch.float64).float()


def cast(x: Tensor, amax: float, table: Table, power_2: bool = False, epsilon: float = 0.0) -> Tensor:
    """The codes of `x`, uint8, of its shape: the product is rounded to fp32 once, then to the format."""
    product = x.double() * multiplier(amax, table, power_2, epsilon)
    codes = encode(product.float().double().nan_to_num(), table)
    codes[x.isnan()] = 0x7F
    if table.inf_code is None:
        codes[x.isinf()] = 0x7F
    else:
        codes[x == math.inf] = table.inf_code
        codes[x == -math.inf] = table.inf_code + 128
    return codes


def amax(x: Tensor) -> float:
    """The largest finite magnitude, 0 where there is none."""
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def steps(a: Tensor, b: Tensor) -> Tensor:
    """How many codes lie between codes of finite values."""
    ordinals = [torch.where(c >= 128, 128 - c.int(), c.int()) for c in (a, b)]
    return (ordinals[0] - ordinals[1]).abs()


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()
