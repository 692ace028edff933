"""The benchmark scripts of one process run, on tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


VALUES = ["amax", "materialize", "cast row", "cast both"]


@pytest.mark.parametrize(
    ("only", "kernels"),
    [
        (
            "swiglu",
            {
                "swiglu": VALUES,
                "gradient of swiglu": [*VALUES, "cast both + bias"],
                "gradient of clamped_swiglu": [*VALUES, "cast both + bias"],
            },
        ),
        ("LayerNorm", {"LayerNorm": VALUES[1:]}),  # its amax is the statistics' kernel's
    ],
)
def test_fused_kernels(tmp_path, only, kernels):
    script, report = ROOT / "benchmarks" / "fused_kernels.py", tmp_path / "results" / "report.json"
    command = [sys.executable, str(script), "--quick", "--only", only, "--json", str(report)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    found = json.loads(report.read_text())
    assert {name: list(entry["kernels"]) for name, entry in found["sources"].items()} == kernels
    for name, entry in found["sources"].items():
        assert name in output
        assert all(row["equal"] and row["compiled_us"] > 0 for row in entry["kernels"].values())
    assert {"device", "torch", "triton", "lowp"} <= found["on"].keys()
