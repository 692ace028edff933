"""Device time of the norm kernels, against a copy of the same bytes and against torch.compile of plain torch.

    python benchmarks/norm_kernels.py [--json FILE] [--only rms]      on a GPU
    python benchmarks/norm_kernels.py --sweep --case forward          every launch configuration, for 16384 rows
    python benchmarks/norm_kernels.py --quick                         small sizes, also on CPUs: does it run

    least time = least bytes / bandwidth of a copy in the same run        of copy = least time / time

Least bytes: each matrix read or written once, bf16. All variants of a case take turns, as CUDA graphs (so that the
host's time doesn't count), over several sets of inputs (so that none is found in a cache), after their results are
compared.

Shape legend: M = rows (tokens), K = features.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowp.cli.bench.measure import (
    DEVICE_EFFORT,
    QUICK_EFFORT,
    Effort,
    device_timer,
    interleave,
    without_host_time,
)
from lowp.cli.machine import describe
from lowp.kernels import norm, norm_config, norm_grad

BF16 = torch.bfloat16
EPS = 1e-5
SHAPES = tuple(itertools.product((8192, 16384), (4096, 8192)))
QUICK_SHAPES = ((64, 128),)
SPREAD_BYTES = 256 * 2**20
KINDS = ("rms", "layer")

Results = tuple[Tensor | None, ...]
Call = Callable[["Inputs"], Results]


@dataclass
class Inputs:
    """One set of inputs; a layer norm has a bias, too."""

    kind: str
    x: Tensor
    dy: Tensor
    residual: Tensor
    weight: Tensor
    bias: Tensor | None
    mean: Tensor | None
    rstd: Tensor


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        name: of the table.
        matrices: how many bf16 matrices are read or written.
        plain: the same in plain torch, for torch.compile.
        forward: `output, amax` of a forward pass, or None.
        backward: `dx with a residual, sums over M` of a backward pass, or None.
    """

    name: str
    matrices: int
    plain: Call
    forward: tuple[bool, bool] | None = None
    backward: tuple[bool, bool] | None = None

    def run(self, inputs: Inputs, config: Any = None) -> Results:
        """The kernels; `config`: other launch parameters than their own."""
        more = () if config is None else (config,)
        if self.forward is not None:
            tensors = (inputs.x, inputs.weight, inputs.bias)
            call = norm._norm_forward_ref if inputs.x.device.type == "cpu" else norm._norm_forward_launch
            return call(*tensors, inputs.kind, EPS, False, BF16, *self.forward, *more)
        assert self.backward is not None
        residual, sums = self.backward
        tensors = (inputs.dy, inputs.x, inputs.mean, inputs.rstd, inputs.weight, inputs.residual if residual else None)
        bias_dtype = BF16 if sums and inputs.bias is not None else None
        call = norm_grad._norm_backward_ref if inputs.x.device.type == "cpu" else norm_grad._norm_backward_launch
        return call(*tensors, inputs.kind, False, True, sums, bias_dtype, *more)


