from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lowp.formats import HIGH_PRECISION
from lowp.kernels import norm as kernel
from lowp.kernels import norm_config
from lowp.kernels.amax import PARTIALS, amax, num_partials
from lowp.kernels.materialize import materialize
from lowp.kernels.norm import norm_forward
from lowp.kernels.normalized import normalized
from tests import oracle
from tests.kernels import norm_oracle
from tests.kernels.layouts import LAYOUTS, bits
from tests.kernels.norm_oracle import EPS, KINDS, LENGTHS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CONFIGS = [
    norm_config.Config(block_m, num_warps, programs, keep, prefetch, columns)
    for block_m, num_warps, programs in ((1, 8, 0), (1, 4, 7), (4, 4, 3), (2, 8, 5))
    for keep, prefetch, columns in ((False, False, 0), (True, True, 1), (False, True, block_m))
] + [
    norm_config.LongConfig(block_k, num_warps, programs) for block_k, num_warps, programs in ((256, 4, 0), (512, 8, 7))
]


def draw(M: int, K: int, x_dtype: torch.dtype = BF16, w_dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and bias; each row of its own size."""
    x = torch.randn(M, K) * torch.logspace(-2, 2, M)[:, None] + torch.randn(M, 1)
    return x.to(x_dtype), torch.randn(K).to(w_dtype), torch.randn(K).to(w_dtype)


def check(
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    device: str,
    *,
    kind: str,
    zero_centered: bool = False,
    dtype: torch.dtype | None = None,
    config: norm_config.Config | norm_config.LongConfig | None = None,
) -> None:
    """Compare with float64; amax with that of what was written."""
    x_there, w_there, b_there = (None if t is None else t.to(device) for t in (x, w, b))
    if config is None:
        options = {"kind": kind, "eps": EPS, "zero_centered_gamma": zero_centered, "dtype": dtype, "amax": True}
        y, mean, rstd, amax_P = norm_forward(x_there, w_there, b_there, **options)
    else:
        args = (x_there, w_there, b_there, kind, EPS, zero_centered, dtype or x.dtype, True, True)
        y, mean, rstd, amax_P = kernel._norm_forward_launch(*args, config)
    exact = norm_oracle.norm(x, w, b, kind=kind, zero_centered=zero_centered)
    assert y.dtype == (dtype or x.dtype)
    assert y.is_contiguous()
    assert rstd.dtype == FP32
    norm_oracle.check(y, exact.y, exact.error_y)
    norm_oracle.check(rstd, exact.rstd, exact.error_rstd)
    assert (mean is None) == (kind != "layer")
    if mean is not None:
        assert mean.dtype == FP32
        norm_oracle.check(mean, exact.mean, exact.error_mean)
    assert amax_P.shape == (num_partials(y.device),)
    assert amax_P.max().item() == oracle.amax(y.cpu())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", LENGTHS)
def test_case_28_lengths_of_rows(device, kind, K):
    for dtype in (BF16, FP32):
        check(*draw(3, K, dtype, dtype), device, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("M", [0, 1, 2, 37, 1030])
def test_numbers_of_rows(device, kind, M):
    for K in (21, 96, 1024):
        check(*draw(M, K), device, kind=kind)


@pytest.mark.parametrize("dtype", HIGH_PRECISION)
@pytest.mark.parametrize("x_dtype", HIGH_PRECISION)
@pytest.mark.parametrize("w_dtype", HIGH_PRECISION)
def test_dtypes(device, x_dtype, w_dtype, dtype):
    for kind in KINDS:
        check(*draw(5, 80, x_dtype, w_dtype), device, kind=kind, dtype=dtype)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_case_25_zero_centered_weights_and_no_parameters(device, kind, zero_centered):
    x, w, b = draw(4, 8, FP32, FP32)
    for weight in (w, None):
        for bias in (b, None):
            check(x, weight, bias, device, kind=kind, zero_centered=zero_centered)
    plain, centered = (
        norm_forward(*(t.to(device) for t in (x, v, b)), kind=kind, eps=EPS, zero_centered_gamma=zero)[0]
        for v, zero in ((1.0 + w, False), (w, True))
    )
    assert torch.equal(plain, centered)


@pytest.mark.parametrize("K", [64, 127, 5120, 12_289, 16384, 16385])
@pytest.mark.parametrize("value", [3.0, 0.1, -65504.0, 1e-30, 0.0])
@pytest.mark.parametrize("dtype", HIGH_PRECISION)
def test_case_27_constant_rows(device, K, value, dtype):
    x, w, b = torch.full((4, K), value).to(dtype), *draw(4, K)[1:]
    there = [t.to(device) for t in (x, w, b)]
    y, mean, rstd, _ = norm_forward(*there, kind="layer", eps=EPS)
    assert torch.equal(mean.cpu(), x[:, 0].float())
    assert (rstd == torch.tensor(EPS).sqrt().reciprocal()).all()
    assert torch.equal(y.cpu(), b.to(dtype).expand(4, -1))
    if not (dtype == FP16 and abs(value) > 1e4):  # whose products with the weight are Inf
        for kind in ("rms", "l2"):
            check(x, w, None, device, kind=kind)
    if value == 0:
        assert not norm_forward(there[0], there[1], None, kind="rms", eps=EPS)[0].any()


@pytest.mark.parametrize("K", [127, 4096, 20_000])
@pytest.mark.parametrize("mean", [1e3, 1e5, -1e6])
def test_a_large_mean_takes_nothing_from_the_variance(device, K, mean):
    x = torch.randn(3, K) + mean
    rstd = norm_forward(x.to(device), None, None, kind="layer", eps=EPS)[2]
    exact = (x.double().var(1, correction=0) + EPS).rsqrt()
    offset = torch.finfo(FP32).eps / 2 * abs(mean)  # of the mean, as fp32
    few = norm_oracle.ROUNDINGS * torch.finfo(FP32).eps
    assert ((rstd.cpu().double() / exact - 1).abs() <= few + (2 * offset * exact).square()).all()


@pytest.mark.parametrize("position", [0, 63])
def test_an_outlier(device, position):
    x, w, b = draw(3, 64, FP32, FP32)
    x[:, position] = 1e6
    check(x, w, b, device, kind="layer")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HIGH_PRECISION)
def test_the_bits_of_the_normalized_source(device, kind, dtype):
    for K in (48, 130, 16400):
        for zero_centered in (False, True):
            x, w, b = (t.to(device) for t in draw(9, K, dtype, FP32))
            options = {"kind": kind, "eps": EPS, "zero_centered_gamma": zero_centered}
            y, mean, rstd, amax_P = norm_forward(x, w, b, **options, amax=True)
            source = normalized(x, mean, rstd, w, b, zero_centered=zero_centered)
            assert torch.equal(bits(y), bits(materialize(source)))
            assert amax_P.max().item() == amax(source).max().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [96, 16385])
def test_what_is_not_asked_for_is_none(device, kind, K):
    x, w, b = (t.to(device) for t in draw(5, K))
    y, mean, rstd, amax_P = norm_forward(x, w, b, kind=kind, eps=EPS, amax=True)
    for output in (False, True):
        for with_amax in (False, True):
            result = norm_forward(x, w, b, kind=kind, eps=EPS, output=output, amax=with_amax)
            assert (result[0] is not None, result[3] is not None) == (output, with_amax)
            norm_oracle.check(result[2], rstd.cpu().double(), rstd.cpu() * torch.finfo(FP32).eps)
            assert result[0] is None or result[0].shape == y.shape
            assert result[3] is None or result[3].shape == amax_P.shape
            assert (result[1] is None) == (mean is None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_22_layouts(device, layout, kind):
    x = LAYOUTS[layout](torch.randn(300, 160, dtype=BF16).to(device))
    w = torch.randn(2 * x.shape[1], device=device)[::2]
    for kwargs in ({"output": True}, {"output": True, "amax": True}):
        results = [norm_forward(t, v, v, kind=kind, eps=EPS, **kwargs) for t, v in ((x, w), (x.clone(), w.clone()))]
        copy = norm_forward(x.clone(memory_format=torch.contiguous_format), w, w, kind=kind, eps=EPS, **kwargs)
        for result in results:
            for a, b in zip(result, copy, strict=True):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_case_14_what_is_not_finite_stays_visible(device, kind, value):
    x, w, b = draw(5, 64, FP32, FP32)
    x[1, 7] = value
    y, _, _, amax_P = norm_forward(*(t.to(device) for t in (x, w, b)), kind=kind, eps=EPS, amax=True)
    F = torch.nn.functional
    like = F.layer_norm(x, (64,), w, b, EPS) if kind == "layer" else F.rms_norm(x, (64,), w, EPS) + b
    assert torch.equal(y.isfinite().cpu(), like.isfinite())
    assert amax_P.isfinite().all()
    assert amax_P.max().item() == oracle.amax(y.cpu())


@pytest.mark.parametrize(("dtype", "halfway"), [(FP16, 65520.0), (BF16, 2.0**128 - 2.0**119)])
def test_amax_counts_what_is_finite_after_rounding(device, dtype, halfway):
    x = torch.ones(1, 32, dtype=dtype, device=device)
    below, largest = halfway * (1 - torch.finfo(FP32).eps), torch.finfo(dtype).max
    for bias, expected in ((below, largest), (halfway, 2.0), (math.inf, 2.0), (math.nan, 2.0)):
        b = torch.full((32,), 2.0, device=device)
        b[3] = bias
        y, _, _, amax_P = norm_forward(x, None, b, kind="layer", eps=EPS, amax=True)
        assert amax_P.max().item() == expected == oracle.amax(y.cpu())


def hiding(K: int, columns: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose first standardized elements are about `columns`, with a weight that is large there, and a bias."""
    x = torch.ones(len(columns), K, dtype=FP16)
    x[:, ::2] = -1
    for m, value in enumerate(columns):
        x[m, :2] = value  # beside the others' size of 1
    w, b = torch.full((K,), 0.5), torch.full((K,), 0.25)
    w[:2] = 30000.0
    return x, w, b


@pytest.mark.parametrize("K", [32, 4096, 8192, 16384, 20_000])
@pytest.mark.parametrize("with_bias", [True, False])
def test_an_infinite_value_hides_no_finite_one_of_its_column(device, K, with_bias):
    """Where an amax is found column by column: a program's largest and smallest values may both become infinite."""
    x, w, b = (t.to(device) for t in hiding(K, (4.0, 1.9, -4.0, math.nan) * (500 if device == "cuda" else 1)))
    for kind in ("layer", "rms"):
        for output in (True, False):
            bias = b if with_bias else None
            amax_P = norm_forward(x, w, bias, kind=kind, eps=EPS, dtype=FP16, output=output, amax=True)[3]
            y = norm_forward(x, w, bias, kind=kind, eps=EPS, dtype=FP16)[0]
            assert y.isposinf().any()
            assert y.isneginf().any()
            assert amax_P.max().item() == oracle.amax(y.cpu()) > 30000


@pytest.mark.gpu
@pytest.mark.parametrize("block_m", [1, 2, 4])
@pytest.mark.parametrize("columns", [0, 1, None])
def test_the_only_program_hides_nothing(block_m, columns):
    config = norm_config.Config(block_m, 4, 1, prefetch=True, columns=block_m if columns is None else columns)
    x, w, b = (t.cuda() for t in hiding(1024, (4.0, 1.9, -4.0, math.nan, 4.0)))
    for kind, bias in itertools.product(("layer", "rms"), (b, None)):
        y, _, _, amax_P = kernel._norm_forward_launch(x, w, bias, kind, EPS, False, FP16, True, True, config)
        assert amax_P.max().item() == oracle.amax(y.cpu()) > 30000
        assert amax_P.count_nonzero() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("K", [1, 64, 1024, 4096, 5120, 8192, 16384, 20_000])
@pytest.mark.parametrize("output", [True, False])
def test_every_row_counts_for_amax(K, output):
    """More rows than programs at a time: each program writes one part, and there are so many parts and no more."""
    M = 1300
    for kind in KINDS:
        for row in (0, 511, 512, 520, 1055, 1056, M - 1):
            x = torch.ones(M, K, dtype=BF16, device="cuda")
            x[row] = 0
            x[row, 0] = 1
            y = norm_forward(x, None, None, kind=kind, eps=EPS)[0]
            amax_P = norm_forward(x, None, None, kind=kind, eps=EPS, output=output, amax=True)[3]
            assert amax_P.max() == y.abs().max()


def test_no_program_is_without_a_part():
    for K, itemsize in itertools.product(range(1, 20_000, 511), (2, 4)):
        for centered, output in itertools.product((True, False), repeat=2):
            config = norm_config.config_for(K, itemsize, centered=centered, output=output, amax=True)
            assert 1 <= config.programs <= PARTIALS
            assert (
                config.num_warps
                == norm_config.config_for(K, itemsize, centered=centered, output=output, amax=False).num_warps
            )


def test_no_features(device):
    for kind in KINDS:
        y, _, rstd, amax_P = norm_forward(torch.empty(3, 0, device=device), None, None, kind=kind, eps=EPS, amax=True)
        assert y.shape == (3, 0)
        assert (rstd == torch.tensor(EPS).sqrt().reciprocal()).all()
        assert not amax_P.any()


def test_errors():
    x, w = torch.zeros(3, 4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"norm_forward: kind must be one of .* got 'batch'"):
        norm_forward(x, w, None, kind="batch", eps=EPS)
    with pytest.raises(ValueError, match=r"norm_forward: x_MK must be 2-D, got \(4,\)\. Flatten"):
        norm_forward(w, w, None, kind="rms", eps=EPS)
    with pytest.raises(
        ValueError, match=r"weight_K must have one element for each of the 4 columns of x_MK, got \(3,\)"
    ):
        norm_forward(x, w[:3], None, kind="rms", eps=EPS)
    with pytest.raises(TypeError, match=r"bias_K must be one of .* got torch.float64"):
        norm_forward(x, w, w.double(), kind="layer", eps=EPS)
    with pytest.raises(TypeError, match=r"dtype must be one of .* got torch.int8"):
        norm_forward(x, w, None, kind="rms", eps=EPS, dtype=torch.int8)
    for eps in (-1.0, math.nan):
        with pytest.raises(ValueError, match=r"norm_forward: eps must be >= 0, got"):
            norm_forward(x, w, None, kind="rms", eps=eps)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_configuration(config, kind):
    for K in (21, 768, 1024, 2000):
        for dtype in (BF16, FP32):
            check(*draw(50, K, dtype, dtype), "cuda", kind=kind, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", LENGTHS)
def test_triton_against_the_reference(kind, K):
    for dtype in HIGH_PRECISION:
        x, w, b = draw(40, K, dtype, FP32)
        exact = norm_oracle.norm(x, w, b, kind=kind)
        args = (kind, EPS, False, dtype, True, True)
        expected = kernel._norm_forward_ref(x, w, b, *args)
        actual = kernel._norm_forward_launch(x.cuda(), w.cuda(), b.cuda(), *args)
        step = torch.finfo(dtype).eps * expected[0].double().abs() + torch.finfo(dtype).smallest_normal
        assert ((actual[0].cpu().double() - expected[0].double()).abs() <= step + 2 * exact.error_y).all()
        assert ((actual[2].cpu().double() - expected[2].double()).abs() <= 2 * exact.error_rstd).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**23 + 16, 256), (65537, 32768)])
def test_case_30_more_than_2_31_elements(shape):
    x = torch.zeros(shape, dtype=BF16, device="cuda")
    x[-1, -1] = 1
    for kind in ("layer", "rms"):
        y, _, _, amax_P = norm_forward(x, None, None, kind=kind, eps=EPS, amax=True)
        exact = norm_oracle.norm(x[-1:].cpu(), None, None, kind=kind)
        norm_oracle.check(y[-1:], exact.y, exact.error_y)
        assert amax_P.max() == y[-1, -1]
        assert not y[-2].any()


@pytest.mark.gpu2
def test_case_32_second_device():
    with torch.cuda.device(0):
        check(*draw(10, 96), "cuda:1", kind="layer")
