"""`lowp bench --quick` on a CPU, and what it checks before it times."""

import json

import pytest
import torch
from typer.testing import CliRunner

import lowp
from lowp.cli.bench import variants
from lowp.cli.bench.cases import QUICK_MODULES
from lowp.cli.bench.check import errors, results
from lowp.cli.bench.command import failures
from lowp.cli.bench.kernel_cases import KERNELS, QUICK_KERNELS
from lowp.cli.bench.measure import Effort, interleave
from lowp.cli.bench.variants import BASELINE, HOST_BASELINE
from lowp.cli.main import app
from lowp.cli.recipes import RECIPES

CASE = QUICK_MODULES[0]


def run_bench(file, *options):
    options = ("--out", str(file), *options)
    return CliRunner().invoke(app, ["bench", "--quick", "--device", "cpu", "--backend", "aot_eager", *options])


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # with which torch's CUDA graph trees begin
def test_quick_writes_every_case(tmp_path, device):
    file = tmp_path / "results" / "quick.json"
    result = run_bench(file, "--device", device)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert found["machine"]["torch"] == torch.__version__
    assert found["quick"]
    assert [entry["case"] for entry in found["modules"]] == [case.name for case in QUICK_MODULES]
    for entry in found["modules"]:
        names = [row["variant"] for row in entry["rows"]]
        assert {BASELINE, HOST_BASELINE} <= set(names)
        for recipe in RECIPES:
            assert len([name for name in names if recipe in name]) >= 3
        for row in entry["rows"]:
            assert row["error"] == "" or row["library"] == "torchao"
            assert row["error"] or row["ms"] > 0
            held_by_a_graph = "reduce-overhead" in row["variant"]
            assert row["error"] or (row["peak_mib"] is None if held_by_a_graph else row["peak_mib"] > 0)
            if device == "cpu":
                assert row["floor_reached"] is None  # known for an H200 only
        assert [row["speed"] for row in entry["rows"] if row["variant"] == entry["baseline"]] == [1.0]
    (kernels,) = found["kernels"]
    assert [row["kernel"] for row in kernels["rows"]] == ["copy", *(case.name for case in KERNELS)]
    assert all(row["gb_s"] > 0 and row["error"] == "" for row in kernels["rows"])


def test_only_picks_cases(tmp_path):
    file = tmp_path / "only.json"
    assert run_bench(file, "--only", "kernel: amax").exit_code == 0
    found = json.loads(file.read_text())
    assert found["modules"] == []
    assert [row["kernel"] for row in found["kernels"][0]["rows"]] == ["copy", "kernel: amax"]


def test_a_variant_that_fails_is_a_row_and_an_exit_code(tmp_path, monkeypatch):
    def fail(recipe, module, x):
        raise RuntimeError("broken here")

    monkeypatch.setattr(variants, "_under", fail)
    file = tmp_path / "failed.json"
    result = run_bench(file, "--only", CASE.name, "--variant", "eager")
    assert result.exit_code == 1
    rows = {row["variant"]: row for row in json.loads(file.read_text())["modules"][0]["rows"]}
    assert "broken here" in rows["lowp bf16 eager"]["error"]
    assert rows[BASELINE]["error"] == ""


def test_only_our_own_failures_count():
    row = {"variant": "torchao", "library": "torchao", "error": "it has no GPU"}
    assert failures([{"case": "linear", "rows": [row]}]) == []
    assert failures([{"case": "linear", "rows": [{**row, "library": "lowp"}]}]) == ["linear: torchao: it has no GPU"]
    assert failures([{"shape": [1], "rows": [{"kernel": "amax", "error": "is off"}]}]) == ["[1]: amax: is off"]


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=str)
@pytest.mark.parametrize("case", QUICK_MODULES[:-1], ids=lambda case: case.name)
def test_right_results_pass_and_wrong_ones_do_not(case, recipe):
    torch.manual_seed(0)
    reference, ours = case.reference(), case.lowp()
    x, dy = torch.randn(32, case.layers[0].k), torch.randn(32, case.layers[-1].n)
    expected = results(reference, reference, x, dy)
    with torch.no_grad():
        for own, other in zip(ours.parameters(), reference.parameters(), strict=True):
            own.copy_(other)

    def run(value):
        with lowp.autocast(enabled=recipe is not None, recipe=recipe):
            return ours(value)

    actual = results(ours, run, x, dy)
    assert errors(actual, expected, case, recipe)[1] == ""
    for name, value in actual.items():
        wrong = errors({**actual, name: value * 1.2}, expected, case, recipe)[1]
        assert wrong.startswith(f"{name} is off")
    assert errors({**actual, "output": actual["output"] * float("nan")}, expected, case, recipe)[1]
    assert "input is missing" in errors({"output": actual["output"]}, expected, case, recipe)[1]


@pytest.mark.parametrize("case", QUICK_KERNELS, ids=lambda case: case.name)
def test_kernel_checks_notice_wrong_results(case):
    torch.manual_seed(0)
    x = torch.randn(case.shapes[0], dtype=torch.bfloat16)
    result = case.prepare(x)()
    assert case.check(x, result) <= case.tolerance
    assert case.check(x * 1.3, result) > case.tolerance


def test_variants_take_turns():
    order = []
    steps = {name: lambda name=name: order.append(name) for name in "ab"}

    def timer(step, iterations):
        for _ in range(iterations):
            step()
        return float(len(order))

    times = interleave(steps, timer, Effort(warmup=0, rounds=3, iterations=2))
    assert "".join(order) == "aabbaabbaabb"
    assert times == {"a": 6.0, "b": 8.0}
