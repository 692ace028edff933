"""The processes that distributed tests run in: on gloo, and on two GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu2)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as started:
        yield started
