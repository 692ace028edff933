"""Outputs and requested gradients against float64, with inputs for which every step is exact."""

import itertools

import pytest
import torch

from lowp import ops
from tests.ops import oracle
from tests.ops.exact import exact, exact_, same_as_double
from tests.ops.pipelines import BOUNDARIES, compiled, linear_bias, same, step

REQUESTS = [r for r in itertools.product([True, False], repeat=3) if any(r)]
"""Which of the gradients of input, weight and bias are wanted."""


def exact_linear_bias(device, dtype, recipe=None, K=32, N=48):
    module = linear_bias(K, N, device=device, dtype=dtype, recipe=recipe)
    exact_(module[0].weight)
    exact_(module[1].bias, power=1)
    return module


def check_against_double(results, module, x, dy, requests):
    """Compare y, dx, dw, db with float64; a gradient not asked for is None."""
    x64 = x.detach().double().requires_grad_()
    weight, bias = (p.detach().double().requires_grad_() for p in module.parameters())
    y64 = torch.nn.functional.linear(x64, weight, bias)
    y64.backward(dy.double())
    assert same_as_double(results[0], y64.detach())
    for name, wanted, result, reference in zip(
        ("dx", "dw", "db"), requests, results[1:], (x64.grad, weight.grad, bias.grad), strict=True
    ):
        if wanted:
            assert same_as_double(result, reference), name
            assert result.dtype == x.dtype, name
        else:
            assert result is None, name


def requested(module, x, requests):
    wanted_x, wanted_w, wanted_b = requests
    module[0].weight.requires_grad_(wanted_w)
    module[1].bias.requires_grad_(wanted_b)
    return x.detach().requires_grad_(wanted_x)


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("requests", REQUESTS, ids=str)
def test_eager(requests, dtype, recipe, device):
    module = exact_linear_bias(device, dtype, oracle.RECIPES[recipe])
    x = requested(module, exact(2, 15, 32, dtype=dtype, device=device), requests)
    dy = exact(2, 15, 48, dtype=dtype, device=device, power=-2)
    check_against_double(step(module, module, x, dy), module, x, dy, requests)


COMPILED = [(requests, "hybrid") for requests in REQUESTS]
COMPILED += [(REQUESTS[index], recipe) for index, recipe in enumerate(oracle.RECIPES) if recipe != "hybrid"]


@pytest.mark.usefixtures("either_amax")
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize(("requests", "recipe"), COMPILED, ids=str)
def test_compiled(requests, recipe, boundary, device):
    dtype = torch.bfloat16
    module = exact_linear_bias(device, dtype, oracle.RECIPES[recipe])
    call = compiled(module, boundary=boundary)
    x = requested(module, exact(2, 15, 32, dtype=dtype, device=device), requests)
    dy = exact(2, 15, 48, dtype=dtype, device=device, power=-2)
    check_against_double(step(call, module, x, dy), module, x, dy, requests)
    for _ in range(3):
        x = torch.randn_like(x).requires_grad_(x.requires_grad)
        dy = torch.randn_like(dy)
        for parameter in module.parameters():
            parameter.data.normal_()
        assert same(step(call, module, x, dy), step(module, module, x, dy))


@pytest.mark.full
@pytest.mark.parametrize("recipe", oracle.SETTINGS)
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("requests", REQUESTS, ids=str)
@pytest.mark.parametrize("shape", [(32,), (30, 32), (2, 3, 5, 32)], ids=str)
def test_compiled_full(shape, requests, dtype, boundary, recipe):
    module = linear_bias(32, 48, dtype=dtype, recipe=oracle.SETTINGS[recipe])
    call = compiled(module, boundary=boundary)
    x = requested(module, torch.randn(shape, dtype=dtype), requests)
    dy = torch.randn(*shape[:-1], 48, dtype=dtype)
    assert same(step(call, module, x, dy), step(module, module, x, dy))


@pytest.mark.parametrize(
    ("boundary", "recipe"),
    [("operation", "hybrid"), ("kernel", "hybrid"), ("operation", "none"), ("kernel", "dequantized")],
)
def test_inductor(boundary, recipe, device):
    dtype = torch.bfloat16
    module = exact_linear_bias(device, dtype, oracle.RECIPES[recipe])
    call = compiled(module, "inductor", boundary)
    requests = (True, True, True)
    x = requested(module, exact(2, 15, 32, dtype=dtype, device=device), requests)
    dy = exact(2, 15, 48, dtype=dtype, device=device, power=-2)
    check_against_double(step(call, module, x, dy), module, x, dy, requests)
    for _ in range(3):
        x, dy = torch.randn_like(x).requires_grad_(), torch.randn_like(dy)
        assert same(step(call, module, x, dy), step(module, module, x, dy))


@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_a_pipeline_equals_its_operations_one_by_one(recipe, device):
    """With biases of zero: elsewhere the fused sum is rounded once, not twice."""
    dtype = torch.bfloat16
    module = ops.Sequential(
        *linear_bias(32, 16, device=device, dtype=dtype),
        *linear_bias(16, 48, device=device, dtype=dtype),
        recipe=oracle.RECIPES[recipe],
    )
    for bias in (module[1].bias, module[3].bias):
        torch.nn.init.zeros_(bias)
    x = torch.randn(30, 32, device=device).to(dtype).requires_grad_()
    dy = torch.randn(30, 48, device=device).to(dtype)
    alone = torch.nn.Sequential(*[ops.Sequential(op, recipe=oracle.RECIPES[recipe]) for op in module])
    assert same(step(module, module, x, dy), step(alone, module, x, dy))
