"""The machine: its device, versions and commit, its threads, and the terminal that results are printed on."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import lowp
from lowp.errors import require

_WIDTH = 120


def pick_device(name: str) -> torch.device:
    """The device of this name.

    Args:
        name: "auto" (a GPU where torch finds one, else the CPU), or a device's name.

    Raises:
        ValueError: a CUDA device is asked for and there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    require(
        device.type != "cuda" or torch.cuda.is_available(),
        "device",
        "torch must find the CUDA device that is asked for",
        got=name,
        hint="Use --device cpu.",
    )
    return device


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Use one thread inside, on a CPU.

    Small tensors gain little from more, and threads that wait for each other by spinning crawl on cores that are
    shared: a step that takes 0.1 s was seen to take 3 s.
    """
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def wait(device: torch.device) -> None:
    """Until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_console() -> Console:
    """Where results are printed: the terminal, or wide enough for every table where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def device_name(device: torch.device) -> str:
    """The device as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_model() or platform.processor() or platform.machine()


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def package_version(name: str) -> str | None:
    """The installed version of a package; None: it can't be imported."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def git_commit() -> str | None:
    """The commit that the package runs from, with `+changes` if files differ from it; None: not from a checkout."""
    git = shutil.which("git")
    if git is None:
        return None
    here = Path(lowp.__file__).parent

    def run(*args: str) -> str | None:
        result = subprocess.run([git, *args], cwd=here, capture_output=True, text=True, check=False)
        return result.stdout.strip() if result.returncode == 0 else None

    if run("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = run("rev-parse", "HEAD")
    return f"{commit}+changes" if commit and run("status", "--porcelain", "--", str(here)) else commit


def describe(device: torch.device) -> dict[str, Any]:
    """Everything that a result needs beside it to be understood later, ready for JSON."""
    facts: dict[str, Any] = {
        "device": device_name(device),
        "device_type": device.type,
        "capability": None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "lowp": lowp.__version__,
        "commit": git_commit(),
    }
    if device.type == "cuda":
        facts["capability"] = ".".join(str(part) for part in torch.cuda.get_device_capability(device))
        facts["cuda"] = torch.version.cuda
        del facts["threads"]
    return facts
