"""Devices, seeds, and a compiler that starts afresh in every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Seeds the generators, and forgets all compiled graphs before and after."""
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()
