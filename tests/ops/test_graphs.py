"""Which operators compiled graphs are made of: one node for each operation and direction."""

import pytest
import torch

import lowp
from lowp import ops
from tests.ops import oracle
from tests.ops.graphs import Graphs, lowp_ops, other_ops
from tests.ops.pipelines import linear_bias

DTYPE = torch.bfloat16


def captured(module, x, backward=True):
    """The names of the operators in the forward graph and in the backward graph, of one step."""
    graphs = Graphs()
    y = graphs.compile(module)(x)
    if backward:
        y.sum().backward()
    assert graphs.frames == 1
    forward = graphs.forward or graphs.inference
    assert len(forward) == 1
    assert len(graphs.backward) == backward
    return lowp_ops(forward[0]), [name for graph in graphs.backward for name in lowp_ops(graph)]


def linear(device, **kwargs):
    return ops.BasicLinear(32, 48, device=device, dtype=DTYPE, **kwargs)


def bias(device, size=48):
    return ops.Bias(size, device=device, dtype=DTYPE)


PIPELINES = {
    "linear": (linear, ["BasicLinear_forward"], ["BasicLinear_backward"]),
    "bias": (lambda d: bias(d, 32), ["Bias_forward"], ["Bias_backward"]),
    "linear, bias": (
        lambda d: ops.Sequential(linear(d), bias(d)),
        ["ForwardLinearBias_forward"],
        ["Bias_backward", "BasicLinear_backward"],
    ),
    "bias, linear": (
        lambda d: ops.Sequential(bias(d, 32), linear(d)),
        ["Bias_forward", "BasicLinear_forward"],
        ["BasicLinear_backward", "Bias_backward"],
    ),
    "linear, fp32 bias": (
        lambda d: ops.Sequential(linear(d), ops.Bias(48, device=d)),
        ["BasicLinear_forward", "Bias_forward"],
        ["Bias_backward", "BasicLinear_backward"],
    ),
    "linear, bias, bias": (
        lambda d: ops.Sequential(linear(d), bias(d), bias(d)),
        ["ForwardLinearBias_forward", "Bias_forward"],
        ["Bias_backward", "Bias_backward", "BasicLinear_backward"],
    ),
    "linear, identity, bias": (
        lambda d: ops.Sequential(linear(d), ops.Identity(), bias(d)),
        ["BasicLinear_forward", "Bias_forward"],
        ["Bias_backward", "BasicLinear_backward"],
    ),
    "linear, bias, linear, bias": (
        lambda d: ops.Sequential(linear(d), bias(d), ops.BasicLinear(48, 16, device=d, dtype=DTYPE), bias(d, 16)),
        ["ForwardLinearBias_forward"] * 2,
        ["Bias_backward", "BasicLinear_backward"] * 2,
    ),
}
"""Pipelines by name: how to build one, and the nodes of both directions."""


@pytest.mark.parametrize("recipe", ["none", "hybrid", "dequantized"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_nodes_with_gradients(pipeline, recipe, device):
    build, forward, backward = PIPELINES[pipeline]
    x = torch.randn(16, 32, device=device, dtype=DTYPE, requires_grad=True)
    with lowp.autocast(enabled=recipe != "none", recipe=oracle.RECIPES[recipe]):
        assert captured(build(device), x) == (forward, backward)


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("pipeline", ["linear", "linear, bias", "linear, fp32 bias"])
def test_nodes_without_gradients(pipeline, mode, recipe, device):
    build, forward, _ = PIPELINES[pipeline]
    x = torch.randn(16, 32, device=device, dtype=DTYPE)
    with lowp.autocast(enabled=recipe != "none", recipe=oracle.RECIPES[recipe]), mode():
        assert captured(build(device), x, backward=False) == (forward, [])


@pytest.mark.parametrize("recipe", ["none", "hybrid", "high_precision"])
def test_nodes_with_main_grad(recipe, device):
    module = linear_bias(device=device, dtype=DTYPE, recipe=oracle.RECIPES[recipe], accumulate_into_main_grad=True)
    module[0].weight.main_grad = torch.zeros(48, 32, device=device)
    x = torch.randn(16, 32, device=device, dtype=DTYPE, requires_grad=True)
    assert captured(module, x) == (
        ["ForwardLinearBias_forward"],
        ["Bias_backward", "BasicLinear_backward_inplace"],
    )


FROZEN = {
    "input": ["Bias_backward", "BasicLinear_backward"],
    "weight": ["Bias_backward", "BasicLinear_backward"],
    "bias": ["BasicLinear_backward"],
    "weight and bias": ["BasicLinear_backward"],
    "input and weight": ["Bias_backward"],
}
"""What needs no gradient, and the nodes of the backward graph: none whose results nobody reads."""


@pytest.mark.parametrize("frozen", FROZEN)
def test_nodes_with_frozen_parameters(frozen, device):
    module = linear_bias(device=device, dtype=DTYPE, recipe=oracle.HYBRID)
    x = torch.randn(16, 32, device=device, dtype=DTYPE, requires_grad="input" not in frozen)
    module[0].weight.requires_grad_("weight" not in frozen)
    module[1].bias.requires_grad_("bias" not in frozen)
    assert captured(module, x) == (["ForwardLinearBias_forward"], FROZEN[frozen])


def test_kernels_are_the_nodes_at_the_kernel_boundary(either_amax, device):
    """The amax of few values is found by whoever casts them; that of a larger weight is kept for dgrad."""
    module = linear_bias(device=device, dtype=DTYPE, recipe=oracle.HYBRID)
    x = torch.randn(16, 32, device=device, dtype=DTYPE, requires_grad=True)
    with lowp.compile_boundary("kernel"):
        forward, backward = captured(module, x)
    assert forward == ["cast", *["amax"] * (either_amax == "amax kept"), "cast", "scaled_gemm"]
    assert backward == ["cast_bias_grad", "scaled_gemm", "cast", "scaled_gemm"]  # wgrad first, then dgrad


def test_compute_is_only_in_the_nodes(device):
    graphs = Graphs()
    module = linear_bias(device=device, dtype=DTYPE, recipe=oracle.HYBRID)
    x = torch.randn(16, 32, device=device, dtype=DTYPE, requires_grad=True)
    y = graphs.compile(module)(x)
    y.backward(torch.ones_like(y))
    assert other_ops(graphs.forward[0]) == []
    assert other_ops(graphs.backward[0]) == []


@pytest.mark.parametrize("compile_", [False, True])
def test_the_gradient_of_a_biased_input_is_the_gradient_of_the_output(compile_, device):
    module = ops.Bias(32, device=device)
    assert module.grad_input_is_grad_output
    x = torch.randn(16, 32, device=device, requires_grad=True)
    y = torch.compile(module, backend="aot_eager", fullgraph=True)(x) if compile_ else module(x)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, dy)
    if not compile_:
        assert dx.data_ptr() == dy.data_ptr()


def test_the_forward_returns_neither_its_input_nor_a_view(device):
    x = torch.randn(16, 32, device=device, dtype=DTYPE)
    for module in (linear(device), bias(device, 32), ops.Sequential(linear(device), bias(device))):
        with torch.no_grad():
            y = module(x)
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
