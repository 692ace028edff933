from __future__ import annotations

import pytest
import torch

from lowp.formats import E4M3, E5M2, HIGH_PRECISION
from lowp.kernels import bias_grad as kernel
from lowp.kernels.amax import amax
from lowp.kernels.bias_grad import bias_grad
from lowp.kernels.cast import _cast_bias_grad_launch, cast, cast_bias_grad
from lowp.kernels.cast_kernel import Config
from lowp.kernels.sources import PLAIN
from lowp.quantizers import Float8CurrentScalingQuantizer
from tests.kernels.layouts import LAYOUTS, bits
from tests.kernels.test_cast import COPIES

SHAPES = [(1, 1), (1, 100), (100, 1), (64, 128), (255, 33), (257, 130), (1000, 96), (20_000, 24)]
CONFIGS = [kernel.Config(block_n, num_warps) for block_n in (32, 128) for num_warps in (2, 4, 8)]


def check(result: torch.Tensor, dy: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare with float64: fp32 sums err by less than M halves of an eps of the summed magnitudes, one each."""
    assert result.dtype == dtype
    assert result.shape == dy.shape[1:]
    exact = dy.double().sum(0)
    bound = dy.double().abs().sum(0) * dy.shape[0] * torch.finfo(torch.float32).eps / 2
    bound += exact.abs() * torch.finfo(dtype).eps
    assert ((result.cpu().double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", HIGH_PRECISION)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_rows(device, dtype, shape):
    dy = torch.randn(shape, dtype=dtype)
    for out in HIGH_PRECISION:
        check(bias_grad(dy.to(device), out), dy, out)
    check(bias_grad(dy.to(device)), dy, dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_exactly_representable_inputs(device, shape):
    dy = torch.randint(-8, 9, shape).bfloat16()
    assert torch.equal(bias_grad(dy.to(device), torch.float32).cpu().double(), dy.double().sum(0))


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("dtype", HIGH_PRECISION)
@pytest.mark.parametrize("shape", SHAPES)
def test_cast_gives_the_same_bits(device, copies, dtype, shape):
    row, column = COPIES[copies]
    dy = torch.randn(shape, dtype=dtype).to(device)
    for fmt, out in ((E5M2, dtype), (E4M3, torch.float32)):
        quantizer = Float8CurrentScalingQuantizer(fmt=fmt)
        *fused, fused_bias_grad = cast_bias_grad(dy, amax(dy), quantizer, row=row, column=column, dtype=out)
        assert torch.equal(bits(fused_bias_grad), bits(bias_grad(dy, out)))
        for got, expected in zip(fused, cast(dy, amax(dy), quantizer, row=row, column=column), strict=True):
            assert (got is None) == (expected is None)
            assert got is None or torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_22_layouts(device, layout):
    dy = LAYOUTS[layout](torch.randn(300, 150, dtype=torch.bfloat16).to(device))
    expected = bits(bias_grad(dy.contiguous()))
    assert torch.equal(bits(bias_grad(dy)), expected)
    fused = cast_bias_grad(dy, amax(dy), Float8CurrentScalingQuantizer(), row=True, column=True)
    assert torch.equal(bits(fused[3]), expected)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty(device, shape):
    dy = torch.empty(shape, dtype=torch.bfloat16, device=device)
    assert torch.equal(bias_grad(dy).cpu(), torch.zeros(shape[1], dtype=torch.bfloat16))


def test_case_42_only_the_columns_that_hold_it_become_non_finite(device):
    dy = torch.randn(300, 64, device=device)
    dy[7, 3], dy[8, 5] = torch.inf, torch.nan
    for result in (bias_grad(dy), cast_bias_grad(dy, amax(dy), Float8CurrentScalingQuantizer())[3]):
        assert (~result.isfinite()).nonzero().flatten().tolist() == [3, 5]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_configuration_gives_the_same_bits(config, dtype):
    for dy in (torch.randn(1000, 208, dtype=dtype).cuda(), torch.randn(333, 700, dtype=dtype).cuda().t()):
        expected = bits(bias_grad(dy, torch.float32))
        assert torch.equal(bits(kernel._bias_grad_launch((dy,), PLAIN[dtype].bundle, torch.float32, config)), expected)
        fused_config = Config(kernel.GROUP, *config)
        quantizer = Float8CurrentScalingQuantizer().bundle
        fused = _cast_bias_grad_launch(
            (dy,), PLAIN[dtype].bundle, amax(dy), quantizer, True, True, torch.float32, fused_config
        )
        assert torch.equal(bits(fused[3]), expected)


@pytest.mark.gpu2
def test_case_32_second_device():
    dy = torch.randn(100, 100)
    with torch.cuda.device(0):
        check(bias_grad(dy.to("cuda:1")), dy, torch.float32)


def test_errors():
    with pytest.raises(ValueError, match=r"bias_grad: dy_MN must be 2-D, got \(3,\)\. Flatten"):
        bias_grad(torch.zeros(3))
    with pytest.raises(TypeError, match=r"bias_grad: dtype must be one of .* got torch.int32"):
        bias_grad(torch.zeros(3, 3), torch.int32)
    with pytest.raises(TypeError, match=r"bias_grad: dy_MN must be one of .* got torch.int64"):
        bias_grad(torch.zeros(3, 3, dtype=torch.int64), torch.float32)
