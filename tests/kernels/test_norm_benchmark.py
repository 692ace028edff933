from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "norm_kernels.py"


def test_benchmark_measures_every_case(tmp_path):
    spec = importlib.util.spec_from_file_location(BENCHMARK.stem, BENCHMARK)
    script = importlib.util.module_from_spec(spec)
    sys.modules[BENCHMARK.stem] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    script.main(["--quick", "--backend", "aot_eager", "--json", str(tmp_path / "result.json")])
    report = json.loads((tmp_path / "result.json").read_text())
    assert {"device", "torch", "triton"} <= report["on"].keys()
    assert [entry["kind"] for entry in report["results"]] == list(script.KINDS)
    for entry in report["results"]:
        assert [row["case"] for row in entry["rows"]] == [case.name for case in script.CASES]
        for row in entry["rows"]:
            assert row["us"] > 0
            assert row["relative_difference"] <= torch.finfo(torch.bfloat16).eps
