from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lowp.formats import HIGH_PRECISION
from lowp.kernels import norm_grad as kernel
from lowp.kernels.norm import norm_forward
from lowp.kernels.norm_grad import Config, LongConfig, Plan, norm_backward
from tests.kernels import norm_oracle
from tests.kernels.layouts import LAYOUTS, bits
from tests.kernels.norm_oracle import EPS, KINDS, LENGTHS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS = [
    Config(block_m, 1024, warps, 7, keep, stages)
    for block_m, warps in ((1, 4), (4, 8))
    for keep, stages in ((False, 1), (True, 2))
]
COLUMNS = [
    Config(block_m, block_k, 4, 5, False, stages) for block_m, block_k in ((1, 128), (16, 32)) for stages in (1, 2)
]
PLANS = [Plan(rows, None) for rows in ROWS]
PLANS += [
    Plan(rows, columns)
    for rows, columns in zip((LongConfig(256, 4), LongConfig(512, 8), *ROWS[:2]), COLUMNS, strict=True)
]


def draw(M: int, K: int, dtype: torch.dtype = BF16, w_dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    """Output gradient, input, weight and residual; each row of its own size."""
    x = torch.randn(M, K) * torch.logspace(-2, 2, M)[:, None] + torch.randn(M, 1)
    return torch.randn(M, K).to(dtype), x.to(dtype), torch.randn(K).to(w_dtype), torch.randn(M, K).to(dtype)


def run(
    dy: Tensor, x: Tensor, w: Tensor | None, device: str, kind: str, *, zero_centered: bool = False, **options: Any
) -> tuple[Tensor | None, ...]:
    """The gradients, from the statistics of a forward pass."""
    dy, x, w = (None if t is None else t.to(device) for t in (dy, x, w))
    _, mean, rstd, _ = norm_forward(x, None, None, kind=kind, eps=EPS, output=False)
    options = {"grad_weight": w is not None, "bias_dtype": x.dtype} | options
    plan = options.pop("plan", None)
    if plan is None:
        return norm_backward(dy, x, mean, rstd, w, kind=kind, zero_centered_gamma=zero_centered, **options)
    residual = options.get("residual_MK")
    args = (kind, zero_centered, True, options["grad_weight"], options["bias_dtype"], plan)
    return kernel._norm_backward_launch(dy, x, mean, rstd, w, residual, *args)


def check(
    dy: Tensor, x: Tensor, w: Tensor | None, device: str, kind: str, *, zero_centered: bool = False, **options: Any
) -> None:
    """Compare with autograd in float64."""
    dx, dweight, dbias = run(dy, x, w, device, kind, zero_centered=zero_centered, **options)
    exact = norm_oracle.norm(x, w, None, dy, kind=kind, zero_centered=zero_centered)
    assert dx.dtype == x.dtype
    assert dx.is_contiguous()
    norm_oracle.check(dx, exact.dx, exact.error_dx)
    if w is not None:
        assert dweight.dtype == w.dtype
        norm_oracle.check(dweight, exact.dweight, exact.error_dweight)
    norm_oracle.check(dbias, exact.dbias, exact.error_dbias)


def same(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """The same bits, None at the same places."""
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", LENGTHS)
def test_case_28_lengths_of_rows(device, kind, K):
    for dtype in (BF16, FP32):
        dy, x, w, _ = draw(3, K, dtype, dtype)
        check(dy, x, w, device, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("M", [0, 1, 2, 37, 1030])
def test_numbers_of_rows(device, kind, M):
    for K in (21, 96, 1024):
        dy, x, w, _ = draw(M, K, FP32, FP32)
        check(dy, x, w, device, kind)


@pytest.mark.parametrize("x_dtype", HIGH_PRECISION)
@pytest.mark.parametrize("dy_dtype", HIGH_PRECISION)
@pytest.mark.parametrize("w_dtype", HIGH_PRECISION)
def test_dtypes(device, x_dtype, dy_dtype, w_dtype):
    for kind in KINDS:
        dy, x, w, _ = draw(5, 80, x_dtype, w_dtype)
        check(dy.to(dy_dtype), x, w, device, kind, bias_dtype=w_dtype)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_case_25_zero_centered_weights_and_no_weight(device, kind, zero_centered):
    dy, x, w, _ = draw(4, 8, FP32, FP32)
    check(dy, x, w, device, kind, zero_centered=zero_centered)
    check(dy, x, None, device, kind)
    plain = run(dy, x, 1.0 + w, device, kind)
    same(run(dy, x, w, device, kind, zero_centered=True), plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [96, 12288, 16385])
def test_only_what_is_asked_for(device, kind, K):
    dy, x, w, _ = draw(6, K, FP32, FP32)
    exact = norm_oracle.norm(x, w, None, dy, kind=kind)
    for grad_input in (False, True):
        for grad_weight in (False, True):
            for bias_dtype in (None, BF16):
                wanted = {"grad_input": grad_input, "grad_weight": grad_weight, "bias_dtype": bias_dtype}
                dx, dweight, dbias = run(dy, x, w, device, kind, **wanted)
                assert [dx is None, dweight is None, dbias is None] == [not value for value in wanted.values()]
                if dx is not None:
                    norm_oracle.check(dx, exact.dx, exact.error_dx)
                if dweight is not None:
                    norm_oracle.check(dweight, exact.dweight, exact.error_dweight)
                if dbias is not None:
                    norm_oracle.check(dbias, exact.dbias, exact.error_dbias)


@pytest.mark.parametrize("K", [96, 130, 768, 12288, 16400])
@pytest.mark.parametrize("dtype", HIGH_PRECISION)
def test_the_bits_of_the_gradient_and_a_separate_addition(device, dtype, K):
    for kind in KINDS:
        dy, x, w, residual = draw(40, K, dtype, FP32) if K < 1000 else draw(4, K, dtype, FP32)
        residual = residual.to(device)
        for sums in (True, False):
            options = {"grad_weight": sums, "bias_dtype": FP32 if sums else None}
            dx, *rest = run(dy, x, w, device, kind, **options)
            fused, *same_rest = run(dy, x, w, device, kind, residual_MK=residual, **options)
            same([fused, *same_rest], [dx + residual, *rest])


def test_case_24_the_output_gradient_is_left_as_it_is(device):
    dy, x, w, residual = (t.to(device) for t in draw(40, 96))
    before = [t.clone() for t in (dy, x, w, residual)]
    first = run(dy, x, w, device, "rms", residual_MK=dy)
    same(run(dy, x, w, device, "rms", residual_MK=dy), first)
    same(run(dy, x, w, device, "rms", residual_MK=dy.clone()), first)
    same((dy, x, w, residual), before)


@pytest.mark.parametrize("value", [3.0, 0.1, 0.0])
@pytest.mark.parametrize("K", [64, 127, 16385])
def test_case_27_constant_rows(device, K, value):
    for dtype in (BF16, FP32):
        dy, x, w, _ = draw(4, K, dtype, FP32)
        x.fill_(value)
        check(dy, x, w, device, "layer")
        for kind in ("rms", "l2"):
            check(dy, x, w, device, kind)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_case_22_layouts(device, layout, kind):
    make = LAYOUTS[layout]
    dy, x, residual = (make(torch.randn(300, 160, dtype=BF16).to(device)) for _ in range(3))
    w = torch.randn(2 * x.shape[1], device=device)[::2]
    copies = [t.clone(memory_format=torch.contiguous_format) for t in (dy, x, w, residual)]
    for options in ({}, {"grad_weight": False, "bias_dtype": None}, {"grad_input": False}):
        result = run(dy, x, w, device, kind, residual_MK=residual, **options)
        same(result, run(*copies[:3], device, kind, residual_MK=copies[3], **options))
        same(result, run(dy, *copies[1:3], device, kind, residual_MK=residual, **options))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_case_42_only_what_it_reaches_becomes_non_finite(device, value):
    for kind in KINDS:
        dy, x, w, _ = draw(70, 48, FP32, FP32)
        dy[7, 3] = value
        dx, dweight, dbias = run(dy, x, w, device, kind)
        assert (~dx.isfinite()).any(1).nonzero().flatten().tolist() == [7]
        for gradient in (dweight, dbias):
            assert (~gradient.isfinite()).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_representable_inputs(device, kind):
    """Multiples of a half, and statistics that are powers of two: every sum is exact."""
    dy, x = (torch.randint(-7, 8, (300, 64)) * 0.5 for _ in range(2))
    mean = torch.randint(-3, 4, (300,)) * 0.5 if kind == "layer" else None
    rstd = 2.0 ** torch.randint(-2, 3, (300,))
    w = torch.randint(-7, 8, (64,)) * 0.5
    there = [None if t is None else t.to(device) for t in (dy, x, mean, rstd, w)]
    dx, dweight, dbias = norm_backward(*there, kind=kind, grad_weight=True, bias_dtype=FP32)
    xhat = (x if mean is None else x - mean[:, None]) * rstd[:, None]
    share = 1.0 if kind == "l2" else 1 / 64
    g = dy * w
    expected = g - xhat * (g.double() * xhat).sum(1, keepdim=True).mul(share).float()
    if mean is not None:
        expected -= g.sum(1, keepdim=True) * share
    same((dx, dweight, dbias), (expected * rstd[:, None], (dy.double() * xhat).sum(0).float(), dy.sum(0)))


def test_zero_rows(device):
    dx, dweight, dbias = run(torch.empty(0, 24), torch.empty(0, 24), torch.ones(24), device, "layer")
    assert dx.shape == (0, 24)
    assert not dweight.any()
    assert not dbias.any()


def test_errors():
    x, w, m = torch.zeros(3, 4), torch.zeros(4), torch.zeros(3)
    for args, options, match in (
        ((x, x, None, m, w), {"kind": "layer"}, 'mean_M must be given for kind "layer", and for no other'),
        ((x, x, m, m, w), {"kind": "rms"}, "mean_M must be given"),
        ((x[:2], x, None, m, w), {"kind": "rms"}, r"dy_MK must have the shape \(3, 4\) of x_MK, got \(2, 4\)"),
        ((x, x, None, m[:2], w), {"kind": "rms"}, r"rstd_M must have one element for each row of x_MK, got \(2,\)"),
        ((x, x, None, m, w[:1]), {"kind": "rms"}, r"weight_K must have one element for each of the 4 columns"),
        (
            (x, x, None, m, None),
            {"kind": "rms", "grad_weight": True},
            "grad_weight needs weight_K. Ask for no gradient",
        ),
        ((x, x, None, m, w), {"kind": "rms", "residual_MK": x[:1]}, r"residual_MK must have the shape \(3, 4\)"),
        ((x, x, None, m, w), {"kind": "instance"}, "kind must be one of"),
    ):
        with pytest.raises(ValueError, match=f"norm_backward: {match}"):
            norm_backward(*args, **options)
    for args, options, match in (
        ((x.double(), x, None, m, w), {}, "dy_MK must be one of .* got torch.float64"),
        ((x, x, None, m.half(), w), {}, "rstd_M must be fp32, got torch.float16"),
        (
            (x, x, None, m, w),
            {"residual_MK": x.half()},
            "residual_MK must be torch.float32, as x_MK, got torch.float16",
        ),
        ((x, x, None, m, w), {"bias_dtype": torch.int8}, "bias_dtype must be one of .* got torch.int8"),
    ):
        with pytest.raises(TypeError, match=f"norm_backward: {match}"):
            norm_backward(*args, kind="rms", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_configuration(plan, kind):
    for K in (768, 1001, 1024):
        for dtype in (BF16, FP32):
            dy, x, w, residual = draw(50, K, dtype, dtype)
            check(dy, x, w, "cuda", kind, plan=plan)
            dx, *_ = run(dy, x, w, "cuda", kind, plan=plan)
            fused, *_ = run(dy, x, w, "cuda", kind, plan=plan, residual_MK=residual.cuda())
            same([fused], [dx + residual.cuda()])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", LENGTHS)
def test_triton_against_the_reference(kind, K):
    for dtype in HIGH_PRECISION:
        dy, x, w, _ = draw(40, K, dtype, FP32)
        exact = norm_oracle.norm(x, w, None, dy, kind=kind)
        _, mean, rstd, _ = norm_forward(x, None, None, kind=kind, eps=EPS, output=False)
        args = (kind, False, True, True, FP32)
        tensors = (dy, x, mean, rstd, w, None)
        expected = kernel._norm_backward_ref(*tensors, *args)
        actual = kernel._norm_backward_launch(*[None if t is None else t.cuda() for t in tensors], *args)
        errors = (exact.error_dx, exact.error_dweight, exact.error_dbias)
        for a, b, error in zip(actual, expected, errors, strict=True):
            step = torch.finfo(b.dtype).eps * b.double().abs() + torch.finfo(b.dtype).smallest_normal
            assert ((a.cpu().double() - b.double()).abs() <= step + 2 * error).all()


@pytest.mark.gpu
@pytest.mark.parametrize("K", [96, 4096, 8192, 16384])
def test_the_order_of_sums_is_fixed(K):
    dy, x, w, _ = (t.cuda() for t in draw(3000, K))
    for kind in ("layer", "rms"):
        first = run(dy, x, w, "cuda", kind)
        for _ in range(5):
            same(run(dy, x, w, "cuda", kind), first)


@pytest.mark.gpu
def test_case_30_more_than_2_31_elements():
    x = torch.zeros(2**23 + 16, 256, dtype=BF16, device="cuda")
    x[-1, -1] = 1
    dx, dweight, dbias = run(x, x, torch.ones(256, device="cuda"), "cuda", "layer")
    exact = norm_oracle.norm(x[-1:].cpu(), None, None, x[-1:].cpu(), kind="layer")
    norm_oracle.check(dx[-1:], exact.dx, exact.error_dx)
    norm_oracle.check(dweight, exact.dweight, exact.error_dweight)
    assert dbias[-1] == 1
    assert not dx[-2].any()


@pytest.mark.gpu2
def test_case_32_second_device():
    dy, x, w, _ = draw(10, 96)
    with torch.cuda.device(0):
        check(dy, x, w, "cuda:1", "layer")
