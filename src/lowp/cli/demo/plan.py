"""How large the model is, and how many steps every run of one demo trains.

    steps = the largest of `LADDER` with  (steps + validation batches / 3) * (all runs' seconds of a step) <= time left

All runs of a demo train the same number of steps on the same data. The time of a step is measured once each model is
compiled; coarse rungs keep the number of steps, and with it the result, the same from call to call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

LADDER = (20, 50, 100, 200, 300, 500)
"""Steps that a demo may train. A spread over seeds is measured for each rung that should be judged."""

DEFAULT_BUDGET_S = 135.0
"""Seconds in all; leaves a margin below three minutes."""

PATIENCE_S = 20.0
"""Seconds that compiling one addition may take: where it takes longer, a model would take minutes."""

_VALIDATION_STEPS = 1 / 3  # a forward pass is about a third of a step


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of the model and of its training.

    Attributes:
        name: what the measured spread is filed under.
        layers: decoder layers.
        width: features of the residual stream.
        heads: of attention.
        hidden: features inside the MLP.
        sequence: bytes of a sequence.
        batch: sequences of a step.
        learning_rate: the largest, after warm-up.
        validation_windows: sequences of the validation set, a multiple of `batch`.
        max_steps: more are never trained.
    """

    name: str
    layers: int
    width: int
    heads: int
    hidden: int
    sequence: int
    batch: int
    learning_rate: float
    validation_windows: int
    max_steps: int

    @property
    def model(self) -> dict[str, int]:
        """The model's arguments."""
        return {name: getattr(self, name) for name in ("layers", "width", "heads", "hidden", "sequence")}


CPU = Size(
    name="cpu",
    layers=2,
    width=128,
    heads=4,
    hidden=384,
    sequence=128,
    batch=4,
    learning_rate=3e-3,
    validation_windows=128,
    max_steps=300,
)
"""For two cores."""

GPU = Size(
    name="gpu",
    layers=8,
    width=768,
    heads=12,
    hidden=3072,
    sequence=512,
    batch=32,
    learning_rate=1e-3,
    validation_windows=512,
    max_steps=500,
)
"""For one data-center GPU."""


def size_for(device: torch.device) -> Size:
    """The sizes that a kind of device gets."""
    return GPU if device.type == "cuda" else CPU


def steps_within(seconds: float, size: Size, step_seconds: Iterable[float]) -> int:
    """How many steps each run trains.

    Args:
        seconds: for the training and validation of all runs together.
        size: the model.
        step_seconds: measured seconds of a training step, of each run.

    Returns:
        A rung of `LADDER`, at most `size.max_steps`, and the lowest if none fits.
    """
    validation = size.validation_windows / size.batch * _VALIDATION_STEPS
    per_step = sum(step_seconds)
    fits = [rung for rung in LADDER if rung <= size.max_steps and (rung + validation) * per_step <= seconds]
    return fits[-1] if fits else LADDER[0]
