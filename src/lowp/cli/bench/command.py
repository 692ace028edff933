"""`lowp bench`: measure, print, write down."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from lowp.cli.bench.cases import MODULES, QUICK_MODULES
from lowp.cli.bench.kernel_cases import KERNELS, QUICK_KERNELS
from lowp.cli.bench.kernels import run_kernels
from lowp.cli.bench.measure import DEVICE_EFFORT, HOST_EFFORT, QUICK_EFFORT
from lowp.cli.bench.modules import Bench, run_module
from lowp.cli.bench.report import kernel_table, module_table
from lowp.cli.compiling import pick_backend
from lowp.cli.files import write_json
from lowp.cli.machine import describe, device_name, make_console, one_thread, package_version, pick_device
from lowp.cli.recipes import select_recipes

Entries = dict[str, list[dict[str, Any]]]

_MANY_VARIANTS = 64  # Dynamo gives up after 8 versions of one function, and here each variant is one


def bench(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    only: Annotated[str, typer.Option(help="Cases whose name contains this.")] = "",
    variant: Annotated[
        str, typer.Option(help="Variants whose name contains one of these (a,b,...), and the baseline.")
    ] = "",
    recipe: Annotated[list[str] | None, typer.Option(help="Only this recipe; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option(help="Tiny sizes, once: shows that everything runs, times nothing.")] = False,
    backend: Annotated[str, typer.Option(help="Of torch.compile: auto, inductor or aot_eager.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="File; benchmarks/results/DATE-DEVICE.json by default.")] = None,
) -> None:
    """Time modules and kernels against torch (and torchao, where it is installed) in the same run.

    Results are checked before they are timed. Exits with 1 if one of lowp's is wrong or doesn't run.
    """
    console = make_console()
    where = pick_device(device)
    picked = pick_backend(where, backend)
    effort, host_effort = (QUICK_EFFORT, QUICK_EFFORT) if quick else (DEVICE_EFFORT, HOST_EFFORT)
    shared = Bench(where, select_recipes(recipe), picked.name, effort, host_effort)
    console.print(f"{device_name(where)}; torch.compile with {picked.name}: {picked.reason}")
    with one_thread(where) if quick else contextlib.nullcontext():
        entries = _measure(console, shared, quick=quick, only=only, variant=variant)
    file = out or _default_file(where)
    _write(file, shared, quick, entries)
    console.print(f"results: {file}")
    problems = failures([*entries["modules"], *entries["kernels"]])
    for problem in problems:
        console.print(f"[red]FAILED[/] {escape(problem)}", highlight=False)
    raise typer.Exit(1 if problems else 0)


def _measure(console: Console, shared: Bench, *, quick: bool, only: str, variant: str) -> Entries:
    """Measure all cases, and print each one's table as soon as it is there."""
    modules, kernels = (QUICK_MODULES, QUICK_KERNELS) if quick else (MODULES, KERNELS)
    entries: Entries = {"modules": [], "kernels": []}
    with torch._dynamo.config.patch(recompile_limit=_MANY_VARIANTS):
        for case in modules:
            for tokens in case.tokens if only in case.name else ():
                entries["modules"].append(run_module(case, tokens, shared, variant))
                console.print(module_table(entries["modules"][-1]))
    entries["kernels"] = run_kernels([case for case in kernels if only in case.name], shared)
    for entry in entries["kernels"]:
        console.print(kernel_table(entry))
    return entries


def failures(entries: Sequence[dict[str, Any]]) -> list[str]:
    """What of lowp's is wrong or did not run, one line each; other libraries' failures are theirs."""
    return [
        f"{entry.get('case', entry.get('shape'))}: {row.get('variant', row.get('kernel'))}: {row['error']}"
        for entry in entries
        for row in entry["rows"]
        if row["error"] and row.get("library", "lowp") == "lowp"
    ]


def _default_file(device: torch.device) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return Path("benchmarks/results") / f"{dt.date.today().isoformat()}-{name}.json"


def _write(file: Path, shared: Bench, quick: bool, entries: Entries) -> None:
    facts = {
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "machine": {**describe(shared.device), "torchao": package_version("torchao")},
        "backend": shared.backend,
        "quick": quick,
    }
    write_json(file, {**facts, **entries})
