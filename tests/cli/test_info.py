"""`lowp info`: versions, devices and every recipe."""

import torch
from typer.testing import CliRunner

import lowp
from lowp.cli.main import app
from lowp.cli.recipes import RECIPES


def test_info_tells_versions_devices_and_recipes():
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0, result.output
    for text in (lowp.__version__, torch.__version__, "cpu", "emulated", *RECIPES):
        assert text in result.output


def test_help_lists_the_commands():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("demo", "bench", "info"):
        assert command in result.output
