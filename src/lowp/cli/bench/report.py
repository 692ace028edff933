"""The benchmark's results as tables."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

Entry = dict[str, Any]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", overflow="fold")
    return table


def module_table(entry: Entry) -> Table:
    """One module at one number of tokens."""
    title = f"{entry['case']}, {entry['tokens']} tokens, forward + backward"
    if entry["host"]:
        return _host_table(entry, title)
    table = _table(title, "variant", "ms", "speed", "TFLOP/s", "peak MiB", "floor ms", "of floor")
    for row in entry["rows"]:
        least = row.get("floor")
        table.add_row(
            row["variant"],
            _number(row.get("ms"), ".4f"),
            _times(row.get("speed")),
            _number(row.get("tflop_s"), ".0f"),
            _number(row.get("peak_mib"), ".1f"),
            "" if least is None else f"{least['fastest_ms']:.3f}-{least['slowest_ms']:.3f}",
            _number(row.get("floor_reached"), ".1%"),
        )
        _add_error(table, row)
    table.caption = f"speed: against {entry['baseline']}"
    return table


def _host_table(entry: Entry, title: str) -> Table:
    table = _table(title, "variant", "us", "time", "peak MiB")
    for row in entry["rows"]:
        speed = row.get("speed")
        table.add_row(
            row["variant"],
            _number(row["ms"] * 1e3 if "ms" in row else None, ".1f"),
            _times(1 / speed if speed else None),
            _number(row.get("peak_mib"), ".2f"),
        )
        _add_error(table, row)
    table.caption = f"time: in times of {entry['baseline']}; lower is better"
    return table


def kernel_table(entry: Entry) -> Table:
    """All kernels on one shape."""
    title = f"kernels on {' x '.join(map(str, entry['shape']))} bf16, {entry['mib']:.0f} MiB"
    table = _table(title, "kernel", "us", "GB/s", "of copy", "peak MiB")
    for row in entry["rows"]:
        table.add_row(
            row["kernel"].removeprefix("kernel: "),
            f"{row['us']:.1f}",
            f"{row['gb_s']:.0f}",
            f"{row['of_copy']:.1%}",
            f"{row['peak_mib']:.1f}",
        )
        _add_error(table, row)
    return table


def _times(value: float | None) -> str:
    return "" if value is None else f"x{value:.3f}"


def _add_error(table: Table, row: Entry) -> None:
    if row["error"]:
        table.add_row(f"[red]  {escape(row['error'][:200])}[/]")
