"""ConstantScale: one rounding in each direction."""

import pytest
import torch

from lowp import ops
from tests.ops.graphs import Graphs
from tests.ops.pipelines import BOUNDARIES, compiled, same, step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (1, 3, 7), (0, 7)], ids=str)
@pytest.mark.parametrize("scale", [0.3, -2, 0.0])
def test_values(scale, shape, dtype, device):
    module = ops.ConstantScale(scale)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    y, dx = step(module, module, x, dy)
    assert same([y, dx], [x.detach() * scale, dy * scale])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_chain_is_rounded_at_every_edge(boundary, backend, device):
    module = ops.Sequential(*[ops.ConstantScale(scale) for scale in (0.3, 7.1, -0.9)])
    x = torch.randn(64, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    assert same(step(compiled(module, backend, boundary), module, x, dy), step(module, module, x, dy))


def test_another_scale_is_noticed(device):
    module, graphs = ops.ConstantScale(2.0), Graphs()
    run, x = graphs.compile(module), torch.randn(4, 8, device=device, requires_grad=True)
    for scale in (2.0, 3.0, 2.0):
        module.scale = scale
        y, dx = step(run, module, x)
        assert torch.equal(y, x.detach() * scale)
        assert torch.equal(dx, torch.full_like(x, scale))
    assert graphs.frames == 2


def test_backward_has_the_scale_of_its_forward(device):
    module = ops.ConstantScale(2.0)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    y = module(x)
    module.scale = 3.0
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
