"""`lowp demo` from the command line, on a tiny model: output, files, exit codes."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from lowp.cli.demo import command, training
from lowp.cli.demo.bound import Spread
from lowp.cli.demo.data import load_corpus
from lowp.cli.demo.model import ByteModel
from lowp.cli.main import app
from lowp.cli.recipes import RECIPES


def run_demo(tmp_path, *options):
    options = ("--steps", "4", "--out", str(tmp_path), *options)
    return CliRunner().invoke(app, ["demo", "--device", "cpu", "--backend", "eager", *options])


def spread(deviation):
    return Spread({"device": "a test"}, [0, 1], {"bf16": [3.0, 3.0 + deviation * math.sqrt(2)]})


def test_demo_trains_every_recipe_and_writes_what_it_found(tiny, tmp_path, monkeypatch, device):
    monkeypatch.setattr(command, "load_spread", lambda size, steps: spread(deviation=10.0))
    result = run_demo(tmp_path, "--backend", "aot_eager", "--device", device)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "demo.json").read_text())
    assert [row["recipe"] for row in found["rows"]] == ["bf16", *RECIPES]
    for row in found["rows"]:
        assert row["finite"]
        assert (row["graph_breaks"], row["graphs"]) == (0, 1)
        assert 0 < row["bits_per_byte"] < 10
        assert row["ms_per_step"] > 0
        assert row["peak_mib"] > 0
        assert row["recipe"] in result.output
    assert [len(run["losses"]) for run in found["runs"]] == [4] * len(found["rows"])
    assert found["failures"] == []
    assert found["bound"] == pytest.approx(30.0)
    assert found["machine"]["torch"] == torch.__version__
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_equal_seeds_give_equal_losses(tiny):
    setting = training.Setting(command.size_for(None), load_corpus(), torch.device("cpu"), "eager")
    trainer = training.Trainer("current", RECIPES["current"], setting)
    first, again, other = (trainer.train(seed, 3, lambda done, loss: None) for seed in (0, 0, 1))
    assert first.losses == again.losses
    assert first.bits_per_byte == again.bits_per_byte
    assert first.losses != other.losses
    assert trainer.graphs == 1


def test_a_loss_that_is_not_finite_fails(tiny, tmp_path):
    tiny(learning_rate=math.inf)
    result = run_demo(tmp_path, "--recipe", "current")
    assert result.exit_code == 1
    assert "a loss is not finite" in result.output
    assert json.loads((tmp_path / "demo.json").read_text())["rows"][0]["bits_per_byte"] is None


def test_a_gap_beyond_the_bound_fails(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "load_spread", lambda size, steps: spread(deviation=0.0))
    result = run_demo(tmp_path, "--recipe", "current")
    assert result.exit_code == 1
    assert "beyond the bound" in result.output
    assert len(json.loads((tmp_path / "demo.json").read_text())["failures"]) == 1


def test_a_graph_break_fails(tiny, tmp_path, monkeypatch):
    class Broken(ByteModel):
        def forward(self, bytes_BS):
            torch._dynamo.graph_break()
            return super().forward(bytes_BS)

    monkeypatch.setattr(training, "ByteModel", Broken)
    result = run_demo(tmp_path)
    assert result.exit_code == 1
    assert "the graph broke (1 breaks)" in result.output


def test_record_files_the_spread(tiny, tmp_path, monkeypatch):
    filed = []
    monkeypatch.setattr(command, "record_spread", lambda *arguments: filed.append(arguments))
    result = run_demo(tmp_path, "--seeds", "2", "--record", "--recipe", "current")
    assert result.exit_code == 0, result.output
    assert "not measured for the tiny model at 4 steps" in result.output
    ((size, steps, measured),) = filed
    assert (size, steps, measured.seeds) == ("tiny", 4, [0, 1])
    assert set(measured.bits_per_byte) == {"bf16", "current"}
    assert measured.bound > 0
    first, second = measured.bits_per_byte["bf16"]
    assert first != second


def test_an_unknown_recipe_is_an_error(tiny, tmp_path):
    result = run_demo(tmp_path, "--recipe", "float3")
    assert result.exit_code != 0
    assert "float3" in str(result.exception)
