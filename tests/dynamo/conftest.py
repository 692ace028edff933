"""A compiler that starts afresh in every test, and a process group of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from lowp.ops import plan


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Seeds the generators, and forgets all compiled graphs before and after."""
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def fusion_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets, after the test, the fusion rules that it registers."""
    monkeypatch.setattr(plan, "_RULES", list(plan._RULES))


@pytest.fixture(scope="session")
def group() -> Iterator[dist.ProcessGroup]:
    """A gloo group of this process alone."""
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([dist.get_rank()])
    if started:
        dist.destroy_process_group()
