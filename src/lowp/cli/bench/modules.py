"""Runs module cases: builds every variant, checks it, measures its memory, then times all of them in turns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowp.cli.bench.cases import ModuleCase
from lowp.cli.bench.check import errors, results
from lowp.cli.bench.floor import DEVICE, floor
from lowp.cli.bench.measure import Effort, Step, device_timer, interleave, wall_timer
from lowp.cli.bench.variants import BASELINE, HOST_BASELINE, Variant, make_variants
from lowp.cli.compiling import forget_compiled
from lowp.cli.machine import device_name
from lowp.cli.memory import peak_memory
from lowp.recipe import Recipe

_SEED = 0


@dataclass(frozen=True)
class Bench:
    """What all measurements share.

    Attributes:
        device: that is measured.
        recipes: that lowp runs.
        backend: of torch.compile.
        effort: of device times.
        host_effort: of host times.
    """

    device: torch.device
    recipes: dict[str, Recipe]
    backend: str
    effort: Effort
    host_effort: Effort


def run_module(case: ModuleCase, tokens: int, bench: Bench, only: str) -> dict[str, Any]:
    """Measure one module at one number of tokens.

    Args:
        case: the module.
        tokens: T.
        bench: what all measurements share.
        only: variants whose name contains one of these, separated by commas, and the baseline.

    Returns:
        Facts of the case and one row for each variant, ready for JSON. A variant that fails has an `error`.
    """
    forget_compiled()
    torch.manual_seed(_SEED)
    reference = case.reference().to(bench.device, torch.bfloat16)
    x = torch.randn(tokens, case.layers[0].k, device=bench.device, dtype=torch.bfloat16)
    dy = torch.randn(tokens, case.layers[-1].n, device=bench.device, dtype=torch.bfloat16)
    exact = copy.deepcopy(reference).float()
    expected = results(exact, exact, x.float(), dy.float())
    del exact
    baseline = HOST_BASELINE if case.host else BASELINE
    variants = make_variants(bench.recipes, cuda=bench.device.type == "cuda")
    wanted = only.split(",")
    variants = [v for v in variants if v.name == baseline or any(part in v.name for part in wanted)]
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for variant in variants:
        rows[variant.name], step = _ready(variant, case, (reference, x, dy, expected), bench)
        if step is not None:
            steps[variant.name] = step
    timer = wall_timer(bench.device) if case.host else device_timer(bench.device)
    seconds = interleave(steps, timer, bench.host_effort if case.host else bench.effort)
    for variant in variants:
        if variant.name in seconds:
            rows[variant.name] |= _figures(case, tokens, seconds[variant.name], seconds.get(baseline))
            rows[variant.name] |= _floor_figures(case, tokens, seconds[variant.name], variant, bench.device)
    return {"case": case.name, "tokens": tokens, "host": case.host, "baseline": baseline, "rows": list(rows.values())}


def _ready(
    variant: Variant, case: ModuleCase, inputs: tuple[nn.Module, Tensor, Tensor, dict[str, Tensor]], bench: Bench
) -> tuple[dict[str, Any], Step | None]:
    """A variant's row so far, and its step, warm; None if it can't be run."""
    reference, x, dy, expected = inputs
    recipe = str(variant.recipe) if variant.library == "lowp" and variant.recipe else variant.torchao or None
    row: dict[str, Any] = {"variant": variant.name, "library": variant.library, "recipe": recipe, "error": ""}
    try:
        module, function = variant.build(case, reference, bench.backend)
        found, wrong = errors(results(module, function, x, dy), expected, case, variant.recipe)
        step = _step(module, function, x, dy)
        for _ in range((bench.host_effort if case.host else bench.effort).warmup):
            step()
        peak = None if variant.mode else peak_memory(step, bench.device)  # a CUDA graph holds its memory all the time
    except Exception as error:  # one variant's failure is a row of the report, not the end of it
        return {**row, "error": f"{type(error).__name__}: {error}"[:500]}, None
    return {**row, "relative_errors": found, "error": wrong, "peak_mib": peak}, step


def _step(module: nn.Module, function: Callable[[Tensor], Any], x: Tensor, dy: Tensor) -> Step:
    """Forward and backward, gradients dropped."""
    x = x.detach().requires_grad_()
    parameters = list(module.parameters())

    def step() -> None:
        function(x).backward(dy)
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return step


def _figures(case: ModuleCase, tokens: int, seconds: float, baseline: float | None) -> dict[str, Any]:
    """What follows from a time: `speed` is relative to the baseline, above 1 where this variant is faster."""
    return {
        "ms": seconds * 1e3,
        "speed": baseline / seconds if baseline else None,
        "tflop_s": case.flop(tokens) / seconds / 1e12,
    }


def _floor_figures(
    case: ModuleCase, tokens: int, seconds: float, variant: Variant, device: torch.device
) -> dict[str, Any]:
    """The floor and the share of it that was reached, for lowp's recipes; None where none is known."""
    recipe = variant.recipe if variant.library == "lowp" and not case.host else None
    least = floor(case, tokens, recipe) if recipe is not None and DEVICE in device_name(device) else None
    if least is None:
        return {"floor": None, "floor_reached": None}
    return {"floor": {**asdict(least), "ms": least.ms}, "floor_reached": least.ms / (seconds * 1e3)}
