"""ops.Sequential as a list, as a module, and with plain modules inside."""

import copy
from collections import OrderedDict

import pytest
import torch

import lowp
from lowp import ops
from tests.ops import oracle
from tests.ops.pipelines import BOUNDARIES, compiled, linear_bias, same, step


def linear():
    return ops.BasicLinear(8, 8)


def bias():
    return ops.Bias(8)


def forward_of(pipeline):
    """The forward lines of the plan."""
    lines = [line.split(maxsplit=1) for line in pipeline.plan.splitlines()]
    return [rest for kind, rest in lines if kind in ("forward", "module") and not rest.startswith("without")]


FUSED = "ForwardLinearBias[0..1]"


def test_append_and_extend():
    pipeline = ops.Sequential(linear())
    assert forward_of(pipeline) == ["BasicLinear[0]"]
    assert pipeline.append(bias()) is pipeline
    assert forward_of(pipeline) == [FUSED]
    pipeline.extend([linear(), bias()])
    assert forward_of(pipeline) == [f"{FUSED} -> ForwardLinearBias[2..3]"]


def test_insert():
    pipeline = ops.Sequential(bias())
    pipeline.insert(0, linear())
    assert forward_of(pipeline) == [FUSED]
    pipeline.insert(1, torch.nn.ReLU())
    assert forward_of(pipeline) == ["BasicLinear[0]", "ReLU", "Bias[0]"]


def test_pop_and_delete():
    pipeline = ops.Sequential(linear(), torch.nn.ReLU(), bias(), bias())
    pipeline.pop(1)
    assert forward_of(pipeline) == [f"{FUSED} -> Bias[2]"]
    del pipeline[-1]
    assert forward_of(pipeline) == [FUSED]
    del pipeline[0:2]
    assert forward_of(pipeline) == []


def test_set_item():
    pipeline = ops.Sequential(linear(), torch.nn.ReLU())
    pipeline[1] = bias()
    assert forward_of(pipeline) == [FUSED]
    pipeline[1] = torch.nn.ReLU()
    assert forward_of(pipeline) == ["BasicLinear[0]", "ReLU"]


def test_in_place_addition_and_multiplication():
    pipeline = ops.Sequential(linear())
    pipeline += ops.Sequential(bias())
    assert forward_of(pipeline) == [FUSED]
    pipeline *= 2
    assert forward_of(pipeline) == [f"{FUSED} -> ForwardLinearBias[2..3]"]


def test_addition_and_multiplication_keep_the_recipe():
    pipeline = ops.Sequential(linear(), recipe=oracle.E4M3)
    for result in (pipeline + ops.Sequential(bias()), pipeline * 2):
        assert type(result) is ops.Sequential
        assert result.recipe == oracle.E4M3
    assert forward_of(pipeline + ops.Sequential(bias())) == [FUSED]
    assert forward_of(pipeline) == ["BasicLinear[0]"], "the operands are left alone"


def test_slices_keep_the_recipe():
    pipeline = ops.Sequential(linear(), bias(), bias(), recipe=oracle.E4M3)
    part = pipeline[:2]
    assert forward_of(part) == [FUSED]
    assert part[0] is pipeline[0]
    assert part.recipe == oracle.E4M3


def test_add_module_and_attributes():
    pipeline = ops.Sequential(linear())
    pipeline.add_module("last", bias())
    assert forward_of(pipeline) == [FUSED]
    pipeline.register_module("relu", torch.nn.ReLU())
    assert forward_of(pipeline) == [FUSED, "ReLU"]
    setattr(pipeline, "0", torch.nn.Identity())  # as conversion tools replace modules
    assert forward_of(pipeline) == ["Identity", "Bias[0]", "ReLU"]
    del pipeline.relu
    assert forward_of(pipeline) == ["Identity", "Bias[0]"]


def test_a_replaced_operation_is_the_one_that_runs():
    pipeline = ops.Sequential(linear(), bias())
    torch.nn.init.ones_(pipeline[1].bias)
    setattr(pipeline, "1", torch.nn.Identity())
    x = torch.randn(4, 8)
    assert torch.equal(pipeline(x), pipeline[0](x))


def test_ordered_dict_and_names():
    pipeline = ops.Sequential(OrderedDict(fc=linear(), shift=bias()))
    assert list(pipeline.state_dict()) == ["fc.weight", "shift.bias"]
    assert forward_of(pipeline) == [FUSED]


