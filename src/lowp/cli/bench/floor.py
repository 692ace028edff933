"""The least time that a case can take on an H200: its GEMMs at the measured ceilings, its bytes at copy speed.

    floor = sum of GEMMs 2 T N K / ceiling + (bytes read and written to quantize operands + the norm's) / copy speed

Every high-precision operand, or what it is worked out of, is read as often as its recipe must (current scaling: for
amax, then for the cast), and each FP8 copy, one along either axis, is written once. A norm's backward reads its input
and a gradient, and writes one. A ceiling is a range of measurements, so a floor is one too.

Shape legend: T = tokens, N = out features, K = in features.
Source: docs/bench.md, measured on one H200 with torch 2.11.0+cu130 and CUDA 13.0, random data, 8k-16k tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lowp.cli.bench.cases import BF16_BYTES, FP8_BYTES, ModuleCase
from lowp.formats import E5M2
from lowp.quantizers import Float8CurrentScalingQuantizer, Quantizer
from lowp.recipe import GEMMS, Gemm, Recipe, Role

DEVICE = "H200"
"""The part of a device's name that the measurements below hold for."""

COPY_TB_S = 4.27  # read + write


class Ceiling(NamedTuple):
    """TFLOP/s that a GEMM was measured to reach."""

    low: float
    high: float


FAST_CEILING = Ceiling(1245, 1340)
SPLIT_CEILING = Ceiling(1185, 1205)
SPLIT_E5M2_CEILING = Ceiling(1205, 1220)  # E5M2 x E4M3 is a little faster than E4M3 x E4M3

_OPERANDS: dict[Gemm, tuple[Role, Role]] = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}

_READS: dict[type[Quantizer], int] = {
    Float8CurrentScalingQuantizer: 2,
}
"""How often a quantizer reads the high-precision operand: once to cast, and once before if its scale needs that."""

_NORM_VALUES = 3  # of its backward: the input and the output's gradient read, the input's written


@dataclass(frozen=True)
class Floor:
    """The least time of a case.

    Attributes:
        fastest_ms: with each GEMM at its highest measurement.
        slowest_ms: with each at its lowest.
        moved_bytes: that are read and written beside the GEMMs.
    """

    fastest_ms: float
    slowest_ms: float
    moved_bytes: int

    @property
    def ms(self) -> float:
        """The middle of the range, which fractions are of."""
        return (self.fastest_ms + self.slowest_ms) / 2


def floor(case: ModuleCase, tokens: int, recipe: Recipe) -> Floor | None:
    """The least time of a module's forward and backward on an H200.

    Args:
        case: the module.
        tokens: T.
        recipe: of its linear layers.

    Returns:
        The floor; None where a quantizer's traffic is not known.
    """
    moved = _moved_bytes(case, tokens, recipe)
    if moved is None:
        return None
    copy_ms = moved / COPY_TB_S / 1e9
    ceilings = [_ceiling(recipe, gemm) for gemm in GEMMS]
    flop = case.flop(tokens) / len(GEMMS)
    fastest_ms = sum(flop / ceiling.high / 1e9 for ceiling in ceilings)
    slowest_ms = sum(flop / ceiling.low / 1e9 for ceiling in ceilings)
    return Floor(fastest_ms + copy_ms, slowest_ms + copy_ms, moved)


def _ceiling(recipe: Recipe, gemm: Gemm) -> Ceiling:
    """The ceiling of one GEMM of a recipe with one scale a tensor."""
    if not recipe.gemm(gemm).use_split_accumulator:
        return FAST_CEILING
    formats = [recipe.quantizer(role).fmt for role in _OPERANDS[gemm]]
    return SPLIT_E5M2_CEILING if E5M2 in formats else SPLIT_CEILING


def _moved_bytes(case: ModuleCase, tokens: int, recipe: Recipe) -> int | None:
    """Bytes that quantization and the norm's backward must read and write."""
    moved = _NORM_VALUES * tokens * case.layers[0].k * BF16_BYTES if case.norm_parameters else 0
    for layer in case.layers:
        n, k = layer.n, layer.k
        sizes: dict[Role, int] = {"input": tokens * k, "weight": n * k, "grad_output": tokens * n}
        sources: dict[Role, int | None] = {"input": layer.input_values, "grad_output": layer.grad_values}
        for role, elements in sizes.items():
            reads = _READS.get(type(recipe.quantizer(role)))
            if reads is None:
                return None
            values = sources.get(role)
            source_elements = elements if values is None else tokens * values
            moved += reads * source_elements * BF16_BYTES + 2 * elements * FP8_BYTES
    return moved
