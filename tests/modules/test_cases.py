"""Faults that users of libraries of this kind met, as small inputs. Each test is named after the case's number.

Cases 60, 63 and 88 are in `test_conventions.py`; 86 is in `tests/distributed`.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowp
from tests.modules.cases import CASES, K, N, batch, build, call_of, same, step
from tests.ops import oracle
from tests.ops.graphs import Graphs

DTYPE = torch.bfloat16
over_modules = pytest.mark.parametrize("name", CASES)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["hybrid", "dequantized"])
def test_case_37_checkpointing_changes_no_gradient(recipe, use_reentrant, device):
    torch.manual_seed(0)
    module = lowp.Linear(768, 768, device=device, dtype=DTYPE, recipe=oracle.RECIPES[recipe])
    for _ in range(2):
        x = batch(16, features=768, device=device)
        run = partial(checkpoint, module, use_reentrant=use_reentrant)
        assert same(step(run, module, x), step(module, module, x))


@over_modules
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["hybrid", "high_precision", "dequantized"])
def test_case_39_recomputation_uses_the_recipe_of_its_forward(recipe, use_reentrant, name, device):
    """Forward inside autocast, backward outside."""
    module = build(name, device)
    x = batch(30, device=device)
    within = lowp.autocast(recipe=oracle.RECIPES[recipe])
    expected = step(module, module, x, within=within)
    run = partial(checkpoint, module, use_reentrant=use_reentrant)
    assert same(step(run, module, x, within=within), expected)


@over_modules
@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_case_41_a_compiled_checkpoint_recomputes_the_same_bytes(recipe, name, device):
    module, other = (build(name, device, recipe=oracle.RECIPES[recipe]) for _ in range(2))
    other.load_state_dict(module.state_dict())
    run = call_of(lambda x: checkpoint(module, x, use_reentrant=False), "aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (module, other)]
    for _ in range(20):
        x = batch(30, device=device)
        results, expected = step(run, module, x), step(other, other, x)
        assert all(result.isfinite().all() for result in results.values())
        assert same(results, expected)
        for optimizer in optimizers:
            optimizer.step()


@over_modules
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_case_59_export(recipe, strict, name, device):
    module = build(name, device, recipe=oracle.RECIPES[recipe]).eval()
    x = batch(2, device=device, requires_grad=False)
    with torch.no_grad():
        program = torch.export.export(module, (x,), strict=strict)
        assert torch.equal(program.module()(x), module(x))


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_case_61_state_dicts_are_those_of_torch_nn(recipe, device):
    """After a step under the recipe too."""
    module = lowp.Linear(K, N, device=device, recipe=oracle.RECIPES[recipe])
    step(module, module, batch(8, device=device, dtype=torch.float32))
    reference = nn.Linear(K, N, device=device)
    assert list(module.state_dict()) == ["weight", "bias"]
    reference.load_state_dict(module.state_dict(), strict=True)
    module.load_state_dict(reference.state_dict(), strict=True)
    module.load_state_dict(reference.state_dict(), strict=True, assign=True)
    assert torch.equal(module.weight, reference.weight)


@over_modules
def test_case_67_a_number_of_rows_that_depends_on_data(name, device):
    """Rows of one expert among many."""
    module = build(name, device, recipe=oracle.HYBRID)
    graphs = Graphs()

    def expert(x, chosen):
        return module(x[chosen.nonzero().squeeze(-1)])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = graphs.compile(expert, dynamic=True)
        for rows in range(18):
            x = batch(18, device=device)
            chosen = torch.arange(18, device=device) < rows
            results = step(lambda x, chosen=chosen: run(x, chosen), module, x)
            assert same(results, step(lambda x, chosen=chosen: expert(x, chosen), module, x))
    assert graphs.frames == 1


@over_modules
def test_case_67_rows_chosen_outside_of_the_graph(name, device):
    module = build(name, device, recipe=oracle.HYBRID)
    graphs = Graphs()
    run = graphs.compile(module, dynamic=True)
    for rows in range(18):
        x = batch(18, device=device).detach()[torch.arange(18, device=device) < rows].requires_grad_()
        assert same(step(run, module, x), step(module, module, x))
    assert graphs.frames <= 3
