"""The example and the benchmark run on two ranks, and the example trains the same model on one."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.distributed.ranks import Ranks, alone, device, world
from tests.scripts import ROOT, load

EXAMPLE, BENCHMARK = "examples/train_tensor_parallel.py", "benchmarks/tensor_parallel.py"


def losses(recipe: str, steps: int, backend: str | None) -> list[list[float]]:
    """On one rank, then on two."""
    example = load(EXAMPLE)
    size = example.Size(layers=1, width=32, heads=2, hidden=64, sequence=16, batch=4)
    options = {"size": size, "steps": steps, "recipe": example.RECIPES[recipe], "learning_rate": 1e-2}
    one = example.train(alone(), device(), **options)[1]
    return [one, example.train(world(), device(), compile_backend=backend, **options)[1]]


@pytest.mark.parametrize(("recipe", "backend"), [("bf16", None), ("fp8", None), ("fp8", "aot_eager")])
def test_example_trains_alike_on_one_and_two_ranks(ranks: Ranks, recipe, backend):
    first, second = ranks(losses, recipe, 12, backend)
    assert first[1] == second[1], "ranks disagree on the loss"
    one, two = first
    # an untrained model knows nothing: logits of at most unit variance cost 1 / (2 ln 2) bits more than equal ones
    assert one[0] == pytest.approx(math.log2(256), abs=0.5 / math.log(2))
    assert two[0] == pytest.approx(one[0], rel=torch.finfo(torch.bfloat16).eps)
    assert two[-1] < two[0] - 1
    assert two[-1] == pytest.approx(one[-1], rel=0.05)


def benchmark() -> dict[str, Any]:
    script = load(BENCHMARK)
    return script.measure(script.QUICK, world(), device(), backend="aot_eager")


def test_benchmark_measures_every_way(ranks: Ranks):
    results, _ = ranks(benchmark)
    assert results.keys() == {"input gathered again", "input kept"}
    for entry in results.values():
        ways = {"fp8 eager", "fp8 compiled", "fp8 compiled, kernels as nodes"}
        assert entry.keys() == {"bf16 compiled", "collectives alone"} | ways
        assert all(found["ms"] > 0 for found in entry.values())
        assert "hidden share of the collectives" in entry["fp8 compiled"]


@pytest.mark.full
@pytest.mark.parametrize("nproc", [1, 2])
def test_torchrun(nproc, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    options = ["--steps=10", "--layers=1", "--width=32", "--hidden=64", "--sequence=16", f"--save={tmp_path}"]
    for script, arguments in ((EXAMPLE, options), (BENCHMARK, ["--quick"])):
        result = subprocess.run(
            [*command, str(ROOT / script), *arguments], capture_output=True, text=True, check=False, timeout=280
        )
        assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir())
