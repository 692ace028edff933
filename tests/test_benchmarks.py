"""The benchmark scripts of one process run, on tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_fused_kernels(tmp_path):
    script, report = ROOT / "benchmarks" / "fused_kernels.py", tmp_path / "results" / "report.json"
    command = [sys.executable, str(script), "--quick", "--only", "swiglu", "--json", str(report)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    found = json.loads(report.read_text())
    assert list(found["sources"]) == ["swiglu", "gradient of swiglu"]
    for name, entry in found["sources"].items():
        assert name in output
        assert all(row["equal"] for row in entry["kernels"].values())
    assert "cast both + bias" in found["sources"]["gradient of swiglu"]["kernels"]
    assert {"device", "torch", "triton", "lowp"} <= found["on"].keys()
