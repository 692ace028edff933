"""A demo small enough for a test, and one thread: the tensors are tiny."""

import dataclasses
import importlib.util

import pytest
import torch

EXTRA = ("typer", "rich", "matplotlib")
collect_ignore_glob = ["test_*.py"] if any(importlib.util.find_spec(name) is None for name in EXTRA) else []


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny(monkeypatch):
    """`tiny(field=value)` makes the demo use a tiny model, with these fields changed."""
    from lowp.cli.demo import command, plan

    size = dataclasses.replace(
        plan.CPU, name="tiny", layers=1, width=32, heads=2, hidden=48, sequence=16, batch=2, validation_windows=4
    )

    def use(**changes):
        monkeypatch.setattr(command, "size_for", lambda device: dataclasses.replace(size, **changes))

    use()
    return use
