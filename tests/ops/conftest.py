"""Devices, seeds, and a compiler that starts afresh in every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lowp.dynamo import custom_op
from lowp.kernels import cast_kernel

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["amax found", "amax kept"])
def either_amax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small weight's amax is found by each cast; and, as a large one's, by forward and kept."""
    if request.param == "amax kept":
        monkeypatch.setattr(cast_kernel, "_FEW_BLOCKS", 0)
        monkeypatch.setattr(custom_op, "_replayed", lambda known, run, flat: run(flat))  # of what is a constant else
    return request.param


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Seeds the generators, and forgets all compiled graphs before and after."""
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()
