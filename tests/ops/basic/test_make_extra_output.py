"""MakeExtraOutput: two outputs that nobody can change through the other, and the sum of their gradients."""

import itertools

import pytest
import torch

from lowp import ops
from tests.ops import oracle
from tests.ops.graphs import Graphs, lowp_ops
from tests.ops.pipelines import BOUNDARIES, compiled, same, same_or_absent, step_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CALLS = ["eager", *BOUNDARIES]


def call_of(module, call, backend="aot_eager"):
    return module if call == "eager" else compiled(module, backend, call)


def linear(device):
    return ops.BasicLinear(8, 8, device=device)


PIPELINES = {
    "alone": lambda d: [ops.MakeExtraOutput()],
    "first": lambda d: [ops.MakeExtraOutput(), linear(d)],
    "between": lambda d: [linear(d), ops.MakeExtraOutput(), linear(d)],
    "last": lambda d: [linear(d), ops.MakeExtraOutput()],
    "twice": lambda d: [linear(d), ops.MakeExtraOutput(), ops.MakeExtraOutput(), linear(d)],
    "twice, last": lambda d: [linear(d), ops.MakeExtraOutput(), ops.MakeExtraOutput()],
    "before what passes through": lambda d: [
        linear(d), ops.MakeExtraOutput(), ops.Quantize(forward=False, backward=True)
    ],
    "before a view": lambda d: [
        linear(d), ops.MakeExtraOutput(), ops.Reshape((4, 2, 4)), ops.Quantize(forward=False, backward=True)
    ],
}  # fmt: skip


@pytest.mark.parametrize(("call", "recipe"), [("eager", "none"), ("eager", "hybrid"), ("operation", "hybrid")])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_outputs_share_no_memory(pipeline, call, recipe, device):
    module = ops.Sequential(*PIPELINES[pipeline](device), recipe=oracle.RECIPES[recipe])
    x = torch.randn(4, 8, device=device, requires_grad=True)
    outputs = call_of(module, call)(x)
    kept = [y.detach().clone() for y in outputs]
    pointers = {tensor.untyped_storage().data_ptr() for tensor in (x, *outputs)}
    assert len(pointers) == 1 + len(outputs)
    with torch.no_grad():
        for index, y in enumerate(outputs):
            y.zero_()
            assert all(
                torch.equal(other, old) for other, old in zip(outputs[index + 1 :], kept[index + 1 :], strict=True)
            )


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("index", [0, 1])
def test_an_output_changed_in_place_is_differentiated_as_changed(call, index, device):
    """As users do with a residual: `y += extra`."""
    module = ops.Sequential(ops.MakeExtraOutput(), linear(device), ops.ConstantScale(2.0))
    x = torch.randn(4, 8, device=device, requires_grad=True)
    outputs = call_of(module, call)(x)
    outputs[index].mul_(3.0)
    (outputs[0].sum() + outputs[1].sum()).backward()
    w = module[1].weight.detach()
    ones = torch.ones(4, 8, device=device)
    factor, extra_factor = (3.0, 1.0) if index == 0 else (1.0, 3.0)
    torch.testing.assert_close(x.grad, 2 * factor * ones @ w + extra_factor)


def test_what_is_saved_is_checked_for_changes(device):
    """Of the layer's own input, which is the extra output: torch's error, not a wrong gradient."""
    module = ops.Sequential(ops.ConstantScale(2.0), ops.MakeExtraOutput(), linear(device))
    y, extra = module(torch.randn(4, 8, device=device, requires_grad=True))
    with torch.no_grad():
        extra.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (1, 3, 7), (0, 7)], ids=str)
@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("call", ["eager", "operation"])
def test_gradients(call, used, shape, dtype, device):
    module = ops.MakeExtraOutput()
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    grads = [torch.randn_like(x) if wanted else None for wanted in used]
    kept = [dy if dy is None else dy.clone() for dy in grads]
    y, extra, dx = step_of(call_of(module, call), module, [x], grads)
    assert torch.equal(y, x)
    assert torch.equal(extra, x)
    given = [dy for dy in kept if dy is not None]
    assert torch.equal(dx, given[0] + given[1] if len(given) == 2 else given[0])
    assert same(grads, kept)


@pytest.mark.parametrize("call", ["eager", "operation"])
@pytest.mark.parametrize("made", [False, True], ids=["input", "made here"])
def test_an_extra_output_without_gradient_requires_none(made, call, device):
    """In front of a layer whose weight alone gets a gradient."""
    frozen = [linear(device).requires_grad_(False)] if made else [ops.Identity()]
    module = ops.Sequential(*frozen, ops.MakeExtraOutput(), linear(device))
    y, extra = call_of(module, call)(torch.randn(4, 8, device=device))
    assert y.requires_grad
    assert not extra.requires_grad
    y.sum().backward()
    assert module[-1].weight.grad is not None


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(call, mode, device):
    module = ops.Sequential(linear(device), ops.MakeExtraOutput(), ops.ConstantScale(2.0))
    x = torch.randn(4, 8, device=device)
    with mode():
        y, extra = call_of(module, call)(x)
        assert torch.equal(extra, module[0](x))
        assert torch.equal(y, 2 * extra)


def test_nodes(device):
    """Nothing in forward; in backward one node, or none where the layer after it adds."""
    x = torch.randn(4, 8, device=device, requires_grad=True)
    for pipeline, backward in (
        ([ops.MakeExtraOutput(), ops.ConstantScale(2.0)], ["ConstantScale_backward", "MakeExtraOutput_backward"]),
        ([ops.MakeExtraOutput(), linear(device)], ["BackwardLinearAdd_backward"]),
    ):
        module, graphs = ops.Sequential(*pipeline), Graphs()
        y, extra = graphs.compile(module)(x)
        (y.sum() + extra.sum()).backward()
        assert lowp_ops(graphs.forward[0]) == [f"{type(pipeline[1]).__name__}_forward"]
        assert lowp_ops(graphs.backward[0]) == backward


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_inductor(boundary, device):
    module = ops.Sequential(ops.MakeExtraOutput(), linear(device), ops.MakeExtraOutput(), ops.ConstantScale(0.3))
    x = torch.randn(4, 8, device=device, requires_grad=True)
    for used in itertools.product([True, False], repeat=3):
        if any(used):
            grads = [torch.randn(4, 8, device=device) if wanted else None for wanted in used]
            results = step_of(call_of(module, boundary, "inductor"), module, [x], grads)
            assert same_or_absent(results, step_of(module, module, [x], grads))
