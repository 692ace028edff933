"""Quantize: between operations, at the edges, and beside operations that read quantized operands."""

import pytest
import torch

import lowp
from lowp import ops
from tests.ops import oracle
from tests.ops.graphs import CountOps
from tests.ops.pipelines import BOUNDARIES, compiled, linear_bias, same, step

DTYPE = torch.bfloat16
DIRECTIONS = [(True, False), (False, True), (True, True), (False, False)]


def rounded(x, recipe, role):
    """`x` quantized and dequantized, in its own dtype."""
    return oracle.dequantized(x.detach(), recipe, role).float().to(x.dtype)


@pytest.mark.parametrize("recipe", [name for name in oracle.RECIPES if name != "none"])
@pytest.mark.parametrize(("forward", "backward"), DIRECTIONS)
def test_alone(forward, backward, recipe, device):
    recipe = oracle.RECIPES[recipe]
    module = ops.Sequential(ops.Quantize(forward, backward), recipe=recipe)
    x = torch.randn(2, 9, 33, device=device, dtype=DTYPE, requires_grad=True)
    dy = torch.randn_like(x)
    y, dx = step(module, module, x, dy)
    assert torch.equal(y, rounded(x, recipe, "input") if forward else x)
    assert torch.equal(dx, rounded(dy, recipe, "grad_output") if backward else dy)


@pytest.mark.parametrize("call", ["eager", "aot_eager"])
@pytest.mark.parametrize(("forward", "backward"), DIRECTIONS)
def test_does_nothing_without_a_recipe(forward, backward, call, device):
    """The output is the input, or a copy: never an alias that backward takes for a fresh tensor."""
    module = ops.Quantize(forward, backward)
    x = torch.randn(4, 32, device=device, requires_grad=True)
    dy = torch.randn_like(x)
    y, dx = step(module if call == "eager" else compiled(module), module, x, dy)
    assert torch.equal(y, x)
    assert torch.equal(dx, dy)


@pytest.mark.parametrize("call", ["eager", "aot_eager"])
def test_only_the_gradient_quantized_leaves_the_output_safe_to_change(call, device):
    module = ops.Sequential(ops.Quantize(False, True), recipe=oracle.HYBRID)
    x = torch.randn(4, 32, device=device, dtype=DTYPE, requires_grad=True)
    kept = x.detach().clone()

    def changed(x):
        y = module(x)
        y += 1
        return y

    y = (changed if call == "eager" else compiled(changed))(x)
    y.sum().backward()
    assert torch.equal(x, kept)
    assert torch.equal(y, kept + 1)


@pytest.mark.parametrize("recipe", ["hybrid", "e4m3", "high_precision", "dequantized"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("position", ["before", "after", "between"])
def test_beside_linears(position, boundary, recipe, device):
    """Handing quantized operands on changes no bits where the operand would be quantized by the same spec anyway."""
    recipe = oracle.RECIPES[recipe]
    first, second = linear_bias(32, 16, device=device), linear_bias(16, 24, device=device)
    quantize = ops.Quantize(forward=True, backward=True)
    before = {"before": [quantize], "after": [], "between": []}[position]
    between = [quantize] if position == "between" else []
    after = [quantize] if position == "after" else []
    pipeline = ops.Sequential(*before, *first, *between, *second, *after, recipe=recipe)
    x = torch.randn(2, 15, 32, device=device, dtype=DTYPE, requires_grad=True)
    dy = torch.randn(2, 15, 24, device=device, dtype=DTYPE)
    results = step(pipeline, pipeline, x, dy)
    assert same(step(compiled(pipeline, boundary=boundary), pipeline, x, dy), results)
    plain = ops.Sequential(*first, *second, recipe=recipe)
    y, *_ = step(plain, plain, x, dy)
    assert torch.equal(results[0], rounded(y, recipe, "input") if after else y)


def test_a_linear_after_it_quantizes_nothing_again(device):
    pipeline = ops.Sequential(ops.Quantize(), ops.BasicLinear(32, 16, device=device, dtype=DTYPE), recipe=oracle.HYBRID)
    x = torch.randn(8, 32, device=device, dtype=DTYPE)
    with CountOps() as ops_of:
        pipeline(x)
    assert ops_of.counts["cast"] == 2, "the input once and the weight"
    assert ops_of.counts["dequantize"] == 0


@pytest.mark.parametrize("wanted_w", [True, False])
def test_wgrad_reads_the_copy_that_was_handed_over(wanted_w, device):
    linear = ops.BasicLinear(32, 16, device=device, dtype=DTYPE)
    linear.weight.requires_grad_(wanted_w)
    x = torch.randn(8, 32, device=device, dtype=DTYPE, requires_grad=True)
    dy = torch.randn(8, 16, device=device, dtype=DTYPE)
    plain, handed = (ops.Sequential(*o, recipe=oracle.HYBRID) for o in ([linear], [ops.Quantize(), linear]))
    assert same(step(handed, handed, x, dy), step(plain, plain, x, dy))


def test_in_force_recipe(device):
    module = ops.Quantize()
    x = torch.randn(4, 32, device=device)
    with lowp.autocast(recipe=oracle.E4M3):
        assert torch.equal(module(x), rounded(x, oracle.E4M3, "input"))
