"""Devices, seeds, and a compiler that starts afresh in every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lowp.kernels import cast_kernel
from lowp.replay import forget_all

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["amax found", "amax kept"])
def either_amax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A small weight's amax is found by each cast; and, as a large one's, by forward and kept."""
    if request.param == "amax kept":
        monkeypatch.setattr(cast_kernel, "_FEW_BLOCKS", 0)
    forget_all()  # programs of the other constant
    yield request.param
    forget_all()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Seeds the generators, and forgets all compiled graphs before and after."""
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()
