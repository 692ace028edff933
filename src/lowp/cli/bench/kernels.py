"""Runs kernel cases beside a copy of the same tensor: what counts is the share of the copy's bandwidth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowp.cli.bench.cases import BF16_BYTES
from lowp.cli.bench.kernel_cases import KernelCase
from lowp.cli.bench.measure import Step, device_timer, interleave, without_host_time
from lowp.cli.bench.modules import Bench
from lowp.cli.memory import peak_memory

_SPREAD_BYTES = 256 * 2**20
"""Inputs take turns until together they are this large, so that none is found in a cache."""

Entry = dict[str, Any]


def run_kernels(cases: Sequence[KernelCase], bench: Bench) -> list[Entry]:
    """Measure kernels: all those of one shape take turns with a copy.

    Args:
        cases: the kernels.
        bench: what all measurements share.

    Returns:
        One entry for each shape, with a row for the copy and for each kernel, ready for JSON.
    """
    shapes = dict.fromkeys(shape for case in cases for shape in case.shapes)
    return [_run_shape(shape, [case for case in cases if shape in case.shapes], bench) for shape in shapes]


def _run_shape(shape: tuple[int, int], cases: Sequence[KernelCase], bench: Bench) -> Entry:
    torch.manual_seed(0)
    elements = math.prod(shape)
    timed = bench.device.type == "cuda" and bench.effort.rounds > 1
    copies = max(1, _SPREAD_BYTES // (elements * BF16_BYTES)) if timed else 1
    inputs = [torch.randn(shape, device=bench.device, dtype=torch.bfloat16) for _ in range(copies)]
    targets = [torch.empty_like(x) for x in inputs]
    moved = {"copy": 2 * BF16_BYTES * elements}
    steps = {"copy": _in_turn([_copy(x, target) for x, target in zip(inputs, targets, strict=True)], bench)}
    rows: dict[str, Entry] = {"copy": {"kernel": "copy", "error": "", "peak_mib": 0.0}}
    for case in cases:
        calls = [case.prepare(x) for x in inputs]
        error = case.check(inputs[0], calls[0]())
        wrong = "" if error <= case.tolerance else f"is off by {error:.2g}, more than {case.tolerance:.2g}"
        peak = peak_memory(calls[0], bench.device)
        rows[case.name] = {"kernel": case.name, "relative_error": error, "error": wrong, "peak_mib": peak}
        moved[case.name] = case.bytes_per_element * elements
        steps[case.name] = _in_turn(calls, bench)
    seconds = interleave(steps, device_timer(bench.device), bench.effort)
    for name, row in rows.items():
        each = seconds[name] / copies
        row |= {"us": each * 1e6, "gb_s": moved[name] / each / 1e9}
        row["of_copy"] = row["gb_s"] / rows["copy"]["gb_s"]
    return {"shape": list(shape), "mib": elements * BF16_BYTES / 2**20, "rows": list(rows.values())}


def _copy(x: Tensor, target: Tensor) -> Step:
    return lambda: target.copy_(x)


def _in_turn(calls: Sequence[Callable[[], object]], bench: Bench) -> Step:
    """All calls one after the other, warm, as one step without the host's time."""

    def step() -> None:
        for call in calls:
            call()

    with torch.no_grad():
        for _ in range(bench.effort.warmup):
            step()
        return without_host_time(step, bench.device)
