"""A demo small enough for a test, and one thread: the tensors are tiny."""

import dataclasses

import pytest
import torch

from lowp.cli.demo import command, plan

TINY = dataclasses.replace(
    plan.CPU, name="tiny", layers=1, width=32, heads=2, hidden=48, sequence=16, batch=2, validation_windows=4
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny(monkeypatch):
    """`tiny(field=value)` makes the demo use a tiny model, with these fields changed."""

    def use(**changes):
        monkeypatch.setattr(command, "size_for", lambda device: dataclasses.replace(TINY, **changes))

    use()
    return use