def test_nested_pipelines_run(device):
    inner = linear_bias(8, 8, device=device)
    outer = ops.Sequential(inner, ops.BasicLinear(8, 8, device=device, dtype=torch.bfloat16))
    x = torch.randn(4, 8, device=device, dtype=torch.bfloat16)
    assert torch.equal(outer(x), outer[1](inner(x)))


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
@pytest.mark.parametrize("call", ["eager", "aot_eager"])
def test_plain_modules_between(call, recipe, device):
    pipeline = ops.Sequential(*linear_bias(32, 16, device=device), torch.nn.ReLU(), *linear_bias(16, 8, device=device))
    pipeline.recipe = oracle.RECIPES[recipe]
    x = torch.randn(20, 32, device=device, dtype=torch.bfloat16, requires_grad=True)

    def by_hand(x):
        with lowp.autocast(enabled=pipeline.recipe is not None, recipe=pipeline.recipe):
            hidden = ops.Sequential(*pipeline[:2])(x).relu()
            return ops.Sequential(*pipeline[3:])(hidden)

    run = pipeline if call == "eager" else compiled(pipeline)
    assert same(step(run, pipeline, x), step(by_hand, pipeline, x))


def test_an_empty_pipeline_returns_its_input():
    x = torch.randn(3)
    assert ops.Sequential()(x) is x


def test_the_recipe_argument_wins_over_the_one_in_force(device):
    pipeline = linear_bias(device=device, recipe=oracle.E4M3)
    x = torch.randn(8, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    alone = step(pipeline, pipeline, x)
    with lowp.autocast(recipe=oracle.HIGH_PRECISION_BACKWARD):
        assert same(step(pipeline, pipeline, x), alone)
    with lowp.autocast(enabled=False):
        assert same(step(pipeline, pipeline, x), alone)


def test_a_recipe_of_another_type_is_an_error():
    with pytest.raises(TypeError, match=r"recipe must be a lowp.recipe.Recipe, got str"):
        ops.Sequential(linear(), recipe="fp8")


def test_a_changed_recipe_is_noticed(device):
    pipeline = linear_bias(device=device)
    run = compiled(pipeline)
    x = torch.randn(8, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    for recipe in (None, oracle.HYBRID, oracle.DEQUANTIZED_BACKWARD, None, oracle.HYBRID):
        pipeline.recipe = recipe
        fresh = ops.Sequential(*copy.deepcopy(pipeline), recipe=recipe)
        expected = step(fresh, fresh, x)
        assert same(step(pipeline, pipeline, x), expected)
        assert same(step(run, pipeline, x), expected)


def test_extra_inputs_are_counted():
    with pytest.raises(ValueError, match=r"Sequential: the operations take 0 extra inputs, got 1"):
        ops.Sequential(linear())(torch.randn(2, 8), torch.randn(2, 8))


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("kind", ["identity", "reshape", "reshape at the edges"])
def test_views(kind, boundary, device):
    first, second = linear_bias(32, 16, device=device), linear_bias(8, 24, device=device)
    views = {
        "identity": [ops.Identity(), *first, ops.Identity(), ops.Reshape((-1, 8)), ops.Identity(), *second],
        "reshape": [*first, ops.Reshape((-1, 2, 8)), *second],
        "reshape at the edges": [ops.Reshape((-1, 32)), *first, ops.Reshape((-1, 8)), *second, ops.Reshape((5, -1))],
    }
    pipeline = ops.Sequential(*views[kind], recipe=oracle.HYBRID)
    x = torch.randn(5, 4, 32, device=device, dtype=torch.bfloat16, requires_grad=True)

    def by_hand(x):
        for op in views[kind]:
            x = x.reshape(op.shape) if isinstance(op, ops.Reshape) else ops.Sequential(op, recipe=oracle.HYBRID)(x)
        return x

    for bias_ in (first[1].bias, second[1].bias):
        torch.nn.init.zeros_(bias_)
    expected = step(by_hand, pipeline, x)
    assert same(step(pipeline, pipeline, x), expected)
    assert same(step(compiled(pipeline, boundary=boundary), pipeline, x), expected)


def test_modules_convert_in_place(device):
    """`.to`, `.half()` and the like change parameters, not the plan's references to operations."""
    pipeline = ops.Sequential(linear(), bias()).to(device).half()
    y = pipeline(torch.randn(4, 8, device=device, dtype=torch.half))
    assert y.dtype == torch.half
