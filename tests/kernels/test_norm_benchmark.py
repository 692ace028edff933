from __future__ import annotations

import json

import torch

from tests.scripts import load


def test_benchmark_measures_every_case(tmp_path):
    script = load("benchmarks/norm_kernels.py")
    script.main(["--quick", "--backend", "aot_eager", "--json", str(tmp_path / "result.json")])
    report = json.loads((tmp_path / "result.json").read_text())
    assert {"device", "torch", "triton"} <= report["on"].keys()
    assert [entry["kind"] for entry in report["results"]] == list(script.KINDS)
    for entry in report["results"]:
        assert [row["case"] for row in entry["rows"]] == [case.name for case in script.CASES]
        for row in entry["rows"]:
            assert row["us"] > 0
            assert row["relative_difference"] <= torch.finfo(torch.bfloat16).eps
