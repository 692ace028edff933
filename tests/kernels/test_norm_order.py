"""Norms add rows up in one order, whatever else a launch reads or writes: offline, in the code for Hopper.

Codes made of statistics that a launch without y gave must be those of the y that another launch wrote.
"""

import itertools
import re

import pytest
import torch

pytest.importorskip("triton")  # not on every platform

from lowp.kernels import norm, norm_config
from tests.kernels.norm_builds import forward

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAUNCHES = [(True, False), (False, True), (True, True)]
"""Whether y is written, and whether an amax is found."""
_REDUCTION = re.compile(r'"tt\.reduce"\(.*?\}\) : \(tensor<([^#]*), #(\w+)>\)', re.DOTALL)


def sums(K, layer, x):
    """How many there are: of squares, of elements, and of deviations where the mean is corrected."""
    if not layer:
        return 1
    return 2 if K <= norm_config.LONGEST and norm.sums_of_equals_are_exact(x, K) else 3


def orders(K, layer, x, **options):
    """Features, dtype and layout of what is summed over rows; an amax is taken later, and in any order."""
    code = forward(K, layer, x=x, **options).compile().asm["ttgir"]
    layouts = dict(re.findall(r"^#(\w+) = (.*)$", code, re.MULTILINE))
    found = [(shape.partition("x")[2], layouts[name]) for shape, name in _REDUCTION.findall(code)]
    return found[: sums(K, layer, x)]


@pytest.mark.parametrize("x", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("K", "layer"),
    [
        (4, True),
        (21, False),
        (32, True),
        (768, False),
        *itertools.product((4096, 8192, 16384), (True, False)),
        (65536, True),
    ],
)
def test_sums_over_rows(K, layer, x):
    expected = orders(K, layer, output=True, amax=False, x=x, y=x, w=x)
    assert len(expected) == sums(K, layer, x)
    for (output, amax), (y, w) in itertools.product(LAUNCHES, [(BF16, FP32), (FP32, FP16)]):
        assert orders(K, layer, output=output, amax=amax, x=x, y=y, w=w) == expected
    assert orders(K, layer, output=False, amax=False, x=x) == expected
