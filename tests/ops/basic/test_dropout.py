"""Dropout: which elements are left, that calls draw alike however they run, and quantized hand-over."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lowp import ops
from tests.ops import oracle
from tests.ops.graphs import Graphs, lowp_ops, saved_tensors
from tests.ops.pipelines import BOUNDARIES, compiled, rules, same, step_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_what_is_left_is_scaled(p, dtype, device):
    module = ops.Dropout(p)
    x = (torch.rand(64, 33, 31, device=device) + 0.5).to(dtype).requires_grad_()  # no zeros
    y, dx = step_of(module, module, [x])
    keep = y != 0
    scale = torch.tensor(1 / (1 - p) if p < 1 else 0.0, device=device)
    assert torch.equal(y, (x.detach().float() * keep * scale).to(dtype))
    assert torch.equal(dx != 0, keep | (x == 0) & (dx != 0))
    assert torch.equal(dx[keep], scale.to(dtype).expand(int(keep.sum())))
    kept, count = keep.double().mean().item(), x.numel()
    assert abs(kept - (1 - p)) <= 5 * (p * (1 - p) / count) ** 0.5, "five standard deviations"


def test_calls_differ_and_seeds_repeat(device):
    module, x = ops.Dropout(), torch.ones(64, 64, device=device)
    torch.manual_seed(3)
    first, second = module(x), module(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(module(x), first)
    assert torch.equal(module(x), second)


@pytest.mark.parametrize("call", ["eager", *BOUNDARIES])
def test_evaluation_mode_does_nothing(call, device):
    module = ops.Sequential(ops.ConstantScale(2.0), ops.Dropout(), ops.ConstantScale(0.5))
    run = module if call == "eager" else compiled(module, boundary=call)
    x = torch.randn(64, 64, device=device, requires_grad=True)
    for training in (True, False, True):
        module.train(training)
        y, dx = step_of(run, module, [x])
        assert torch.equal(y, x) != training
        assert torch.equal(dx, torch.ones_like(x)) != training
    assert torch.equal(ops.Dropout().eval()(x), x)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_compiled_calls_draw_as_eager_ones(boundary, backend, device):
    module = ops.Sequential(ops.Dropout(0.3), ops.Bias(32, device=device), ops.Dropout(0.6))
    x = torch.randn(16, 32, device=device, requires_grad=True)
    assert same(step_of(compiled(module, backend, boundary), module, [x]), step_of(module, module, [x]))


def test_two_calls_are_two_draws_in_a_graph(device):
    module, graphs = ops.Dropout(), Graphs()
    y, z = graphs.compile(lambda x: (module(x), module(x)))(torch.ones(64, 64, device=device))
    assert not torch.equal(y, z)
    assert lowp_ops(graphs.inference[0]).count("draw_seed") == 2


def test_the_seed_alone_is_saved(device):
    with saved_tensors() as saved:
        ops.Dropout()(torch.randn(16, 32, device=device, requires_grad=True))
    assert [(tensor.dtype, tuple(tensor.shape)) for tensor in saved] == [(torch.int64, (2,))]


@pytest.mark.parametrize("call", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_draws_the_same(use_reentrant, call, device):
    if use_reentrant and call != "eager":
        return  # torch.compile doesn't trace it
    module = ops.Sequential(ops.Bias(32, device=device), ops.Dropout())

    def recomputed(x):
        return checkpoint(module, x, use_reentrant=use_reentrant)

    x = torch.randn(16, 32, device=device, requires_grad=True)
    run = recomputed if call == "eager" else compiled(recomputed, call)
    assert same(step_of(run, module, [x]), step_of(module, module, [x]))


@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_between_layers_bit_for_bit_one_by_one(recipe, device):
    """Quantized in both directions as the values are made."""
    layers = [ops.BasicLinear(32, 32, device=device, dtype=torch.bfloat16) for _ in range(2)]
    with rules(lambda rule: False):
        module = ops.Sequential(layers[0], ops.Dropout(), layers[1], recipe=oracle.RECIPES[recipe])
    if recipe == "hybrid":
        assert "Dropout[1] =E4M3=>" in module.plan
        assert "Dropout[1] =E5M2=>" in module.plan
    alone = torch.nn.Sequential(*[ops.Sequential(op, recipe=module.recipe) for op in module])
    x = torch.randn(2, 9, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        assert same(step_of(module, module, [x]), step_of(alone, module, [x]))
    assert same(step_of(compiled(module), module, [x]), step_of(module, module, [x]))


def test_another_p_is_noticed(device):
    module, x = ops.Dropout(1.0), torch.ones(64, 64, device=device)
    assert not module(x).any()
    module.p = 0.0
    assert module(x).all()


def test_errors():
    with pytest.raises(ValueError, match=r"p must be from 0 to 1, got 1.5"):
        ops.Dropout(1.5)
    with pytest.raises(TypeError, match=r"Dropout: the input must be one of .*, got torch.float64"):
        ops.Dropout()(torch.zeros(4, dtype=torch.float64))
