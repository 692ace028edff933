"""`lowp demo`: compile, train, compare, report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lowp.cli.compiling import forget_compiled, pick_backend
from lowp.cli.demo.bound import Spread, load_spread, record_spread
from lowp.cli.demo.data import Corpus, load_corpus
from lowp.cli.demo.outcome import Row, failures, make_rows
from lowp.cli.demo.plan import DEFAULT_BUDGET_S, PATIENCE_S, size_for, steps_within
from lowp.cli.demo.report import explain, make_table, write_curves
from lowp.cli.demo.training import BF16, Run, Setting, Trainer
from lowp.cli.files import write_json
from lowp.cli.machine import describe, make_console, one_thread, pick_device
from lowp.cli.recipes import select_recipes
from lowp.support import recipe_support

_MANY_MODELS = 64  # Dynamo gives up after 8 versions of one function, and here each recipe's model is one


def demo(
    device: Annotated[str, typer.Option(help="auto, cpu, or cuda: the model is larger on a GPU.")] = "auto",
    recipe: Annotated[list[str] | None, typer.Option(help="Only this recipe beside bf16; may be repeated.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds in all; decides how many steps are trained.")] = (
        DEFAULT_BUDGET_S
    ),
    steps: Annotated[int, typer.Option(help="Train this many steps, whatever the budget.")] = 0,
    seeds: Annotated[int, typer.Option(help="Train from this many seeds; the table shows means.")] = 1,
    backend: Annotated[str, typer.Option(help="Of torch.compile: auto, inductor or aot_eager.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png.")] = Path("out/demo"),
    record: Annotated[bool, typer.Option(help="File the spread over seeds, from which the bound follows.")] = False,
) -> None:
    """Train a byte-level language model on Python's own source code, in bf16 and under every recipe, and compare.

    Exits with 1 if a loss is not finite, a graph broke, or a recipe is further from bf16 than the bound.
    """
    started = time.perf_counter()
    console = make_console()
    where = pick_device(device)
    with one_thread(where), torch._dynamo.config.patch(recompile_limit=_MANY_MODELS):
        setting = _prepare(console, where, backend)
        forget_compiled()
        trainers, how = _compile_all(console, setting, recipe)
        ready = [trainer for trainer in trainers if not trainer.error]
        left = budget - (time.perf_counter() - started)
        steps = steps or steps_within(left / seeds, setting.size, [trainer.step_s for trainer in ready])
        runs = _train_all(console, ready, range(seeds), steps)
        facts = _facts(setting, steps, seeds)
    if record:
        _record(facts, runs)
    facts["seconds"] = time.perf_counter() - started
    problems = _report(console, out, facts, make_rows(trainers, runs, how), runs)
    for problem in problems:
        console.print(f"[red]FAILED[/] {escape(problem)}", highlight=False)
    raise typer.Exit(1 if problems else 0)


def _prepare(console: Console, device: torch.device, backend: str) -> Setting:
    """Read the text, find a backend, and say what will be done."""
    size = size_for(device)
    corpus = load_corpus()
    picked = pick_backend(device, backend, PATIENCE_S)
    console.print(
        f"{size.layers} layers of {size.width} on {device}, {size.batch} x {size.sequence} bytes a step; "
        f"fp32 parameters, linear layers in bf16 or quantized"
    )
    console.print(
        f"text: {len(corpus.training) / 1e6:.1f} MB in {corpus.training_files} files to train on, "
        f"{len(corpus.validation) / 1e6:.1f} MB in {corpus.validation_files} others to validate on"
    )
    console.print(f"torch.compile(fullgraph=True) with {picked.name}: {picked.reason}")
    return Setting(size, corpus, device, picked.name)


def _compile_all(console: Console, setting: Setting, names: list[str] | None) -> tuple[list[Trainer], dict[str, str]]:
    """A compiled trainer for bf16 and each recipe that the device runs, and how it runs it."""
    trainers = [Trainer(BF16, None, setting)]
    how: dict[str, str] = {}
    for name, recipe in select_recipes(names).items():
        status, reason = recipe_support(recipe, setting.device)
        if status == "unavailable":
            console.print(f"{name} is left out: {reason}")
            continue
        how[name] = status
        trainers.append(Trainer(name, recipe, setting))
    for trainer in trainers:
        with console.status(f"compiling {trainer.name}"):
            trainer.compile()
        done = f"compiled {trainer.name} in {trainer.compile_s:.1f} s"
        console.print(f"{trainer.name} does not compile" if trainer.error else done)
    return trainers, how


def _train_all(console: Console, trainers: Sequence[Trainer], seeds: Sequence[int], steps: int) -> list[Run]:
    """Train every recipe from every seed."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    runs = []
    with Progress(*columns, console=console) as progress:
        for seed in seeds:
            for trainer in trainers:
                task = progress.add_task(f"{trainer.name}, seed {seed}", total=steps, loss="")

                def show(done: int, loss: float, task: Any = task) -> None:
                    progress.update(task, completed=done, loss=f"{loss:.3f} bits per byte")

                runs.append(trainer.train(seed, steps, show))
    return runs


def _facts(setting: Setting, steps: int, seeds: int) -> dict[str, Any]:
    return {
        "machine": describe(setting.device),
        "backend": setting.backend,
        "size": asdict(setting.size),
        "steps": steps,
        "seeds": seeds,
        "text": _text(setting.corpus),
    }


def _text(corpus: Corpus) -> dict[str, Any]:
    return {
        "training_bytes": len(corpus.training),
        "training_files": corpus.training_files,
        "validation_bytes": len(corpus.validation),
        "validation_files": corpus.validation_files,
        "digest": corpus.digest,
    }


def _record(facts: dict[str, Any], runs: Sequence[Run]) -> None:
    """File the validation losses of all seeds."""
    losses: dict[str, list[float]] = {}
    for run in runs:
        losses.setdefault(run.recipe, []).append(round(run.bits_per_byte, 6))
    machine = {**facts["machine"], "backend": facts["backend"], "text": facts["text"]["digest"]}
    record_spread(facts["size"]["name"], facts["steps"], Spread(machine, list(range(facts["seeds"])), losses))


def _report(console: Console, out: Path, facts: dict[str, Any], rows: Sequence[Row], runs: Sequence[Run]) -> list[str]:
    """Print the table and how to read it, write both files, and return why the demo failed."""
    size, steps = facts["size"]["name"], facts["steps"]
    spread = load_spread(size, steps)
    bound = None if spread is None else spread.bound
    problems = failures(rows, bound)
    results = {"rows": [asdict(row) for row in rows], "runs": [asdict(run) for run in runs]}
    write_json(out / "demo.json", {**facts, "bound": bound, "failures": problems, **results})
    write_curves(out / "demo.png", runs, f"{size} model, {steps} steps, {facts['machine']['device']}")
    console.print(make_table(rows, bound))
    console.print(explain(size, steps, spread))
    console.print(f"{facts['seconds']:.0f} s in all. Results: {out / 'demo.json'}, {out / 'demo.png'}")
    return problems
