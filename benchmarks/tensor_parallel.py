"""Time of a column- and a row-parallel layer with sequence parallelism: FP8 against bf16, and the traffic hidden.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py [--json FILE]        on GPUs
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --quick              small sizes, also on CPUs

    y = row(column(x))      column: [tokens, D] -> [tokens, hidden]      row: [tokens, hidden] -> [tokens, D]

Forward and backward of the pair, without bias and activation. The bf16 pair is plain torch under torch.compile, with
the collectives of the FP8 pair at the same places: the input gathered again in backward or kept, dgrad's scatter during
wgrad. A time is the median of several rounds, each the slowest rank's.

    hidden share = 1 - (time - time without collectives) / time of the collectives alone

Without collectives: what would be gathered is there already, what would be scattered is cut.
Shape legend: T = ranks, M = tokens of all ranks, N = out features, K = in features.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowp
from lowp import ops
from lowp.distributed.collectives import Pending
from lowp.ops import linear_gemms
from lowp.recipe import Float8CurrentScaling

C10D = torch.ops._c10d_functional


class Sizes(NamedTuple):
    """Sizes of the whole layers, and how often to measure."""

    tokens: int
    features: int
    hidden: int
    rounds: int
    iterations: int


LLAMA_8B = Sizes(tokens=16384, features=4096, hidden=14336, rounds=9, iterations=10)
QUICK = Sizes(tokens=64, features=64, hidden=128, rounds=2, iterations=2)


def gather(x: Tensor, group: Any) -> Tensor:
    """Start gathering rows."""
    return C10D.all_gather_into_tensor(x, group.size(), group.group_name)


def scatter(x: Tensor, group: Any) -> Tensor:
    """Start summing and scattering rows."""
    return C10D.reduce_scatter_tensor(x, "sum", group.size(), group.group_name)


def wait(x: Tensor) -> Tensor:
    """The result of a collective."""
    return C10D.wait_tensor(x)


class Column(torch.autograd.Function):
    """bf16 `y = gathered x @ w.T`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: Any, keep: bool) -> Tensor:
        """Gather, multiply."""
        whole = wait(gather(x, group))
        ctx.save_for_backward(whole if keep else x, w)
        ctx.group, ctx.keep = group, keep
        return whole @ w.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Gather during dgrad, scatter during wgrad."""
        x, w = ctx.saved_tensors
        whole = x if ctx.keep else gather(x, ctx.group)
        dx = scatter(dy @ w, ctx.group)
        dw = dy.t() @ (whole if ctx.keep else wait(whole))
        return wait(dx), dw, None, None


class Row(torch.autograd.Function):
    """bf16 `y = scattered sum of x @ w.T`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: Any) -> Tensor:
        """Multiply, scatter."""
        ctx.save_for_backward(x, w)
        ctx.group = group
        return wait(scatter(x @ w.t(), group))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Gather, multiply."""
        x, w = ctx.saved_tensors
        dy = wait(gather(dy, ctx.group))
        return dy @ w, dy.t() @ x, None


class PlainPair(nn.Module):
    """The pair in bf16, without the library."""

    def __init__(self, sizes: Sizes, group: Any, device: torch.device, *, keep: bool) -> None:
        super().__init__()
        hidden = sizes.hidden // group.size()
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.up = nn.Parameter(torch.randn(hidden, sizes.features, **options) * sizes.features**-0.5)
        self.down = nn.Parameter(torch.randn(sizes.features, hidden, **options) * sizes.hidden**-0.5)
        self.group, self.keep = group, keep

    def forward(self, x: Tensor) -> Tensor:
        """Both layers."""
        return Row.apply(Column.apply(x, self.up, self.group, self.keep), self.down, self.group)


def fp8_pair(sizes: Sizes, group: Any, device: torch.device, *, keep: bool) -> nn.Module:
    """The pair of the library."""
    options: dict[str, Any] = {
        "device": device,
        "dtype": torch.bfloat16,
        "tensor_parallel_group": group,
        "sequence_parallel": True,
    }
    return ops.Sequential(
        ops.BasicLinear(
            sizes.features, sizes.hidden, tensor_parallel_mode="column", keep_gathered_input=keep, **options
        ),
        ops.BasicLinear(sizes.hidden, sizes.features, tensor_parallel_mode="row", **options),
        recipe=Float8CurrentScaling(),
    )


@contextmanager
def without_collectives() -> Iterator[None]:
    """Inside, the library's linear layers communicate nothing: what is gathered is there, what is scattered is cut."""
    there: dict[Any, Tensor] = {}

    def gathered(x: Tensor, group: Any) -> Pending:
        key = (x.shape, x.dtype)
        if key not in there:
            there[key] = torch.cat([x.view(torch.uint8)] * group.size()).view(x.dtype)
        return Pending(there[key], started=False)

    def scattered(x: Tensor, group: Any) -> Pending:
        return Pending(x.chunk(group.size())[group.rank()], started=False)

    names = {"all_gather": gathered, "reduce_scatter": scattered, "all_reduce": lambda x, *_: Pending(x, started=False)}
    originals = {name: getattr(linear_gemms, name) for name in names}
    try:
        for name, stub in names.items():
            setattr(linear_gemms, name, stub)
        yield
    finally:
        for name, original in originals.items():
            setattr(linear_gemms, name, original)


