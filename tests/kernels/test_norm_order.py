"""Norms add rows up in one order, whatever else a launch reads or writes: offline, in the code for Hopper.

Codes made of statistics that a launch without y gave must be those of the y that another launch wrote.
"""

import itertools
import re

import pytest
import torch

pytest.importorskip("triton")  # not on every platform

from tests.kernels.norm_builds import forward

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_REDUCTION = re.compile(r'"tt\.reduce"\(.*?\}\) : \(tensor<([^#]*), #(\w+)>\)', re.DOTALL)


def orders(K, layer, **options):
    """Shape, dtype and layout of what is summed over rows; an amax is taken later, and in any order."""
    code = forward(K, layer, **options).compile().asm["ttgir"]
    layouts = dict(re.findall(r"^#(\w+) = (.*)$", code, re.MULTILINE))
    found = [(shape, layouts[name]) for shape, name in _REDUCTION.findall(code)]
    return found[: 3 if layer else 1]


@pytest.mark.parametrize("x", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("K", "layer"),
    [(4, True), (21, False), (32, True), (768, False), (4096, True), (16384, False), (65536, True)],
)
def test_sums_over_rows(K, layer, x):
    expected = orders(K, layer, output=True, amax=False, x=x, y=x, w=x)
    assert len(expected) == (3 if layer else 1)
    for (output, amax), (y, w) in itertools.product([(True, False), (False, True)], [(BF16, FP32), (FP32, FP16)]):
        assert orders(K, layer, output=output, amax=amax, x=x, y=y, w=w) == expected
    assert orders(K, layer, output=False, amax=False, x=x) == expected
