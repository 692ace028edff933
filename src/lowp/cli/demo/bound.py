"""How far a recipe's validation loss may be from bf16's: a multiple of what another seed does to bf16's own.

    bound = BOUND_IN_SPREADS * standard deviation over seeds of bf16's bits per byte

The standard deviation is measured, not chosen: `lowp demo --seeds 5 --steps N --record` trains every recipe from five
seeds and files the results in spread.json beside this file, with device and versions, under the model's size and the
number of steps. A demo of a size or a length that was not measured says so and judges no gap.

What it notices: at 100 steps on a CPU the bound is 0.12, and faults put into current scaling moved the loss of one seed
by 3.3 (scales that clip beyond an eighth of amax), 0.40 (weight gradients from tokens shifted by one) and 1.2 (input
gradients, likewise). It does not notice MLPs whose first weights get no gradient, which moved it by 0.05.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOUND_IN_SPREADS = 3.0
"""Three standard deviations: a gap that a change of seed does not explain."""

SPREAD_FILE = Path(__file__).with_name("spread.json")


@dataclass(frozen=True)
class Spread:
    """A measurement over seeds.

    Attributes:
        machine: device and versions, as `lowp.cli.machine.describe` gives them.
        seeds: that were trained.
        bits_per_byte: for each recipe and bf16, the validation loss of each seed.
    """

    machine: dict[str, Any]
    seeds: list[int]
    bits_per_byte: dict[str, list[float]]

    @property
    def bf16_deviation(self) -> float:
        """Standard deviation over seeds of bf16's bits per byte."""
        return statistics.stdev(self.bits_per_byte["bf16"])

    @property
    def bound(self) -> float:
        """The largest gap to bf16, in bits per byte, that is no failure."""
        return BOUND_IN_SPREADS * self.bf16_deviation


def load_spread(size: str, steps: int, file: Path = SPREAD_FILE) -> Spread | None:
    """The measurement for a model of this size trained for this many steps; None: there is none."""
    entry = _read(file).get(size, {}).get(str(steps))
    return None if entry is None else Spread(**entry)


def record_spread(size: str, steps: int, spread: Spread, file: Path = SPREAD_FILE) -> None:
    """File a measurement, in place of an earlier one of the same size and length.

    Raises:
        statistics.StatisticsError: fewer than two seeds.
    """
    _ = spread.bound
    content = _read(file)
    content.setdefault(size, {})[str(steps)] = vars(spread)
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
