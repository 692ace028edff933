"""Bias over sizes, shapes and dtypes."""

import pytest
import torch

import lowp
from lowp import ops
from tests.ops import oracle
from tests.ops.exact import exact, exact_
from tests.ops.pipelines import BOUNDARIES, compiled, same, step

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(-1,), (1, 3, -1), (4, 3, 8, -1)]


def check_bias(size, shape, dtype, bias_dtype, device, call=lambda module: module):
    """One step with exact inputs, against float64."""
    module = ops.Bias(size, device=device, dtype=bias_dtype)
    exact_(module.bias)
    x = exact(*shape[:-1], size, dtype=dtype, device=device, requires_grad=True)
    promoted = torch.promote_types(dtype, bias_dtype)
    dy = exact(*shape[:-1], size, dtype=promoted, device=device)
    y, dx, db = step(call(module), module, x, dy)
    assert y.dtype == promoted
    assert dx.dtype == dtype
    assert db.dtype == bias_dtype
    assert torch.equal(y.double(), x.detach().double() + module.bias.detach().double())
    assert torch.equal(dx.double(), dy.double())
    assert torch.equal(db.double(), dy.double().reshape(-1, size).sum(0))


@pytest.mark.parametrize("bias_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 32])
def test_shapes_and_dtypes(size, shape, dtype, bias_dtype, device):
    check_bias(size, shape, dtype, bias_dtype, device)


@pytest.mark.parametrize("bias_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_compiled(dtype, bias_dtype, device):
    check_bias(7, (4, 3, 8, -1), dtype, bias_dtype, device, compiled)


@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_the_recipe_does_not_change_a_bias_alone(recipe, device):
    module = ops.Bias(32, device=device)
    x, dy = torch.randn(8, 32, device=device, requires_grad=True), torch.randn(8, 32, device=device)
    recipe = oracle.RECIPES[recipe]
    within = lowp.autocast(enabled=recipe is not None, recipe=recipe)
    assert same(step(module, module, x, dy, within=within), step(module, module, x, dy))


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_compiled_equals_eager(boundary, device):
    module = ops.Bias(32, device=device, dtype=torch.bfloat16)
    x = torch.randn(2, 40, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    assert same(step(compiled(module, boundary=boundary), module, x, dy), step(module, module, x, dy))


def test_a_size_that_does_not_fit(device):
    with pytest.raises(ValueError, match=r"Bias: the last axis of the input must have 4 elements, got shape \(4, 3\)"):
        ops.Bias(4, device=device)(torch.zeros(4, 3, device=device))
    with pytest.raises(ValueError, match=r"Bias: size must not be negative, got -1"):
        ops.Bias(-1)


def test_starts_at_zero():
    assert torch.equal(ops.Bias(5).bias, torch.zeros(5))


@pytest.mark.parametrize("frozen", ["input", "bias"])
def test_only_wanted_gradients(frozen, device):
    module = ops.Bias(8, device=device)
    module.bias.requires_grad_(frozen != "bias")
    x = torch.randn(4, 8, device=device, requires_grad=frozen != "input")
    _, dx, db = step(module, module, x)
    assert (dx is None, db is None) == (frozen == "input", frozen == "bias")
