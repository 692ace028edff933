"""What counts as a failure of the demo, and the bound that decides."""

import dataclasses
import math
import statistics

import pytest

from lowp.cli.demo.bound import BOUND_IN_SPREADS, SPREAD_FILE, Spread, load_spread, record_spread
from lowp.cli.demo.outcome import Row, failures
from lowp.cli.demo.plan import CPU
from lowp.cli.recipes import RECIPES

GOOD = Row(
    recipe="current",
    runs="emulated",
    bits_per_byte=3.01,
    gap=0.01,
    finite=True,
    graph_breaks=0,
    graphs=1,
    ms_per_step=80.0,
    peak_mib=9.0,
    error="",
)
BF16 = dataclasses.replace(GOOD, recipe="bf16", runs="", bits_per_byte=3.0, gap=0.0)


@pytest.mark.parametrize("bound", [None, 0.01, 0.02])
def test_good_rows_are_no_failure(bound):
    assert failures([BF16, GOOD], bound) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"finite": False}, "not finite"),
        ({"graph_breaks": 1}, "graph broke"),
        ({"error": "Unsupported: a reason"}, "a reason"),
        ({"gap": 0.03}, "beyond the bound"),
        ({"gap": -0.03}, "beyond the bound"),
        ({"gap": math.nan}, "beyond the bound"),
    ],
)
def test_each_failure_is_named(change, text):
    (problem,) = failures([BF16, dataclasses.replace(GOOD, **change)], 0.02)
    assert problem.startswith("current: ")
    assert text in problem


def test_no_measured_bound_judges_no_gap():
    assert failures([BF16, dataclasses.replace(GOOD, gap=1.0)], None) == []


def test_bound_is_a_multiple_of_the_measured_spread(tmp_path):
    file = tmp_path / "spread.json"
    losses = [3.0, 3.1, 2.9, 3.05]
    record_spread("cpu", 100, Spread({"device": "d"}, [0, 1, 2, 3], {"bf16": losses}), file)
    record_spread("cpu", 200, Spread({"device": "d"}, [0, 1], {"bf16": [2.0, 2.1]}), file)
    found = load_spread("cpu", 100, file)
    assert found is not None
    assert found.bound == BOUND_IN_SPREADS * statistics.stdev(losses)
    assert load_spread("cpu", 300, file) is None
    assert load_spread("gpu", 100, file) is None


def test_one_seed_has_no_spread(tmp_path):
    with pytest.raises(statistics.StatisticsError):
        record_spread("cpu", 100, Spread({}, [0], {"bf16": [3.0]}), tmp_path / "spread.json")
    assert not (tmp_path / "spread.json").exists()


def test_the_default_demo_was_measured():
    spread = load_spread(CPU.name, CPU.max_steps)
    assert spread is not None, SPREAD_FILE
    assert len(spread.seeds) >= 5
    assert {"device", "torch", "python"} <= set(spread.machine)
    assert all(len(losses) == len(spread.seeds) for losses in spread.bits_per_byte.values())
    for name in RECIPES:
        if name in spread.bits_per_byte:
            pairs = zip(spread.bits_per_byte[name], spread.bits_per_byte["bf16"], strict=True)
            assert all(abs(own - bf16) <= spread.bound for own, bf16 in pairs)
