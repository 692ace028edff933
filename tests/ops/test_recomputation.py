"""Checkpointing and offloading: what is computed or fetched again is what was computed first."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowp
from lowp import ops
from tests.ops import oracle
from tests.ops.pipelines import compiled, linear_bias, same, step

DTYPE = torch.bfloat16
WAYS = ["none", "hybrid", "dequantized"]


def batch(device, rows=30, requires_grad=True):
    return torch.randn(rows, 32, device=device, dtype=DTYPE, requires_grad=requires_grad)


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("scope", ["argument", "context"])
def test_checkpoint(scope, use_reentrant, recipe, device):
    recipe = oracle.RECIPES[recipe]
    module = linear_bias(device=device)
    x = batch(device)
    if scope == "argument":
        module = ops.Sequential(*module, recipe=recipe)
        expected = step(module, module, x)
        assert same(step(lambda x: checkpoint(module, x, use_reentrant=use_reentrant), module, x), expected)
        return
    with lowp.autocast(enabled=recipe is not None, recipe=recipe):  # around the backward too
        expected = step(module, module, x)
        assert same(step(lambda x: checkpoint(module, x, use_reentrant=use_reentrant), module, x), expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recipe", WAYS)
def test_autocast_inside_a_checkpoint(recipe, use_reentrant, device):
    module = linear_bias(device=device)
    recipe = oracle.RECIPES[recipe]

    def block(x):
        with lowp.autocast(enabled=recipe is not None, recipe=recipe):
            return module(x)

    x = batch(device)
    run = partial(checkpoint, block, use_reentrant=use_reentrant)
    assert same(step(run, module, x), step(block, module, x))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_case_39_recomputation_outside_autocast_uses_the_recipe_of_its_forward(use_reentrant, device):
    module = linear_bias(device=device)
    x = batch(device)
    expected = step(module, module, x, within=lowp.autocast())
    results = step(lambda x: checkpoint(module, x, use_reentrant=use_reentrant), module, x, within=lowp.autocast())
    assert same(results, expected)


def test_a_pipeline_that_first_runs_in_backward_needs_a_recipe(device):
    module = linear_bias(device=device)
    x = batch(device).requires_grad_()
    x.register_hook(module)
    with pytest.raises(RuntimeError, match="needs a recipe in force"):
        x.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_case_39_a_compiled_recomputation_never_changes_the_recipe_silently(use_reentrant, device):
    """Its graph is chosen by the recipe in force, and none is."""
    module = linear_bias(device=device)
    run = compiled(module)
    x = batch(device)
    with pytest.raises(Exception, match="compiled inside backward needs a recipe in force"):
        step(lambda x: checkpoint(run, x, use_reentrant=use_reentrant), module, x, within=lowp.autocast())


@pytest.mark.parametrize("recipe", ["none", "hybrid", "high_precision", "dequantized"])
@pytest.mark.parametrize("boundary", ["operation", "kernel"])
def test_checkpoint_inside_compile(boundary, recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    x = batch(device)
    run = compiled(lambda x: checkpoint(module, x, use_reentrant=False), boundary=boundary)
    assert same(step(run, module, x), step(module, module, x))


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_around_compile(use_reentrant, recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    x = batch(device)
    run = compiled(module)
    with lowp.autocast(enabled=False):  # around the backward too: it says that no recipe is meant
        results = step(lambda x: checkpoint(run, x, use_reentrant=use_reentrant), module, x)
    assert same(results, step(module, module, x))


def keep_gemms(ctx, op, *args, **kwargs):
    """Save what GEMMs give, recompute the rest."""
    keep = "gemm" in str(op) or str(op).startswith("lowp.ForwardLinearBias")
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
@pytest.mark.parametrize("call", ["eager", "operation", "kernel"])
def test_selective_checkpoint(call, recipe, device):
    module = ops.Sequential(*linear_bias(device=device), *linear_bias(48, 32, device=device))
    module.recipe = oracle.RECIPES[recipe]
    x = batch(device)

    def block(x):
        context_fn = partial(create_selective_checkpoint_contexts, keep_gemms)
        return checkpoint(module, x, use_reentrant=False, context_fn=context_fn)

    run = block if call == "eager" else compiled(block, boundary=call)
    assert same(step(run, module, x), step(module, module, x))


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("pin", [False])
def test_save_on_cpu(pin, recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    x = batch(device)
    within = torch.autograd.graph.save_on_cpu(pin_memory=pin)
    assert same(step(module, module, x, within=within), step(module, module, x))


@pytest.mark.parametrize("frozen", [False, True])
def test_save_on_cpu_around_compile(frozen, device):
    module = linear_bias(device=device, recipe=oracle.HYBRID)
    module[0].weight.requires_grad_(not frozen)
    x = batch(device)
    within = torch.autograd.graph.save_on_cpu()
    assert same(step(compiled(module), module, x, within=within), step(module, module, x))