def plain_statistics(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Deviations and 1 / std."""
    x = inputs.x.float()
    off = x - x.mean(1, keepdim=True) if inputs.kind == "layer" else x
    return off, torch.rsqrt(off.square().mean(1, keepdim=True) + EPS)


def plain_y(inputs: Inputs) -> Tensor:
    """The normalized rows."""
    off, rstd = plain_statistics(inputs)
    y = off * rstd * inputs.weight.float()
    return (y if inputs.bias is None else y + inputs.bias.float()).to(BF16)


def plain_amax(inputs: Inputs) -> Results:
    """1 / std and amax."""
    return plain_statistics(inputs)[1].squeeze(1), plain_y(inputs).abs().amax().float()


def plain_forward_amax(inputs: Inputs) -> Results:
    """`y` and amax."""
    y = plain_y(inputs)
    return y, y.abs().amax().float()


def plain_dx(inputs: Inputs) -> Tensor:
    """The input's gradient."""
    x, dy, rstd = inputs.x.float(), inputs.dy.float(), inputs.rstd[:, None]
    xhat = (x if inputs.mean is None else x - inputs.mean[:, None]) * rstd
    g = dy * inputs.weight.float()
    dx = g - xhat * (g * xhat).mean(1, keepdim=True)
    return ((dx if inputs.mean is None else dx - g.mean(1, keepdim=True)) * rstd).to(BF16)


def plain_backward_sums(inputs: Inputs) -> Results:
    """`dx`, `dweight`, `dbias`."""
    x, dy = inputs.x.float(), inputs.dy.float()
    off = x if inputs.mean is None else x - inputs.mean[:, None]
    dweight = (dy * (off * inputs.rstd[:, None])).sum(0).to(BF16)
    return plain_dx(inputs), dweight, None if inputs.bias is None else dy.sum(0).to(BF16)


CASES = (
    Case("forward: y", 2, lambda inputs: (plain_y(inputs),), forward=(True, False)),
    Case("forward: statistics + amax", 1, plain_amax, forward=(False, True)),
    Case("forward: y + amax", 2, plain_forward_amax, forward=(True, True)),
    Case("backward: dx", 3, lambda inputs: (plain_dx(inputs),), backward=(False, False)),
    Case("backward: dx + residual", 4, lambda inputs: (plain_dx(inputs) + inputs.residual,), backward=(True, False)),
    Case("backward: dx, dweight", 3, plain_backward_sums, backward=(False, True)),
)


def draw(kind: str, shape: tuple[int, int], device: torch.device) -> Inputs:
    """Random inputs, and the statistics of x."""
    M, K = shape
    x, dy, residual = (torch.randn(M, K, device=device, dtype=BF16) for _ in range(3))
    weight, bias = (torch.randn(K, device=device, dtype=BF16) for _ in range(2))
    layer = kind == "layer"
    _, mean, rstd, _ = norm.norm_forward(x, None, None, kind=kind, eps=EPS, output=False)
    return Inputs(kind, x, dy, residual, weight, bias if layer else None, mean, rstd)


def compare(case: Case, inputs: Inputs, compiled: Call) -> float:
    """The largest relative difference of a result; amax from its parts.

    Raises:
        RuntimeError: a difference is more than the rounding to bf16 explains.
    """
    ours, theirs = [r for r in case.run(inputs) if r is not None], [r for r in compiled(inputs) if r is not None]
    if case.forward is not None:
        output, amax = case.forward
        ours = ours[:1] * output + [inputs.rstd] * (not output) + [ours[-1].max()] * amax
    worst = max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(ours, theirs, strict=True))
    if not worst <= torch.finfo(BF16).eps:
        raise RuntimeError(f"{case.name}: results differ by {worst:.2g}")
    return worst


def in_turn(call: Call, sets: list[Inputs], effort: Effort) -> Callable[[], object]:
    """All sets of inputs one after the other, warm, without the host's time."""

    def step() -> None:
        for inputs in sets:
            call(inputs)

    for _ in range(effort.warmup):
        step()
    return without_host_time(step, sets[0].x.device)


def copy(inputs: Inputs) -> Results:
    """What gives the bandwidth: reads a matrix and writes one."""
    return (inputs.residual.copy_(inputs.x),)


