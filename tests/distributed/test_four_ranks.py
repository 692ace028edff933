"""A layer over four ranks, whose local sizes are below what an FP8 GEMM takes as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.exact import problem
from tests.distributed.ranks import Ranks, alone, world
from tests.distributed.test_tensor_parallel import RECIPES, Split, check, parallel_linear, run
from tests.ops.pipelines import compiled

IN_FEATURES = 32


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks("gloo", world_size=4) as started:
        yield started


def local_size_of_8(mode: str, recipe: str) -> None:
    whole = problem(bias=True, k=IN_FEATURES, parts=4)
    for group, sequence_parallel in ((alone(), False), (world(), False), (world(), True)):
        split = Split(mode, sequence_parallel, group)
        options = {"bias": True, "keep": False, "facade": True, "dtype": torch.bfloat16}
        layer = parallel_linear(split, whole, **options)
        calls = {"eager": layer, "compiled": compiled(layer)} if sequence_parallel else {"eager": layer}
        for how, call in calls.items():
            results = run(layer, call, split, whole, RECIPES[recipe], torch.bfloat16)
            check(results, split, whole, f"{group.size()} ranks, {how}")


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
@pytest.mark.parametrize("mode", ["row", "column"])
def test_case_05_local_size_of_8(mode, recipe, four: Ranks):
    """Row-parallel, a rank has 8 of the 32 in features; column-parallel, 8 of the out features."""
    four(local_size_of_8, mode, recipe)
