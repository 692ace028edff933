"""Groups of operations: what is traced inline, and tensors that come twice."""

import pytest
import torch

from lowp import ops
from tests.ops.graphs import Graphs, lowp_ops
from tests.ops.pipelines import same, step


class Inline(ops.BasicOperation):
    """`y = sin(x)`: declares no arguments, so that it is traced inline."""

    def pack_forward_args(self, basic_op_ctxs, input_, **_):
        basic_op_ctxs[0].save_for_backward(input_)
        return input_

    @classmethod
    def forward_compute(cls, args, *, in_custom_op=False):
        return args.sin(), ((),), ()

    def pack_backward_args(self, basic_op_ctxs, grad_output, **_):
        return grad_output, basic_op_ctxs[0].saved_tensors[0]

    @classmethod
    def backward_compute(cls, args, *, in_custom_op=False):
        grad_output, input_ = args
        return grad_output * input_.cos(), ((),), ((),)


def test_operations_without_argument_types_are_traced_inline(device):
    pipeline = ops.Sequential(ops.Bias(8, device=device), Inline())
    x = torch.randn(4, 8, device=device, requires_grad=True)
    graphs = Graphs()
    results = step(graphs.compile(pipeline), pipeline, x)
    assert torch.equal(results[1], x.detach().cos())
    assert same(results, step(pipeline, pipeline, x))
    assert lowp_ops(graphs.forward[0]) == ["Bias_forward"]
    assert "aten.sin.default" in [str(node.target) for node in graphs.forward[0].graph.nodes]


class Add(ops.BasicOperation):
    """`y = x + extra`."""

    num_extra_inputs = 1
    grad_input_is_grad_output = True

    def pack_forward_args(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        return input_, basic_op_extra_inputs[0][0]

    @classmethod
    def forward_compute(cls, args, *, in_custom_op=False):
        return args[0] + args[1], ((),), ()

    def pack_backward_args(self, basic_op_ctxs, grad_output, **_):
        return grad_output

    @classmethod
    def backward_compute(cls, args, *, in_custom_op=False):
        return None, ((),), ((args.clone(),),)


@pytest.mark.parametrize("backend", ["none", "aot_eager", "inductor"])
def test_one_tensor_as_input_and_extra_inputs(backend, device):
    pipeline = ops.Sequential(Add(), Add())
    run = pipeline if backend == "none" else torch.compile(pipeline, backend=backend, fullgraph=True)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    y = run(x, x, x)
    assert torch.equal(y, x + x + x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_an_extra_input_alone_wants_a_gradient(device):
    pipeline = ops.Sequential(Add())
    x, extra = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device, requires_grad=True)
    pipeline(x, extra).sum().backward()
    assert torch.equal(extra.grad, torch.ones_like(x))
