from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowp.formats import HIGH_PRECISION
from lowp.kernels import amax as kernel
from lowp.kernels.amax import amax, num_partials
from lowp.kernels.sources import PLAIN
from tests import oracle
from tests.kernels.layouts import LAYOUTS, all_values

SHAPES = [(), (0,), (1,), (7,), (8193,), (0, 16), (16, 0), (128, 256), (3, 5, 7), (1, 100_000), (777, 129)]
CONFIGS = [
    kernel.Config(block_r, block_c, num_warps)
    for block_r, block_c in ((1, 1024), (1, 8192), (64, 128), (16, 32))
    for num_warps in (2, 8)
]


def check(x: torch.Tensor, device: str) -> None:
    parts = amax(x.to(device))
    assert parts.shape == (num_partials(parts.device),)
    assert parts.dtype == torch.float32
    assert parts.isfinite().all()
    assert (parts >= 0).all()
    assert parts.max().item() == oracle.amax(x)


@pytest.mark.parametrize("dtype", HIGH_PRECISION)
@pytest.mark.parametrize("shape", SHAPES)
def test_largest_magnitude(device, dtype, shape):
    check(torch.randn(shape, dtype=dtype), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value(device, dtype):
    x = all_values(dtype)
    check(x, device)
    for magnitude in x.flatten()[:: 257 * 3]:
        check(magnitude, device)


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-149, -(2.0**-133), math.inf, -math.inf, math.nan])
def test_case_14_only_finite_elements_count(device, value):
    check(torch.tensor([0.0, value]), device)
    check(torch.tensor([value, value]), device)
    check(torch.tensor([[1.0, value], [value, -2.0]]), device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_22_layouts(device, layout):
    x = LAYOUTS[layout](torch.randn(300, 150, dtype=torch.bfloat16).to(device))
    assert amax(x).max().item() == oracle.amax(x.cpu())


def test_case_22_more_axes(device):
    x = torch.randn(4, 6, 8, 10, device=device)
    for view in (
        x.contiguous(memory_format=torch.channels_last),
        x.permute(3, 0, 2, 1),
        x[:, ::2, :, ::3],
        x[:, :, ::2, ::3].transpose(0, 3),
        x[:, 0],
        x[..., 0],
    ):
        assert amax(view).max().item() == oracle.amax(view.cpu())


@given(data=st.data())
def test_two_axes_cover_the_elements(data):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    x = torch.arange(math.prod(shape)).reshape(shape)
    x = x[tuple(slice(None, None, data.draw(st.integers(1, 3))) for _ in shape)]
    x = x.permute(data.draw(st.permutations(range(x.ndim))))
    x = x.expand(data.draw(st.integers(1, 3)), *x.shape)
    base, (rows, cols, stride_r, stride_c) = kernel._two_axes(x)
    covered = base.as_strided((rows, cols), (stride_r, stride_c), base.storage_offset())
    assert set(covered.flatten().tolist()) == set(x.flatten().tolist())
    assert rows * cols <= x.numel()


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"amax: x must be one of .* got torch.float64"):
        amax(torch.zeros(2, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration(config):
    for x in (torch.randn(1000, 333), torch.randn(1000, 333).t()[:, ::2]):
        assert kernel.amax_launch((x.cuda(),), PLAIN[x.dtype].bundle, config).max().item() == oracle.amax(x)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**23 + 16, 256), (65537, 32768)])
def test_case_30_more_than_2_31_elements(shape):
    x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    x[-1, -1] = -3
    assert amax(x).max().item() == 3
    assert amax(x[:, 1:]).max().item() == 3
    assert amax(x.t()).max().item() == 3


@pytest.mark.gpu2
def test_case_32_second_device():
    x = torch.randn(100, 100)
    with torch.cuda.device(0):
        assert amax(x.to("cuda:1")).max().item() == oracle.amax(x)
