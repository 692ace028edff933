"""How many graphs there are: none for new values, one for each mode and recipe, one for all sizes."""

import pytest
import torch

import lowp
from lowp import ops
from tests.ops import oracle
from tests.ops.graphs import Graphs
from tests.ops.pipelines import BOUNDARIES, linear_bias, same, step

DTYPE = torch.bfloat16


def batch(device, *leading):
    return torch.randn(*(leading or (30,)), 32, device=device, dtype=DTYPE, requires_grad=True)


def at(boundary, function):
    def call(x):
        with lowp.compile_boundary(boundary):
            return function(x)

    return call


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_parameter_updates_and_new_inputs(boundary, recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    graphs = Graphs()
    run = at(boundary, graphs.compile(module))
    for _ in range(4):
        x = batch(device)
        assert same(step(run, module, x), step(module, module, x))
        optimizer.step()
    assert (graphs.frames, len(graphs.forward), len(graphs.backward)) == (1, 1, 1)


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_a_graph_for_each_mode(recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    graphs = Graphs()
    run = graphs.compile(module)
    x = batch(device)
    expected = step(module, module, x)
    for _ in range(2):
        assert same(step(run, module, x), expected)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(run(x), expected[0])
    assert same(step(run, module, x), expected)
    assert graphs.frames <= 3


def test_a_recipe_switched_back_finds_its_graph(device):
    module = linear_bias(device=device)
    graphs = Graphs()
    run = graphs.compile(module)
    x = batch(device)
    changed, equal = (lowp.recipe.Float8CurrentScaling(amax_epsilon=8.0) for _ in range(2))
    for recipe in (oracle.HYBRID, changed, oracle.HYBRID, equal, None, None):
        with lowp.autocast(enabled=recipe is not None, recipe=recipe):
            expected = step(module, module, x)
            assert same(step(run, module, x), expected)
    assert graphs.frames == 3, "one for each value of the recipe, not for each object"


def test_the_override_is_switched_at_run_time(device):
    module = linear_bias(device=device)
    graphs = Graphs()
    run = graphs.compile(module)
    x = batch(device)
    for name in ("hybrid", "high_precision", "dequantized", "hybrid", "dequantized", "high_precision"):
        with lowp.autocast(recipe=oracle.RECIPES[name]):
            assert same(step(run, module, x), step(module, module, x)), name
    assert graphs.frames == 3


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 doesn't notice it, for nn.Linear either")
def test_a_frozen_parameter_takes_a_graph_and_goes_back(device):
    module = linear_bias(device=device, recipe=oracle.HYBRID)
    graphs = Graphs()
    run = graphs.compile(module)
    x = batch(device)
    for frozen in (False, True, False, True):
        module[0].weight.requires_grad_(not frozen)
        results = step(run, module, x)
        assert (results[2] is None) == frozen
        assert same(results, step(module, module, x))
    assert graphs.frames == 2


@pytest.mark.parametrize("recipe", ["none", "hybrid", "dequantized"])
@pytest.mark.parametrize("how", ["dynamic=True", "mark_dynamic"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_one_graph_for_all_sizes(boundary, how, recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    graphs = Graphs()
    run = at(boundary, graphs.compile(module, dynamic=True if how == "dynamic=True" else None))
    for rows in (30, 2, 77, 16, 3):
        x = batch(device, rows)
        expected = step(module, module, x)
        if how == "mark_dynamic":
            torch._dynamo.mark_dynamic(x, 0)
            y = run(x)
            assert torch.equal(y, expected[0])
            for parameter in module.parameters():
                parameter.grad = None
            y.backward(torch.ones_like(y))
            assert same([x.grad, *[p.grad for p in module.parameters()]], expected[1:])
        else:
            assert same(step(run, module, x), expected)
    assert graphs.frames == 1
    if how == "dynamic=True":
        for count, rows in ((2, 1), (3, 0), (3, 1), (3, 40)):
            x = batch(device, rows)
            assert same(step(run, module, x), step(module, module, x))
            assert graphs.frames == count


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_automatic_dynamic_shapes_take_one_graph_more(recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    graphs = Graphs()
    run = graphs.compile(module)
    for count, rows in ((1, 30), (1, 30), (2, 31), (2, 7), (2, 64)):
        x = batch(device, rows)
        assert same(step(run, module, x), step(module, module, x))
        assert graphs.frames == count


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_dynamic_leading_dimensions(recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    graphs = Graphs()
    run = graphs.compile(module, dynamic=True)
    for leading in ((2, 5), (4, 3), (7, 11)):
        x = batch(device, *leading)
        assert same(step(run, module, x), step(module, module, x))
    assert graphs.frames == 1


def test_dynamic_sizes_with_main_grad(device):
    module = linear_bias(device=device, recipe=oracle.HYBRID, accumulate_into_main_grad=True)
    graphs = Graphs()
    run = graphs.compile(module, dynamic=True)
    for rows in (30, 2, 77):
        x = batch(device, rows)
        results = []
        for call in (run, module):
            module[0].weight.main_grad = torch.zeros(48, 32, device=device)
            results.append([*step(call, module, x), module[0].weight.main_grad])
        assert same(*results)
    assert graphs.frames == 1


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_inductor_with_dynamic_sizes(recipe, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
    run = torch.compile(module, fullgraph=True, dynamic=True)
    for rows in (30, 17, 1):
        x = batch(device, rows)
        assert same(step(run, module, x), step(module, module, x))


def test_many_layers_share_what_they_compile(device):
    """The pipelines of a model in one graph, and a new shape of the model's input one graph more."""
    model = torch.nn.Sequential(*[linear_bias(32, 32, device=device, recipe=oracle.HYBRID) for _ in range(4)])
    graphs = Graphs()
    run = graphs.compile(model)
    for rows in (16, 16, 24):
        x = batch(device, rows)
        assert same(step(run, model, x), step(model, model, x))
    assert graphs.frames == 2


def test_a_compiled_operation_alone(device):
    module = ops.BasicLinear(32, 48, device=device, dtype=DTYPE)
    graphs = Graphs()
    run = graphs.compile(module)
    x = batch(device)
    with lowp.autocast():
        assert same(step(run, module, x), step(module, module, x))
    assert graphs.frames == 1


def test_autocast_inside_the_compiled_region(device):
    module = linear_bias(device=device)

    def function(x):
        with lowp.autocast(recipe=oracle.E4M3):
            quantized = module(x)
        return quantized + module(x)

    graphs = Graphs()
    x = batch(device)
    assert same(step(graphs.compile(function), module, x), step(function, module, x))
    assert lowp.current_recipe() is None
