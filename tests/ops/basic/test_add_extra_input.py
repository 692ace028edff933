"""AddExtraInput over shapes and dtypes; the gradient passes through to both inputs and is left alone."""

import itertools

import pytest
import torch

from lowp import ops
from tests.ops.exact import exact
from tests.ops.graphs import Graphs, lowp_ops
from tests.ops.pipelines import BOUNDARIES, compiled, same, step_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(7,), (1, 3, 7), (4, 3, 8, 7), (0, 7)]


def check(shape, dtype, extra_dtype, device, call=lambda module: module):
    module = ops.AddExtraInput()
    x = exact(*shape, dtype=dtype, device=device, requires_grad=True)
    extra = exact(*shape, dtype=extra_dtype, device=device, requires_grad=True)
    promoted = torch.promote_types(dtype, extra_dtype)
    dy = exact(*shape, dtype=promoted, device=device)
    kept = dy.clone()
    y, dx, d_extra = step_of(call(module), module, [x, extra], [dy])
    assert (y.dtype, dx.dtype, d_extra.dtype) == (promoted, dtype, extra_dtype)
    assert torch.equal(y.double(), x.detach().double() + extra.detach().double())
    assert torch.equal(dx.double(), kept.double())
    assert torch.equal(d_extra.double(), kept.double())
    assert torch.equal(dy, kept)


@pytest.mark.parametrize("extra_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_dtypes(shape, dtype, extra_dtype, device):
    check(shape, dtype, extra_dtype, device)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("extra_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_compiled(dtype, extra_dtype, boundary, device):
    check((4, 3, 7), dtype, extra_dtype, device, lambda module: compiled(module, boundary=boundary))


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("call", ["eager", "operation", "kernel"])
def test_only_wanted_gradients(call, wanted, device):
    module = ops.AddExtraInput()
    tensors = [torch.randn(4, 8, device=device, requires_grad=w) for w in wanted]
    run = module if call == "eager" else compiled(module, boundary=call)
    results = step_of(run, module, tensors)
    assert [gradient is not None for gradient in results[1:]] == list(wanted)


@pytest.mark.parametrize("call", ["eager", "operation"])
def test_gradients_are_accumulated_apart(call, device):
    """Both gradients are one tensor on the way: what is added to one later is not added to the other."""
    module = ops.AddExtraInput()
    x, extra = (torch.randn(4, 8, device=device, requires_grad=True) for _ in range(2))
    run = module if call == "eager" else compiled(module)
    dy = torch.randn(4, 8, device=device)
    kept = dy.clone()
    run(x, extra).backward(dy)
    x.sum().backward()
    assert torch.equal(x.grad, kept + 1)
    assert torch.equal(extra.grad, kept)
    assert torch.equal(dy, kept)


def test_another_shape_is_an_error(device):
    text = r"AddExtraInput: the extra input must have shape \(4, 8\), got \(8,\)"
    x, extra = torch.zeros(4, 8, device=device), torch.zeros(8, device=device)
    for module in (ops.AddExtraInput(), ops.Sequential(ops.BasicLinear(8, 8, device=device), ops.AddExtraInput())):
        with pytest.raises(ValueError, match=text):
            module(x, extra)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=text):
            compiled(module)(x, extra)


def test_one_node(device):
    tensors = [torch.randn(4, 8, device=device, requires_grad=True) for _ in range(2)]
    graphs = Graphs()
    module = ops.AddExtraInput()
    assert same(step_of(graphs.compile(module), module, tensors), step_of(module, module, tensors))
    assert lowp_ops(graphs.forward[0]) == ["AddExtraInput_forward"]
    assert [name for graph in graphs.backward for name in lowp_ops(graph)] == []


def test_calls_with_extra_inputs_are_remembered(device):
    """By the dtypes of the extra inputs too, and by whether they want gradients."""
    module = ops.Sequential(ops.BasicLinear(8, 8, device=device), ops.AddExtraInput())
    (group,) = module._groups

    def prepare(dtype=torch.float32, requires_grad=False):
        extra = torch.zeros(2, 8, device=device, dtype=dtype, requires_grad=requires_grad)
        return group.prepare([torch.zeros(2, 8, device=device), *module.parameters(), extra], None, None)

    first = prepare()
    assert prepare() is first
    assert prepare(requires_grad=True) is not first
    assert len(prepare(torch.bfloat16).plan.forward) == 1
    assert len(prepare(torch.float64).plan.forward) == 2
