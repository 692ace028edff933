"""Epilogues of the GEMMs: factor and addend, against float64 and against the same steps one by one."""

import pytest
import torch

from lowp.kernels.gemm import gemm, scaled_gemm
from lowp.quantization import quantize_operand
from lowp.quantizers import Float8CurrentScalingQuantizer
from tests.ops.exact import exact

M, N, C = 24, 48, 32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ODD_N = 21  # not a multiple of what cuBLASLt takes
FACTORS = [1.0, -0.5, 2.0]
"""Powers of two: the scaled product is exact."""


def product(kind, a, b, dtype, **options):
    """Either GEMM on the same operands."""
    if kind == "gemm":
        return gemm(a, b, dtype=dtype, **options)
    spec = Float8CurrentScalingQuantizer()
    operands = [quantize_operand(x, spec, row=True, column=False).row for x in (a, b)]
    return scaled_gemm(*operands[0], *operands[1], dtype=dtype, fast_accumulation=False, **options)


@pytest.mark.parametrize("kind", ["gemm", "scaled_gemm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("addend", [False, True])
@pytest.mark.parametrize("columns", [N, ODD_N])
def test_exact_values(kind, dtype, factor, bias, addend, columns, device):
    a, b = exact(M, C, dtype=dtype, device=device), exact(columns, C, dtype=dtype, device=device)
    bias_N = exact(columns, dtype=dtype, device=device) if bias else None
    addend_MN = exact(M, columns, dtype=dtype, device=device) if addend else None
    kept = None if addend_MN is None else addend_MN.clone()
    y = product(kind, a, b, dtype, bias_N=bias_N, addend_MN=addend_MN, factor=factor)
    reference = factor * (a.double() @ b.double().t())
    for summand in (bias_N, addend_MN):
        reference = reference if summand is None else reference + summand.double()
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert torch.equal(y.double(), reference)
    assert kept is None or torch.equal(addend_MN, kept)


@pytest.mark.parametrize("kind", ["gemm", "scaled_gemm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_an_addend_is_at_most_one_step_from_an_add(kind, dtype, bias, device):
    """The sum is rounded once, or both steps are: each rounding is half a step of what is rounded."""
    a, b = torch.randn(M, C, device=device).to(dtype), torch.randn(N, C, device=device).to(dtype)
    bias_N = torch.randn(N, device=device).to(dtype) if bias else None
    addend_MN = torch.randn(M, N, device=device).to(dtype)
    plain = product(kind, a, b, dtype, bias_N=bias_N)
    unfused = plain + addend_MN
    error = (product(kind, a, b, dtype, bias_N=bias_N, addend_MN=addend_MN).double() - unfused.double()).abs()
    rounded = (plain.double().abs() / 2 + unfused.double().abs()) * torch.finfo(dtype).eps
    assert bool((error <= rounded + order_of_sums(a, b)).all())


@pytest.mark.parametrize("kind", ["gemm", "scaled_gemm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_is_at_most_one_step_from_a_multiplication(kind, dtype, device):
    a, b = torch.randn(M, C, device=device).to(dtype), torch.randn(N, C, device=device).to(dtype)
    unfused = product(kind, a, b, dtype) * 0.3
    error = (product(kind, a, b, dtype, factor=0.3).double() - unfused.double()).abs()
    assert bool((error <= 1.5 * unfused.double().abs() * torch.finfo(dtype).eps + order_of_sums(a, b)).all())


def order_of_sums(a, b):
    """How far apart two sums of the same products may be that are in fp32 but in another order; and their scales."""
    return (a.double().abs() @ b.double().abs().t()) * torch.finfo(torch.float32).eps * (C + 4)


@pytest.mark.parametrize("kind", ["gemm", "scaled_gemm"])
@pytest.mark.parametrize("layout", ["transposed", "gaps", "expanded"])
def test_strides_of_the_addend(kind, layout, device):
    a, b = exact(M, C, device=device), exact(N, C, device=device)
    wide = exact(M, 2 * N, device=device)
    addend = {
        "transposed": wide[:, :N].t().contiguous().t(),
        "gaps": wide[:, ::2],
        "expanded": wide[:1, :N].expand(M, N),
    }
    expected = product(kind, a, b, torch.bfloat16, addend_MN=addend[layout].contiguous())
    y = product(kind, a, b, torch.bfloat16, addend_MN=addend[layout])
    assert y.is_contiguous()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("kind", ["gemm", "scaled_gemm"])
def test_a_narrow_addend_on_a_wide_product(kind, device):
    a, b = exact(M, C, device=device), exact(N, C, device=device)
    addend = exact(M, N, device=device)
    y = product(kind, a, b, torch.float32, addend_MN=addend, factor=0.5)
    assert torch.equal(y.double(), 0.5 * (a.double() @ b.double().t()) + addend.double())


@pytest.mark.parametrize("kind", ["gemm", "scaled_gemm"])
@pytest.mark.parametrize("shape", [(0, N, C), (M, 0, C), (M, N, 0)], ids=str)
def test_no_elements(kind, shape, device):
    rows, columns, inner = shape
    a, b = torch.ones(rows, inner, device=device), torch.ones(columns, inner, device=device)
    addend = torch.ones(rows, columns, device=device)
    y = product(kind, a, b, torch.float32, addend_MN=addend, factor=2.0)
    assert torch.equal(y, addend)


@pytest.mark.parametrize("kind", ["gemm", "scaled_gemm"])
def test_an_addend_of_another_shape(kind, device):
    a, b = torch.ones(M, C, device=device), torch.ones(N, C, device=device)
    with pytest.raises(ValueError, match=rf"{kind}: addend_MN must be \[24, 48\], got \(48,\)"):
        product(kind, a, b, torch.float32, addend_MN=torch.ones(N, device=device))
