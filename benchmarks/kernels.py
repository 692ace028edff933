"""Bandwidth of the quantization kernels on this machine's GPU, as a fraction of a device copy's in the same run.

    python benchmarks/kernels.py [--json FILE]

Bytes are those of the algorithm: each input read once, each output written once. Launches rotate among input sets
that together exceed the L2 cache many times over, each with outputs of its own, and are timed by replaying a graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowp.formats import E4M3, E5M2
from lowp.kernels.amax import amax
from lowp.kernels.bias_grad import bias_grad
from lowp.kernels.cast import cast, cast_bias_grad
from lowp.quantizers import Float8CurrentScalingQuantizer

SHAPES = [(8192, 4096), (16384, 4096), (16384, 14336)]
SET_BYTES = 2**31
ROUNDS = 9

Run = Callable[[Tensor, Tensor], Any]
FORWARD = Float8CurrentScalingQuantizer(fmt=E4M3)
GRADIENT = Float8CurrentScalingQuantizer(fmt=E5M2)
CASES: dict[str, tuple[int, Run]] = {
    "copy": (4, lambda x, _: torch.empty_like(x).copy_(x)),
    "amax": (2, lambda x, _: amax(x)),
    "cast": (3, lambda x, parts: cast(x, parts, FORWARD)),
    "cast, transposed only": (3, lambda x, parts: cast(x, parts, FORWARD, row=False, column=True)),
    "cast, both, E4M3": (4, lambda x, parts: cast(x, parts, FORWARD, column=True)),
    "cast, both, E5M2": (4, lambda x, parts: cast(x, parts, GRADIENT, column=True)),
    "cast, both, bias_grad": (4, lambda x, parts: cast_bias_grad(x, parts, GRADIENT, column=True)),
    "cast of x.t(), both": (4, lambda x, parts: cast(x.t(), parts, FORWARD, column=True)),
    "bias_grad": (2, lambda x, _: bias_grad(x)),
}
"""Bytes moved for a bf16 element, and what runs the kernel on an input and its amax."""


def seconds(run: Run, inputs: list[tuple[Tensor, Tensor]]) -> float:
    """Time of one launch: the median over replays of a graph that launches once for every input."""
    for x, parts in inputs[:2]:
        run(x, parts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [run(x, parts) for x, parts in inputs]
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(inputs))
    del outputs
    return statistics.median(times[1:])


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of large device copies: the ceiling."""
    source = torch.randn(2**28, dtype=torch.bfloat16, device="cuda")
    targets = [torch.empty_like(source) for _ in range(4)]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(40):
        start.record()
        for target in targets:
            target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(targets))
    return 2 * source.nbytes / statistics.median(times[20:])


def random_inputs(shape: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    """Inputs, each with its amax, that together take `SET_BYTES`."""
    count = max(4, SET_BYTES // (shape[0] * shape[1] * 2))
    inputs = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
    return [(x, amax(x)) for x in inputs]


@torch.no_grad()
def main() -> None:
    """Measure, print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ceiling = copy_bandwidth()
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy": ceiling, "cases": []}
    print(f"{report['device']}, torch {report['torch']}: copies of 512 MiB at {ceiling / 1e9:.0f} GB/s")
    for shape in SHAPES:
        print(f"\n{shape[0]} x {shape[1]} bf16, {shape[0] * shape[1] * 2 / 2**20:.0f} MiB")
        inputs = random_inputs(shape)
        for name, (moved, run) in CASES.items():
            time = seconds(run, inputs)
            rate = shape[0] * shape[1] * moved / time
            print(f"  {name:24} {time * 1e6:8.1f} us {rate / 1e9:6.0f} GB/s {rate / ceiling:6.1%} of copy")
            report["cases"].append({"shape": shape, "name": name, "seconds": time, "bytes_per_second": rate})
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
