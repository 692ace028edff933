"""The `lowp` command."""

from __future__ import annotations

import typer

from lowp.cli.bench.command import bench
from lowp.cli.demo.command import demo
from lowp.cli.info import info

app = typer.Typer(
    name="lowp",
    help="Fused low-precision transformer building blocks for PyTorch: see them work, time them, ask what runs here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(demo)
app.command()(bench)
app.command()(info)

if __name__ == "__main__":
    app()
