"""Importing the library is light: no GPU, no Triton, none of the command line's packages."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import lowp


def run_python(code: str) -> None:
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_version_is_the_package_version():
    assert lowp.__version__ == version("lowp")


def test_import_works_without_triton():
    run_python("import sys; sys.modules['triton'] = None; import lowp")


@pytest.mark.parametrize("package", ["typer", "rich", "matplotlib"])
def test_import_leaves_out_the_command_line(package):
    run_python(f"import sys, lowp; assert {package!r} not in sys.modules")
