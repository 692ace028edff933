"""Devices, seeds, and a compiler that starts afresh in every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lowp.kernels import cast_kernel

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        request.getfixturevalue("cuda_backward_thread")
    return request.param


@pytest.fixture(scope="session")
def cuda_backward_thread() -> None:
    """Lets autograd's thread start with a kernel of torch's own: a first product of cuBLAS warns (torch 2.11)."""
    torch.ones(1, device="cuda", requires_grad=True).mul(2).sum().backward()


@pytest.fixture(params=["amax found", "amax kept"])
def either_amax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small weight's amax is found by each cast; and, as a large one's, by forward and kept."""
    if request.param == "amax kept":
        monkeypatch.setattr(cast_kernel, "_FEW_BLOCKS", 0)
    return request.param


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Seeds the generators, and forgets all compiled graphs before and after."""
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()
