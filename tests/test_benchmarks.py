"""The benchmark scripts of one process run, on tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("only", "kernels"),
    [
        ("gradient of swiglu", ["amax", "materialize", "cast row", "cast both", "cast both + bias"]),
        ("LayerNorm", ["materialize", "cast row", "cast both"]),
    ],
)
def test_fused_kernels(tmp_path, only, kernels):
    script, report = ROOT / "benchmarks" / "fused_kernels.py", tmp_path / "results" / "report.json"
    command = [sys.executable, str(script), "--quick", "--only", only, "--json", str(report)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    found = json.loads(report.read_text())
    assert list(found["sources"]) == [only]
    assert only in output
    rows = found["sources"][only]["kernels"]
    assert list(rows) == kernels
    assert all(row["equal"] and row["compiled_us"] > 0 for row in rows.values())
    assert {"device", "torch", "triton", "lowp"} <= found["on"].keys()
