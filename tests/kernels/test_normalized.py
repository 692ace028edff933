from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from lowp.formats import HIGH_PRECISION
from lowp.kernels.materialize import materialize
from lowp.kernels.normalized import normalize_ref, normalized
from tests.kernels.layouts import bits

M, K = 37, 65
EPS = torch.finfo(torch.float32).eps
KINDS = list(itertools.product([False, True], repeat=4))
"""Mean, weight, bias, zero-centered."""


def operands(mean: bool, weight: bool, bias: bool, dtype: torch.dtype = torch.float32):
    x, w, b = torch.randn(M, K) * 3 + 1, torch.randn(K), torch.randn(K)
    means = x.mean(1) if mean else None
    rstd = (x.var(1, correction=0) if mean else x.square().mean(1)).rsqrt()
    return x.to(dtype), means, rstd, w.to(dtype) if weight else None, b.to(dtype) if bias else None


@pytest.mark.parametrize(("mean", "weight", "bias", "zero_centered"), KINDS)
def test_against_torch(device, mean, weight, bias, zero_centered):
    """Four roundings of terms that are as large as 1 + |x - mean|, times the weight."""
    x, means, rstd, w, b = operands(mean, weight, bias)
    factor = None if w is None else w.double() + zero_centered
    if mean:
        exact = F.layer_norm(x.double(), (K,), factor, None if b is None else b.double(), eps=0.0)
    else:
        exact = F.rms_norm(x.double(), (K,), factor, eps=0.0) + (0 if b is None else b.double())
    arguments = [None if t is None else t.to(device) for t in (x, means, rstd, w, b)]
    actual = materialize(normalized(*arguments, zero_centered=zero_centered)).cpu()
    size = (x.double() * rstd.double()[:, None]).abs() * (1 if factor is None else factor.abs())
    size += 1 if b is None else b.double().abs()
    assert ((actual - exact).abs() <= 8 * EPS * (size + 4)).all()


@pytest.mark.parametrize("dtype", HIGH_PRECISION)
@pytest.mark.parametrize("out", HIGH_PRECISION)
def test_rounded_once(device, dtype, out):
    x, means, rstd, w, b = operands(True, True, True, dtype)
    expected = normalize_ref(x.float(), means, rstd, w.float(), b.float(), True).to(out)
    arguments = [t.to(device) for t in (x, means, rstd, w, b)]
    assert torch.equal(bits(materialize(normalized(*arguments, zero_centered=True, dtype=out))), bits(expected))


@pytest.mark.gpu
@pytest.mark.parametrize(("mean", "weight", "bias", "zero_centered"), KINDS)
def test_cuda_is_cpu_bit_for_bit(mean, weight, bias, zero_centered):
    """Nothing but IEEE additions and products, rounded one by one."""
    arguments = operands(mean, weight, bias)
    expected = materialize(normalized(*arguments, zero_centered=zero_centered))
    on_gpu = [None if t is None else t.cuda() for t in arguments]
    assert torch.equal(bits(materialize(normalized(*on_gpu, zero_centered=zero_centered))), bits(expected))


def test_case_27_constant_rows(device):
    x = torch.full((4, 64), 3.0, device=device)
    means, rstd = torch.full((4,), 3.0, device=device), torch.full((4,), 1e5**0.5, device=device)
    bias = torch.randn(64, device=device)
    assert torch.equal(materialize(normalized(x, means, rstd, None, bias)), bias.expand(4, -1))
    assert not materialize(normalized(torch.zeros_like(x), None, rstd, bias)).any()
