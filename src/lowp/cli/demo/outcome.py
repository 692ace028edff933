"""What a demo found: one row for each recipe, and whether that is a success."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lowp.cli.demo.training import BF16, Run, Trainer


@dataclass(frozen=True, kw_only=True)
class Row:
    """One recipe's line of the table; with several seeds, means over them.

    Attributes:
        recipe: its name.
        runs: "native", "emulated", or empty for bf16.
        bits_per_byte: validation loss.
        gap: `bits_per_byte` minus bf16's of the same seeds.
        finite: whether every loss of every run was a finite number.
        graph_breaks: that Dynamo counted.
        graphs: that were compiled.
        ms_per_step: a training step, forward to optimizer.
        peak_mib: torch's allocations in one forward and backward, above parameters.
        error: what torch.compile refused; empty: nothing.
    """

    recipe: str
    runs: str
    bits_per_byte: float
    gap: float
    finite: bool
    graph_breaks: int
    graphs: int
    ms_per_step: float
    peak_mib: float
    error: str


def make_rows(trainers: Sequence[Trainer], runs: Sequence[Run], how: dict[str, str]) -> list[Row]:
    """Summarize the runs.

    Args:
        trainers: one for each recipe, bf16's among them.
        runs: all of them, of all seeds.
        how: recipe -> "native" or "emulated".
    """
    rows = []
    bf16 = {run.seed: run.bits_per_byte for run in runs if run.recipe == BF16}
    for trainer in trainers:
        own = [run for run in runs if run.recipe == trainer.name]
        rows.append(
            Row(
                recipe=trainer.name,
                runs=how.get(trainer.name, ""),
                bits_per_byte=_mean([run.bits_per_byte for run in own]),
                gap=_mean([run.bits_per_byte - bf16.get(run.seed, math.nan) for run in own]),
                finite=bool(own) and all(run.finite for run in own),
                graph_breaks=trainer.graph_breaks,
                graphs=trainer.graphs,
                ms_per_step=_mean([run.ms_per_step for run in own]),
                peak_mib=trainer.peak_mib,
                error=trainer.error,
            )
        )
    return rows


def failures(rows: Sequence[Row], bound: float | None) -> list[str]:
    """Why the demo failed, one sentence each; empty: it didn't.

    Args:
        rows: of all recipes.
        bound: the largest gap to bf16, in bits per byte; None: not measured for this size and length, not judged.
    """
    found = []
    for row in rows:
        if row.error or row.graph_breaks:
            found.append(f"{row.recipe}: the graph broke ({row.graph_breaks} breaks). {row.error}".rstrip())
        elif not row.finite:
            found.append(f"{row.recipe}: a loss is not finite")
        elif bound is not None and row.recipe != BF16 and not abs(row.gap) <= bound:
            found.append(f"{row.recipe}: {row.gap:+.4f} bits per byte from bf16, beyond the bound of {bound:.4f}")
    return found


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
