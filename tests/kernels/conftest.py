"""Devices, and memory that is poisoned before a kernel writes to it."""

from __future__ import annotations

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `Tensor.new_empty` gives with 0xFF, which is NaN in every format."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        out = new_empty(self, *args, **kwargs)
        out.reshape(-1).view(torch.uint8).fill_(0xFF)
        return out

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