def configurations(case: Case, x: Tensor) -> Iterator[Any]:
    """Launch parameters to try."""
    block_k = norm_config.power_of_2(x.shape[1])
    warps = [w for w in (2, 4, 8, 16, 32) if 8 <= block_k // (32 * w) <= 64]
    if case.forward is not None:
        per_program = (132, 264, 396, 512) if case.forward[1] else (0, 264, 396, 528, 1056)
        columns = (0, 1) if case.forward[1] else (0,)
        for block_m, w, programs, keep, ahead, held, registers in itertools.product(
            (1, 2), warps, per_program, (False, True), (False, True), columns, (None, 64, 128)
        ):
            if programs or not (keep or ahead):
                yield norm_config.Config(block_m, w, programs, keep, ahead, held, registers)
        return
    assert case.backward is not None
    per_program = (132, 264, 396, 528) if case.backward[1] else (0, 264, 528)
    for block_m, w, programs, keep, stages in itertools.product((1, 2), warps, per_program, (False, True), (1, 2, 3)):
        if programs or stages == 1:
            yield norm_grad.Plan(norm_grad.Config(block_m, block_k, w, programs, keep, stages), None)


def sweep(case: Case, sets: list[Inputs], effort: Effort) -> list[dict[str, Any]]:
    """The time of every configuration that compiles, the fastest first."""
    rows = []
    timer = device_timer(sets[0].x.device)
    for config in configurations(case, sets[0].x):
        try:
            step = in_turn(lambda inputs, config=config: case.run(inputs, config), sets, effort)
        except Exception as error:  # more shared memory or registers than there are
            torch.cuda.synchronize()
            rows.append({"config": str(config), "us": math.inf, "error": str(error)[:80]})
            continue
        rows.append({"config": str(config), "us": timer(step, effort.iterations) / len(sets) * 1e6})
    return sorted(rows, key=lambda row: row["us"])


def measure(kind: str, shape: tuple[int, int], device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """All cases of one kind and shape."""
    torch.manual_seed(0)
    effort = QUICK_EFFORT if options.quick else DEVICE_EFFORT
    bytes_of_one = 2 * math.prod(shape)
    count = max(1, SPREAD_BYTES // bytes_of_one) if device.type == "cuda" else 1
    sets = [draw(kind, shape, device) for _ in range(count)]
    entry: dict[str, Any] = {"kind": kind, "shape": list(shape), "rows": []}
    for case in [case for case in CASES if options.case in case.name]:
        compiled = torch.compile(case.plain, backend=options.backend, dynamic=False)
        row: dict[str, Any] = {"case": case.name, "relative_difference": compare(case, sets[0], compiled)}
        steps = {
            "copy": in_turn(copy, sets, effort),
            "ours": in_turn(case.run, sets, effort),
            "compiled": in_turn(compiled, sets, effort),
        }
        times = {name: t / count for name, t in interleave(steps, device_timer(device), effort).items()}
        least = times["copy"] * case.matrices / 2
        row |= {"us": times["ours"] * 1e6, "least_us": least * 1e6, "of_copy": least / times["ours"]}
        row |= {"compiled_us": times["compiled"] * 1e6, "speed": times["compiled"] / times["ours"]}
        row["copy_gb_s"] = 2 * bytes_of_one / times["copy"] / 1e9
        if options.sweep:
            row["sweep"] = sweep(case, sets, effort)
        entry["rows"].append(row)
        torch.compiler.reset()
    return entry


def table(entry: dict[str, Any]) -> str:
    """One kind and shape, with the best of a sweep."""
    lines = [
        f"{entry['kind']} {entry['shape']}",
        f"  {'':28}{'us':>9}{'least us':>10}{'of copy':>9}{'compiled us':>13}{'speed':>8}{'copy GB/s':>11}",
    ]
    for row in entry["rows"]:
        lines.append(
            f"  {row['case']:28}{row['us']:9.1f}{row['least_us']:10.1f}{row['of_copy']:9.1%}"
            f"{row['compiled_us']:13.1f}{row['speed']:7.2f}x{row['copy_gb_s']:11.0f}"
        )
        lines += [f"      {tried['us']:9.1f} us  {tried['config']}" for tried in row.get("sweep", [])[:6]]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print tables and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run")
    parser.add_argument("--sweep", action="store_true", help="try every launch configuration")
    parser.add_argument("--only", choices=KINDS, help="one kind of norm")
    parser.add_argument("--case", default="", help="part of the names of the cases")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {"on": describe(device), "results": []}
    with torch.no_grad():
        for shape in QUICK_SHAPES if options.quick else SHAPES[2:] if options.sweep else SHAPES:
            for kind in [options.only] if options.only else KINDS:
                entry = measure(kind, shape, device, options)
                report["results"].append(entry)
                print(table(entry), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