def fp8_collectives(sizes: Sizes, group: Any, device: torch.device, *, keep: bool) -> Callable[[], None]:
    """The collectives of one forward and backward of the FP8 pair, one after the other."""
    rows = sizes.tokens // group.size()
    codes = torch.zeros(rows, sizes.features, device=device, dtype=torch.uint8)
    sums = torch.zeros(sizes.tokens, sizes.features, device=device, dtype=torch.bfloat16)
    amax = torch.zeros(1024 if device.type == "cuda" else 1, device=device)

    def agree_and_gather() -> None:
        wait(C10D.all_reduce(amax, "max", group.group_name))
        wait(gather(codes, group))

    def run() -> None:
        agree_and_gather()  # column, forward: the input
        wait(scatter(sums, group))  # row, forward: the output
        agree_and_gather()  # row, backward: the output's gradient
        if not keep:
            wait(gather(codes, group))  # column, backward: the input again
        wait(scatter(sums, group))  # column, backward: the input's gradient

    return run


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(run: Callable[[], None], sizes: Sizes, group: Any, device: torch.device) -> float:
    """Time of one run: the median of the rounds, each the slowest rank's."""
    for _ in range(3):
        run()
    times = []
    for _ in range(sizes.rounds):
        dist.barrier(group)
        synchronize(device)
        start = time.perf_counter()
        for _ in range(sizes.iterations):
            run()
        synchronize(device)
        slowest = torch.tensor((time.perf_counter() - start) / sizes.iterations * 1e3, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
        times.append(float(slowest))
    return statistics.median(times)


def training_step(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Forward and backward."""

    def run() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        x.grad = None
        call(x).backward(dy)

    return run


def measure(sizes: Sizes, group: Any, device: torch.device, *, backend: str = "inductor") -> dict[str, Any]:
    """All times.

    Args:
        sizes: of the layers.
        group: the ranks.
        device: this rank's.
        backend: of torch.compile.

    Returns:
        By way ("fp8 eager", ...) and whether the gathered input is kept: milliseconds and shares.
    """
    torch.manual_seed(group.rank())
    rows = sizes.tokens // group.size()
    x, dy = (torch.randn(rows, sizes.features, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    results: dict[str, Any] = {}
    for keep in (False, True):
        torch.compiler.reset()
        entry = results["input kept" if keep else "input gathered again"] = {}
        plain = PlainPair(sizes, group, device, keep=keep)
        compiled = torch.compile(plain, fullgraph=True, backend=backend)
        bf16 = milliseconds(training_step(plain, compiled, x, dy), sizes, group, device)
        entry["bf16 compiled"] = {"ms": bf16}
        alone = milliseconds(fp8_collectives(sizes, group, device, keep=keep), sizes, group, device)
        entry["collectives alone"] = {"ms": alone}
        pair = fp8_pair(sizes, group, device, keep=keep)
        for way in ("eager", "compiled", "compiled, kernels as nodes"):
            call = pair if way == "eager" else torch.compile(pair, fullgraph=True, backend=backend)
            step = training_step(pair, call, x, dy)
            with lowp.compile_boundary("kernel" if "kernels" in way else "operation"):
                total = milliseconds(step, sizes, group, device)
                entry[f"fp8 {way}"] = {"ms": total, "speed over bf16 compiled": bf16 / total}
                if "kernels" in way:  # whose collectives are nodes of the graph, which nothing can replace
                    continue
                with without_collectives():
                    compute = milliseconds(step, sizes, group, device)
            entry[f"fp8 {way}"] |= {
                "ms without collectives": compute,
                "hidden share of the collectives": 1 - (total - compute) / alone,
            }
    return results


def facts(device: torch.device, group: Any) -> dict[str, Any]:
    """What it was measured on."""
    found: dict[str, Any] = {"device": str(device.type), "ranks": group.size(), "torch": torch.__version__}
    found["lowp"] = lowp.__version__
    found["triton"] = metadata.version("triton") if importlib.util.find_spec("triton") else None
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def main() -> None:
    """Measure, print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run")
    parser.add_argument("--hidden", type=int, help="hidden features of the whole layers")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    sizes = QUICK if options.quick else LLAMA_8B
    sizes = sizes._replace(hidden=options.hidden or sizes.hidden)
    results = measure(sizes, dist.group.WORLD, device)
    if dist.get_rank() == 0:
        report = {"on": facts(device, dist.group.WORLD), "sizes": sizes._asdict(), "results": results}
        print(json.dumps(report, indent=2))
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
