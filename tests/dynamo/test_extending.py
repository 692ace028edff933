"""The code of docs/extending.md runs as it stands."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch

import lowp
from lowp import quantization
from lowp.kernels.activated import activated
from lowp.kernels.activations import ACTIVATIONS
from lowp.kernels.materialize import materialize
from tests.ops.graphs import Graphs, lowp_ops

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture(scope="module")
def page() -> types.ModuleType:
    """The page as a module: its blocks, one after the other, at their lines of the page."""
    text = PAGE.read_text()
    module = types.ModuleType("extending_lowp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(quantization, "_METHODS", dict(quantization._METHODS))
        patch.setattr(lowp.ops.plan, "_RULES", list(lowp.ops.plan._RULES))
        activations = dict(ACTIVATIONS)
        for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            lines_before = text[: block.start(1)].count("\n")
            exec(compile("\n" * lines_before + block[1], str(PAGE), "exec"), vars(module))
        yield module
        ACTIVATIONS.clear()
        ACTIVATIONS.update(activations)


def test_the_operation_computes_its_gradients(page):
    op, x = page.Scale(5), torch.randn(2, 3, 5, requires_grad=True)
    op.weight.data.normal_()
    results = []
    for call in (op, torch.compile(op, fullgraph=True, backend="aot_eager"), lambda x: x * op.weight):
        y = call(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, op.weight])])
    for eager, compiled, native in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
        torch.testing.assert_close(eager, native)


def test_the_fusion_is_one_node_and_keeps_the_gradients(page):
    scale, bias = page.Scale(5), lowp.ops.Bias(5)
    scale.weight.data.normal_()
    pipeline, graphs = lowp.ops.Sequential(scale, bias), Graphs()
    x = torch.randn(3, 5, requires_grad=True)
    results = []
    for call in (pipeline, graphs.compile(pipeline), lambda x: x * scale.weight + bias.bias):
        y = call(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, scale.weight, bias.bias])])
    for eager, compiled, native in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
        torch.testing.assert_close(eager, native)
    assert lowp_ops(graphs.forward[0]) == ["ForwardScaleBias_forward"]
    assert lowp_ops(graphs.backward[0]) == ["Bias_backward", "Scale_backward"]


def test_the_fusions_condition_holds(page):
    plan = lowp.ops.Sequential(page.Scale(5, dtype=torch.bfloat16), lowp.ops.Bias(5)).plan
    assert "without ForwardScaleBias[0]: dtypes differ" in plan


@pytest.mark.parametrize("boundary", ["operation", "kernel"])
def test_the_recipe_computes_its_gradients(page, boundary):
    linear = lowp.ops.Sequential(lowp.ops.BasicLinear(32, 16), lowp.ops.Bias(16), recipe=page.recipe)
    x = torch.randn(8, 32, requires_grad=True)
    results = []
    with lowp.compile_boundary(boundary):
        for call in (linear, torch.compile(linear, fullgraph=True, backend="aot_eager")):
            y = call(x)
            results.append([y, *torch.autograd.grad(y.sum(), [x, *linear.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    native = torch.nn.functional.linear(x, linear[0].weight, linear[1].bias)
    assert (results[0][0] - native).abs().max() < 0.1


def test_the_activation_rounds_once_and_has_its_gradient(page):
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    a, b = x.chunk(2, dim=1)
    exact = torch.nn.functional.softsign(a) * b
    y = materialize(activated(x.detach().float(), "softsign_glu"))
    torch.testing.assert_close(y, exact.detach().float())
    (dx,) = torch.autograd.grad(exact.sum(), x)
    source = page.activation_gradient(torch.ones(3, 4), x.detach().float(), "softsign_glu")
    torch.testing.assert_close(materialize(source), dx.float())


def test_the_source_is_quantized_as_its_values_are(page):
    x, weight = torch.randn(6, 20).bfloat16(), torch.rand(6)
    source = page.weighted(x, weight)
    values = (x.float() * weight[:, None]).bfloat16()
    assert torch.equal(materialize(source), values)
    spec = lowp.quantizers.Float8CurrentScalingQuantizer()
    compiled = torch.compile(lambda x, w: quantize_both(page.weighted(x, w), spec), fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(x, weight), quantize_both(values, spec), strict=True):
        assert torch.equal(a.float(), b.float())


def quantize_both(x, spec):
    return quantization.quantize_operand(x, spec, row=True, column=True)
