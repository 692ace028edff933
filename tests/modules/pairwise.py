"""Combinations of options: all of them, or few in which every pair of values of two options occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

Combination = dict[str, Any]


def product(axes: Mapping[str, Sequence[Any]]) -> list[Combination]:
    """Every combination."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[Combination]:
    """Few combinations with every pair: each one drawn to cover as many missing pairs as the best of some do."""
    draw = random.Random(0)
    names = list(axes)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]}
    chosen: list[Combination] = []
    while missing:
        best: Combination = {}
        most = -1
        for _ in range(30):
            seed = draw.choice(sorted(missing, key=repr))
            candidate = {name: draw.choice(axes[name]) for name in names} | dict(seed)
            covered = len(_pairs(candidate) & missing)
            if covered > most:
                best, most = candidate, covered
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def sampled(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test: few combinations with every pair by default, the others in the full run."""
    chosen = pairwise(axes)
    parameters = []
    for combination in product(axes):
        marks = () if combination in chosen else pytest.mark.full
        parameters.append(pytest.param(*combination.values(), marks=marks, id=label(combination)))
    return pytest.mark.parametrize(list(axes), parameters)


def _pairs(combination: Combination) -> set[Any]:
    return set(itertools.combinations(combination.items(), 2))


def label(combination: Combination) -> str:
    """For a test's name."""
    return "-".join(str(value) for value in combination.values())
