"""Under torch.autocast: the output has its dtype, gradients have those of their tensors, eager equals compiled."""

import pytest
import torch

from lowp import ops
from tests.ops import oracle
from tests.ops.pipelines import BOUNDARIES, compiled, linear_bias, same, step

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def autocast(device, dtype):
    return torch.autocast(device, dtype=dtype)


@pytest.mark.parametrize("recipe", ["none", "hybrid", "high_precision", "dequantized"])
@pytest.mark.parametrize("input_dtype", [FP32, BF16])
@pytest.mark.parametrize("weight_dtype", [FP32, BF16])
@pytest.mark.parametrize("autocast_dtype", [BF16, FP16])
def test_dtypes(autocast_dtype, weight_dtype, input_dtype, recipe, device):
    module = linear_bias(device=device, dtype=weight_dtype, recipe=oracle.RECIPES[recipe])
    x = torch.randn(8, 32, device=device, dtype=input_dtype, requires_grad=True)
    linear_alone = ops.Sequential(module[0], recipe=module.recipe)
    with autocast(device, autocast_dtype):
        assert linear_alone(x).dtype == autocast_dtype
    y, dx, dw, db = step(module, module, x, within=autocast(device, autocast_dtype))
    assert y.dtype == torch.promote_types(autocast_dtype, weight_dtype), "a bias promotes as in torch"
    assert dx.dtype == input_dtype
    assert dw.dtype == db.dtype == weight_dtype


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize(
    ("autocast_dtype", "weight_dtype", "input_dtype", "recipe"),
    [
        (BF16, FP32, FP32, "hybrid"),
        (BF16, FP32, FP32, "none"),
        (FP16, FP32, FP32, "dequantized"),
        (FP16, BF16, FP32, "hybrid"),
        (BF16, BF16, FP32, "high_precision"),
        (FP16, FP32, BF16, "none"),
    ],
)
def test_compiled_equals_eager(autocast_dtype, weight_dtype, input_dtype, recipe, boundary, device):
    module = linear_bias(device=device, dtype=weight_dtype, recipe=oracle.RECIPES[recipe])
    x = torch.randn(3, 8, 32, device=device, dtype=input_dtype, requires_grad=True)
    expected = step(module, module, x, within=autocast(device, autocast_dtype))

    def inside(x):
        with autocast(device, autocast_dtype):
            return module(x)

    assert same(step(compiled(inside, boundary=boundary), module, x), expected)
    run = compiled(module, boundary=boundary)
    assert same(step(run, module, x, within=autocast(device, autocast_dtype)), expected)


@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_the_numbers_are_those_of_a_cast_input(recipe, device):
    """Under autocast(bf16) an fp32 input is rounded to bf16 first, and so is the gradient."""
    module = ops.BasicLinear(32, 48, device=device, dtype=BF16)
    pipeline = ops.Sequential(module, recipe=oracle.RECIPES[recipe])
    x = torch.randn(8, 32, device=device, requires_grad=True)
    y, dx, dw = step(pipeline, module, x, within=autocast(device, BF16))
    y_cast, dx_cast, dw_cast = step(pipeline, module, x.detach().bfloat16().requires_grad_())
    assert torch.equal(y, y_cast)
    assert torch.equal(dw, dw_cast)
    assert torch.equal(dx.bfloat16(), dx_cast)


@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_backward_inside_autocast_is_the_same(recipe, device):
    module = linear_bias(device=device, dtype=FP32, recipe=oracle.RECIPES[recipe])
    x = torch.randn(8, 32, device=device, requires_grad=True)
    expected = step(module, module, x, within=autocast(device, BF16))
    for call in (module, compiled(module)):
        with autocast(device, BF16):
            assert same(step(call, module, x), expected)


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_disabled_autocast_inside(recipe, device):
    module = linear_bias(device=device, dtype=FP32, recipe=oracle.RECIPES[recipe])
    x = torch.randn(8, 32, device=device, requires_grad=True)

    def inside(x):
        with torch.autocast(device, enabled=False):
            return module(x)

    expected = step(module, module, x)
    assert same(step(inside, module, x, within=autocast(device, BF16)), expected)


def test_gradient_scaling(device):
    """A scaled loss gives scaled gradients, bit for bit where the scale is a power of two."""
    module = linear_bias(device=device, dtype=FP32, recipe=oracle.HYBRID)
    x = torch.randn(8, 32, device=device, requires_grad=True)
    dy = torch.randn(8, 48, device=device)
    plain = step(module, module, x, dy, within=autocast(device, FP16))
    scaled = step(module, module, x, dy * 1024, within=autocast(device, FP16))
    for result, reference in zip(scaled[2:], plain[2:], strict=True):
        assert torch.equal(result, reference * 1024)
