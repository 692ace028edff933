"""The demo's results for people: a table, how to read it, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from lowp.cli.demo.bound import BOUND_IN_SPREADS, Spread
from lowp.cli.demo.outcome import Row
from lowp.cli.demo.training import BF16, Run

_SMOOTHING = 10  # steps that a point of the curve averages


def make_table(rows: Sequence[Row], bound: float | None) -> Table:
    """The table that the demo prints."""
    table = Table(caption_justify="left")
    for heading in ("recipe", "runs", "bits per byte", "vs bf16", "bound", "graph breaks", "graphs", "ms/step", "peak"):
        table.add_column(heading, justify="left" if heading in ("recipe", "runs") else "right")
    for row in rows:
        is_bf16 = row.recipe == BF16
        table.add_row(
            row.recipe,
            row.runs,
            f"{row.bits_per_byte:.4f}",
            "" if is_bf16 else f"{row.gap:+.4f}",
            "" if is_bf16 else ("not measured" if bound is None else f"±{bound:.4f}"),
            str(row.graph_breaks),
            str(row.graphs),
            f"{row.ms_per_step:.1f}",
            f"{row.peak_mib:.1f} MiB",
        )
    return table


def explain(size: str, steps: int, spread: Spread | None) -> str:
    """How to read the table."""
    if spread is None:
        bound = f"not measured for the {size} model at {steps} steps, so no gap is judged"
    else:
        bound = (
            f"{BOUND_IN_SPREADS:g} x {spread.bf16_deviation:.4f}, the standard deviation of bf16's own bits per byte "
            f"over {len(spread.seeds)} seeds ({steps} steps, measured on {spread.machine['device']})"
        )
    return (
        f"bound: {bound}\n"
        "graphs: that torch.compile made; one serves training and validation\n"
        "peak: what torch allocates in one forward and backward beyond the parameters\n"
        "emulated: quantized values, multiplied in fp32; its ms/step says nothing about speed on a GPU"
    )


def write_curves(file: Path, runs: Sequence[Run], title: str) -> None:
    """Draw the training loss of each recipe, from the first seed.

    Args:
        file: to write, a PNG.
        runs: of all seeds.
        title: of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for run in runs:
        if run.seed == runs[0].seed and run.losses:
            curve = _smooth(run.losses)
            style = "--" if run.recipe == BF16 else "-"
            axes.plot(range(1, len(curve) + 1), curve, style, label=f"{run.recipe}, validated {run.bits_per_byte:.3f}")
    axes.set(xlabel="step", ylabel="training loss, bits per byte", title=title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(file, dpi=120)


def _smooth(losses: Sequence[float]) -> list[float]:
    """Means over the last steps."""
    windows = (losses[max(0, end - _SMOOTHING) : end] for end in range(1, len(losses) + 1))
    return [sum(window) / len(window) for window in windows]
