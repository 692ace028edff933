"""Time of the kernels that work their values out: against the least bytes at copy speed, and against torch.compile.

    python benchmarks/fused_kernels.py [--json FILE] [--only PART] [--sweep]       on a GPU
    python benchmarks/fused_kernels.py --quick                                     small sizes, also on a CPU

Every source (SwiGLU, GELU, their gradients, those of geglu and clamped_swiglu, RMSNorm and LayerNorm with given
statistics) goes through every kernel that takes one. `of copy` is the time of the bytes that must be read and written
at the speed of a copy, over the time taken: operands once, each output once. `compiled` is torch.compile on the same
work: the expression in bf16, and what the kernel does with its values (their largest magnitude; clamped and in fp8,
given a multiplier; also transposed; summed).
Of normalized rows no amax is timed: the kernel of the statistics finds it (benchmarks/norm_kernels.py).
Each result is compared with that of the values as a tensor: the bits must be equal.
`--sweep` times each kernel under other launch configurations too, and prints the best of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fused_cases import LLAMA_8B, QUICK, Case, Sizes, cases
from torch import Tensor

import lowp
from lowp.formats import E4M3, E5M2, ElementFormat
from lowp.kernels import amax as amax_kernel
from lowp.kernels import cast as cast_module
from lowp.kernels import cast_kernel
from lowp.kernels import materialize as materialize_kernel
from lowp.kernels.amax import amax
from lowp.kernels.bias_grad import GROUP, bias_grad
from lowp.kernels.cast import cast, cast_bias_grad
from lowp.kernels.materialize import materialize
from lowp.kernels.normalized import Normalized
from lowp.quantizers import Float8CurrentScalingQuantizer

BF16, FP8 = 2, 1
"""Bytes of an element."""

ROW_TILES = ((4, 1024), (8, 512), (16, 512))
TILES = ((64, 64), (64, 128), (128, 128))
"""Rows and columns of the tiles that `--sweep` tries."""

Call = Callable[[], Any]


class Kernel(NamedTuple):
    """A kernel on a source.

    Attributes:
        name: of the table.
        call: with the launch configuration of the library.
        configured: `config -> call`.
        configs: other launch configurations.
        written: bytes of an element of the values that it writes.
        check: whether the result is that of the values as a tensor, bit for bit.
        work: what it does with the values, for torch.compile.
    """

    name: str
    call: Call
    configured: Callable[[Any], Call]
    configs: list[Any]
    written: int
    check: Callable[[Any, Tensor], bool]
    work: Callable[[Tensor], Any]


def kernels(case: Case) -> Iterator[Kernel]:
    """Every kernel that takes the source."""
    source, spec = case.source, case.source.spec.bundle
    quantizer = Float8CurrentScalingQuantizer(fmt=E5M2 if case.gradient else E4M3)
    largest = amax(source)
    quantized = partial(in_fp8, fmt=quantizer.fmt, multiplier=quantizer.fmt.max / largest.max())
    if not isinstance(source.spec, Normalized):
        yield Kernel(
            "amax",
            lambda: amax(source),
            lambda config: partial(amax_kernel.amax_launch, source.tensors, spec, config),
            [amax_kernel.Config(*c) for c in itertools.product((2, 4, 8), (1024,), (4, 8), (1, 3))],
            0,
            lambda result, values: bool(result.max() == amax(values).max()),
            lambda values: values.abs().max(),
        )
    yield Kernel(
        "materialize",
        lambda: materialize(source),
        lambda config: partial(materialize_kernel._materialize_launch, source.tensors, spec, config),
        [materialize_kernel.Config(*c) for c in itertools.product((4, 8), (512, 1024), (4, 8))],
        BF16,
        torch.equal,
        lambda values: values,
    )
    for name, row, column in (("cast row", True, False), ("cast both", True, True)):
        tiles, registers = (ROW_TILES, (None, 64)) if not column else (TILES, (None, 96, 128))
        arguments = (source.tensors, spec, largest, quantizer.bundle, row, column)
        yield Kernel(
            name,
            partial(cast, source, largest, quantizer, row=row, column=column),
            lambda config, arguments=arguments: partial(cast_module._cast_launch, *arguments, config),
            [cast_kernel.Config(*t, w, r) for t, w, r in itertools.product(tiles, (4, 8), registers)],
            FP8 * (row + column),
            lambda result, values, row=row, column=column: same(
                result, cast(values, largest, quantizer, row=row, column=column)
            ),
            partial(quantized, column=column),
        )
    if case.gradient:
        arguments = (source.tensors, spec, largest, quantizer.bundle, True, True, torch.bfloat16)
        yield Kernel(
            "cast both + bias",
            lambda: cast_bias_grad(source, largest, quantizer, row=True, column=True),
            lambda config: partial(cast_module._cast_bias_grad_launch, *arguments, config),
            [
                cast_kernel.Config(GROUP, k, w, r)
                for k, w, r in itertools.product((64, 128), (2, 4, 8), (None, 128, 168))
            ],
            2 * FP8,
            lambda result, values: (
                same(result[:3], cast(values, largest, quantizer, row=True, column=True))
                and torch.equal(result[3], bias_grad(values))
            ),
            lambda values: (*quantized(values, column=True), values.sum(0, dtype=torch.float32)),
        )


def in_fp8(values: Tensor, fmt: ElementFormat, multiplier: Tensor, column: bool) -> tuple[Tensor, ...]:
    """Values in fp8, and the transpose of that."""
    row = (values.float() * multiplier).clamp(-fmt.max, fmt.max).to(fmt.dtype)
    return (row, row.t().contiguous()) if column else (row,)


def same(a: tuple[Tensor | None, ...], b: tuple[Tensor | None, ...]) -> bool:
    """Whether the bits are equal."""
    given = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return all(torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)) for x, y in given)


def as_step(call: Call, device: torch.device) -> Call:
    """Warm, and as a CUDA graph: without the host's time."""
    for _ in range(3):
        call()
    if device.type != "cuda":
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def microseconds(steps: dict[str, Call], sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Medians of rounds, in which the steps take turns."""
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(sizes.rounds):
        for name, step in steps.items():
            turns[name].append(elapsed(step, sizes.iterations, device))
    return {name: statistics.median(times) for name, times in turns.items()}


def elapsed(step: Call, iterations: int, device: torch.device) -> float:
    """Microseconds of a step."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(iterations):
            step()
        return (time.perf_counter() - started) / iterations * 1e6
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(iterations):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / iterations * 1e3


def measure(case: Case, sizes: Sizes, device: torch.device, backend: str, sweep: bool) -> dict[str, Any]:
    """All kernels on one source, ready for JSON."""
    M, K = case.source.shape
    values = materialize(case.source)
    target = torch.empty_like(values)
    found = list(kernels(case))
    steps = {"copy": partial(target.copy_, values), **{kernel.name: kernel.call for kernel in found}}
    torch.compiler.reset()
    for kernel in found:
        work = torch.compile(partial(expressed, case, kernel), fullgraph=True, backend=backend)
        steps[f"compiled {kernel.name}"] = partial(work, *case.arguments)
    times = microseconds({name: as_step(call, device) for name, call in steps.items()}, sizes, device)
    bytes_a_us = 2 * BF16 * M * K / times["copy"]
    read = sum(x.numel() * x.element_size() for x in case.source.tensors)
    rows = {}
    for kernel in found:
        moved = read + kernel.written * M * K
        row = {"us": times[kernel.name], "of_copy": moved / bytes_a_us / times[kernel.name], "bytes": moved}
        compiled = times[f"compiled {kernel.name}"]
        row |= {"compiled_us": compiled, "over_compiled": compiled / times[kernel.name]}
        row["equal"] = kernel.check(kernel.call(), values)
        rows[kernel.name] = row | (swept(kernel, sizes, device, moved / bytes_a_us) if sweep else {})
    return {"shape": [M, K], "copy_tb_s": bytes_a_us / 1e6, "kernels": rows}


def expressed(case: Case, kernel: Kernel, *arguments: Tensor) -> Any:
    """A kernel's work in plain torch."""
    return kernel.work(case.expression(*arguments))


def swept(kernel: Kernel, sizes: Sizes, device: torch.device, least_us: float) -> dict[str, Any]:
    """The kernel under every configuration: the five best, as shares of the copy's speed."""
    shares = {}
    for config in kernel.configs:
        try:
            step = as_step(kernel.configured(config), device)
        except Exception as error:  # one that does not fit the device
            print(f"      {tuple(config)}: {type(error).__name__}")
            continue
        shares[str(tuple(config))] = least_us / microseconds({"": step}, sizes._replace(rounds=3), device)[""]
    return {"best": dict(sorted(shares.items(), key=lambda item: -item[1])[:5])}


def facts(device: torch.device) -> dict[str, Any]:
    """What it was measured on."""
    triton = metadata.version("triton") if importlib.util.find_spec("triton") else None
    found = {"device": device.type, "torch": torch.__version__, "triton": triton, "lowp": lowp.__version__}
    if device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found


def print_case(name: str, entry: dict[str, Any]) -> None:
    """The rows of a table."""
    print(f"{name} {entry['shape']}: copy {entry['copy_tb_s']:.2f} TB/s")
    for kernel, row in entry["kernels"].items():
        verdict = "" if row["equal"] else "   NOT EQUAL to the unfused result"
        shares = f"{row['of_copy']:6.1%} of copy   compiled {row['compiled_us']:9.1f} us   x{row['over_compiled']:.2f}"
        print(f"   {kernel:18s}{row['us']:9.1f} us   {shares}{verdict}", flush=True)
        for config, share in row.get("best", {}).items():
            print(f"      {config:34s}{share:6.1%}")


@torch.no_grad()
def main() -> None:
    """Measure, print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run")
    parser.add_argument("--sweep", action="store_true", help="other launch configurations too")
    parser.add_argument("--only", default="", metavar="PART", help="of a source's name")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, backend = (QUICK, "eager") if options.quick else (LLAMA_8B, "inductor")
    report: dict[str, Any] = {"on": facts(device), "sizes": sizes._asdict(), "sources": {}}
    for case in cases(sizes, device):
        if options.only in case.name:
            entry = measure(case, sizes, device, backend, options.sweep)
            report["sources"][case.name] = entry
            print_case(case.name, entry)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if not all(row["equal"] for entry in report["sources"].values() for row in entry["kernels"].values()):
        raise SystemExit("fused and unfused results differ")


if __name__ == "__main__":
    main()
