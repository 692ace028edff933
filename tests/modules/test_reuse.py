"""How often modules compile, and what one module used in many ways gives."""

import copy
from contextlib import nullcontext

import pytest
import torch

import lowp
from tests.modules.cases import CASES, batch, build, call_of, same, step
from tests.modules.pairwise import sampled
from tests.ops import oracle
from tests.ops.graphs import Graphs

WAYS = ["none", "hybrid"]
over_modules = pytest.mark.parametrize("name", CASES)


def at(boundary, function):
    def call(x):
        with lowp.compile_boundary(boundary):
            return function(x)

    return call


@over_modules
@pytest.mark.parametrize("recipe", WAYS)
def test_parameter_updates_and_new_inputs(recipe, name, device):
    module = build(name, device, recipe=oracle.RECIPES[recipe])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    graphs = Graphs()
    run = graphs.compile(module)
    for _ in range(3):
        x = batch(30, device=device)
        assert same(step(run, module, x), step(module, module, x))
        optimizer.step()
    assert (graphs.frames, len(graphs.forward), len(graphs.backward)) == (1, 1, 1)


@over_modules
@pytest.mark.parametrize("recipe", WAYS)
def test_training_and_inference_in_both_orders(recipe, name, device):
    module = build(name, device, recipe=oracle.RECIPES[recipe])
    graphs = Graphs()
    run = graphs.compile(module)
    x = batch(30, device=device)
    expected = step(module, module, x)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert torch.equal(run(x), expected["y0"])
            assert torch.equal(module(x), expected["y0"])
        assert same(step(run, module, x), expected)
    assert graphs.frames <= 3


@over_modules
def test_a_recipe_switched_back_finds_its_graph(name, device):
    module = build(name, device)
    graphs = Graphs()
    run = graphs.compile(module)
    x = batch(30, device=device)
    for recipe in ("hybrid", "high_precision", "dequantized", "none", "hybrid", "dequantized", "high_precision"):
        context = {"enabled": recipe != "none", "recipe": oracle.RECIPES[recipe]}
        with lowp.autocast(**context):
            assert same(step(run, module, x), step(module, module, x)), recipe
    assert graphs.frames == 4


@sampled(boundary=["operation", "kernel"], recipe=WAYS, name=list(CASES))
def test_one_graph_for_all_sizes(boundary, recipe, name, device):
    module = build(name, device, recipe=oracle.RECIPES[recipe])
    graphs = Graphs()
    run = at(boundary, graphs.compile(module, dynamic=True))
    for frames, rows in ((1, 30), (1, 2), (1, 77), (2, 1), (3, 0), (3, 16)):
        x = batch(rows, device=device)
        assert same(step(run, module, x), step(module, module, x))
        assert graphs.frames == frames


@over_modules
def test_automatic_dynamic_shapes_take_one_graph_more(name, device):
    module = build(name, device, recipe=oracle.HYBRID)
    graphs = Graphs()
    run = graphs.compile(module)
    for frames, rows in ((1, 30), (2, 31), (2, 7), (2, 64)):
        x = batch(rows, device=device)
        assert same(step(run, module, x), step(module, module, x))
        assert graphs.frames == frames


@over_modules
def test_mark_dynamic(name, device):
    module = build(name, device, recipe=oracle.HYBRID)
    graphs = Graphs()
    run = graphs.compile(module)
    for rows in (30, 2, 77):
        x = batch(rows, device=device)
        expected = step(module, module, x)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(run(x), expected["y0"])
    assert graphs.frames == 1


@over_modules
@pytest.mark.parametrize("leading", [(1,), (3,), (30,), (2, 3, 5), (128,)])
@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_any_number_of_tokens(recipe, leading, name, device):
    """Equal to the same rows as one matrix."""
    module = build(name, device, recipe=oracle.RECIPES[recipe])
    x = batch(*leading, device=device)
    results, flat = step(module, module, x), step(module, module, x.detach().flatten(0, -2).requires_grad_())
    for key, result in results.items():
        assert torch.equal(result, flat[key].reshape(result.shape)), key


# ---- one module used several times


@over_modules
@pytest.mark.parametrize("compiled", [False, True])
def test_called_several_times_in_one_forward(compiled, name, device):
    module = build(name, device, dtype=torch.float32, recipe=oracle.HYBRID)
    xs = [batch(8, device=device, dtype=torch.float32) for _ in range(3)]

    def forward(a, b, c):
        return module(a) + module(b) * module(c)

    run = torch.compile(forward, backend="aot_eager", fullgraph=True) if compiled else forward
    dy = torch.randn(8, CASES[name].out_features, device=device)
    module.zero_grad()
    run(*xs).backward(dy)
    found = [p.grad.clone() for p in module.parameters()]
    ys = [module(x).detach() for x in xs]
    module.zero_grad()
    for x, factor in zip(xs, (1.0, ys[2], ys[1]), strict=True):
        module(x).backward(dy * factor)
    for grad, parameter in zip(found, module.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-5, atol=1e-5 * grad.abs().max().item())


@over_modules
@pytest.mark.parametrize("compiled", [False, True])
def test_backward_twice_through_a_kept_graph(compiled, name, device):
    module = build(name, device, recipe=oracle.HYBRID)
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    x = batch(8, device=device)
    y = run(x)
    y.sum().backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    y.sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(module.parameters(), first, strict=True))
    with pytest.raises(RuntimeError, match="a second time"):
        y.sum().backward()


@over_modules
def test_a_weight_shared_by_two_modules(name, device):
    first, second = (build(name, device, dtype=torch.float32, recipe=oracle.HYBRID) for _ in range(2))
    for key, parameter in dict(first.named_parameters()).items():
        setattr(second, key, parameter)
    x, dy = batch(8, device=device, dtype=torch.float32), torch.randn(8, CASES[name].out_features, device=device)
    (first(x) + 2 * second(x)).backward(dy)
    shared = [p.grad.clone() for p in first.parameters()]
    alone = copy.deepcopy(first)
    alone.zero_grad()
    alone(x).backward(dy)
    alone(x).backward(2 * dy)
    for grad, parameter in zip(shared, alone.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-5, atol=1e-5 * grad.abs().max().item())


@over_modules
def test_the_third_step_of_a_shape_is_as_the_first(name, device):
    """From the third step on passes are replayed."""
    module = build(name, device, recipe=oracle.HYBRID)
    for leading in ((8,), (3, 5)):
        x = batch(*leading, device=device)
        first = step(module, module, x)
        for _ in range(3):
            assert same(step(module, module, x), first)
        other = batch(*leading, device=device)
        fresh = copy.deepcopy(module)
        assert same(step(module, module, other), step(fresh, fresh, other))


@pytest.mark.parametrize("call", ["eager", "aot_eager"])
@pytest.mark.parametrize("recipe", ["hybrid", "dequantized", "high_precision"])
@over_modules
def test_backward_needs_no_recipe(name, recipe, call, device):
    """What it needs to know was said in forward: another recipe in force, or none, changes nothing."""
    module = build(name, device)
    run = call_of(module, call)
    x = batch(30, device=device)
    results = []
    for around_backward in (nullcontext(), lowp.autocast(enabled=False), lowp.autocast(recipe=oracle.E4M3)):
        x.grad = None
        module.zero_grad()
        with lowp.autocast(recipe=oracle.RECIPES[recipe]):
            y = run(x)
        with around_backward:
            y.backward(torch.ones_like(y))
        results.append([x.grad, *[parameter.grad for parameter in module.parameters()]])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
