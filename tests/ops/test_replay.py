"""Replayed passes equal ordinary ones, and whatever changes besides values is noticed."""

from __future__ import annotations

import copy
import pickle
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowp
from lowp import ops
from lowp.ops.basic.bias import Bias
from lowp.recipe import Float8CurrentScaling
from tests.ops.pipelines import linear_bias, same, step, without_replays

RECIPES = [
    None,
    Float8CurrentScaling(),
    Float8CurrentScaling(backward_override="dequantized"),
    Float8CurrentScaling(backward_override="high_precision"),
]


@contextmanager
def packings():
    """The passes of Bias's backward that were not replayed."""
    packed = []
    original = Bias.pack_backward_args

    def count(self, *args, **kwargs):
        packed.append(self)
        return original(self, *args, **kwargs)

    Bias.pack_backward_args = count
    try:
        yield packed
    finally:
        Bias.pack_backward_args = original


def steps(pipeline, x, count=4):
    """Results of several steps, with ordinary ones beside them, each on new values."""
    for _ in range(count):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            for parameter in pipeline.parameters():
                parameter.add_(torch.randn_like(parameter) / 8)
        yield step(pipeline, pipeline, x), ordinary(pipeline, x)


def ordinary(pipeline, x, **kwargs):
    with without_replays():
        return step(pipeline, pipeline, x, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_replayed_steps_equal_ordinary_ones(device, recipe, dtype):
    pipeline = linear_bias(device=device, recipe=recipe, dtype=dtype)
    x = torch.randn(3, 5, 32, device=device, dtype=dtype, requires_grad=True)
    with packings() as packed:
        for found, expected in steps(pipeline, x):
            assert same(found, expected)
    assert len(packed) == 2 + 4  # two steps before there is a program; and the ordinary steps


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=str)
def test_without_gradients(device, recipe):
    pipeline = linear_bias(device=device, recipe=recipe)
    x = torch.randn(6, 32, device=device, dtype=torch.bfloat16)
    with torch.no_grad(), packings():
        for _ in range(4):
            found = pipeline(x)
            with without_replays():
                assert torch.equal(found, pipeline(x))


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=str)
def test_extra_inputs_and_outputs(device, recipe):
    pipeline = ops.Sequential(
        ops.MakeExtraOutput(), ops.BasicLinear(32, 32), ops.ConstantScale(0.5), ops.AddExtraInput(), recipe=recipe
    ).to(device)

    def passes(x, extra):
        x, extra = x.detach().requires_grad_(), extra.detach().requires_grad_()
        y, made = pipeline(x, extra)
        grads = torch.autograd.grad((y * made).sum(), [x, extra, pipeline[1].weight])
        return [y, made, *grads]

    for _ in range(4):
        given = [torch.randn(16, 32, device=device) for _ in range(2)]
        found = passes(*given)
        with without_replays():
            assert same(found, passes(*given))


def test_layouts_have_programs_of_their_own(device):
    pipeline = linear_bias(device=device, recipe=RECIPES[1])
    whole = torch.randn(64, 64, device=device, dtype=torch.bfloat16)
    views = [whole[:16, :32], whole[:32, :32], whole[:16, 1:33], whole[:32, :16].t(), whole[:16, :1].expand(16, 32)]
    for _ in range(4):
        for view in views:
            x = view.detach().requires_grad_()
            assert same(step(pipeline, pipeline, x), ordinary(pipeline, x))


def test_the_oldest_layouts_make_room(monkeypatch):
    monkeypatch.setattr("lowp.ops.fuser._MOST_CALLS", 3)
    pipeline = linear_bias(recipe=RECIPES[1])
    for tokens in [1, 2, 3, 4, 1, 2, 4, 4, 4, 5, 1] * 2:
        x = torch.randn(tokens, 32, dtype=torch.bfloat16, requires_grad=True)
        assert same(step(pipeline, pipeline, x), ordinary(pipeline, x))
        assert len(pipeline._groups[0]._calls) <= 3
    assert len(pipeline._groups[0]._plans) == 1


def test_gradients_that_are_wanted_may_change(device):
    pipeline = linear_bias(device=device, recipe=RECIPES[1])
    x = torch.randn(16, 32, device=device, dtype=torch.bfloat16)
    for wanted in [(True, True, True), (False, True, True), (True, False, True), (True, True, False)] * 4:
        x.requires_grad_(wanted[0])
        for parameter, want in zip(pipeline.parameters(), wanted[1:], strict=True):
            parameter.requires_grad_(want)
        found = step(pipeline, pipeline, x)
        assert [grad is not None for grad in found[1:]] == list(wanted)
        assert same(found, ordinary(pipeline, x))


def test_other_parameters_and_recipes_are_noticed(device):
    pipeline = linear_bias(device=device)
    x = torch.randn(16, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    for index in range(12):
        pipeline[0].weight = nn.Parameter(torch.randn_like(pipeline[0].weight))
        pipeline[1].bias.data = torch.randn(96, device=device, dtype=torch.bfloat16)[:: 1 + index % 2][:48]
        recipe = RECIPES[index % 4]
        within = lowp.autocast(recipe=recipe) if recipe is not None else nullcontext()
        found = step(pipeline, pipeline, x, within=within)
        assert same(found, ordinary(pipeline, x, within=within))


def test_a_changed_attribute_of_an_operation_is_noticed():
    pipeline = ops.Sequential(ops.Quantize(forward=True), ops.Bias(32), recipe=RECIPES[1])
    x = torch.randn(4, 32)
    with torch.no_grad():
        rounded = [pipeline(x) for _ in range(4)][-1]
        pipeline[0].quantizes_forward = False
        exact = [pipeline(x) for _ in range(4)]
        pipeline[0].quantizes_forward = True
        assert not torch.equal(rounded, x)
        assert all(torch.equal(y, x) for y in exact)
        assert torch.equal(pipeline(x), rounded)


def test_backward_depends_on_forward_layouts():
    pipeline = ops.Sequential(ops.Bias(4), ops.Reshape((-1,)), ops.Bias(8))
    for _ in range(4):
        for shape in [(2, 4), (1, 2, 4), (2, 1, 4)]:
            x = torch.randn(shape, requires_grad=True)
            pipeline(x).sum().backward()
            assert x.grad.shape == x.shape


def test_one_tensor_given_twice():
    pipeline = linear_bias(32, 32, recipe=RECIPES[1])
    for _ in range(4):
        x = pipeline[0].weight
        y = pipeline(x)
        with without_replays():
            assert torch.equal(y, pipeline(x))


def test_kept_graphs_and_saved_tensor_hooks(device):
    pipeline = linear_bias(device=device, recipe=RECIPES[1])
    x = torch.randn(16, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    expected = ordinary(pipeline, x)[1]
    for _ in range(4):
        with torch.autograd.graph.save_on_cpu():
            y = pipeline(x)
        for _ in range(2):
            (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            assert torch.equal(grad, expected)
        x.grad = None
        checkpoint(pipeline, x, use_reentrant=False).sum().backward()
        assert torch.equal(x.grad, expected)


def test_main_grad_is_added_to_in_every_step(device):
    pipeline = linear_bias(device=device, recipe=RECIPES[1], accumulate_into_main_grad=True)
    x = torch.randn(16, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    plain = linear_bias(device=device, recipe=RECIPES[1])
    plain.load_state_dict(pipeline.state_dict())
    once = step(plain, plain, x)[2].float()
    for _ in range(4):  # the buffer is another one in every step
        pipeline[0].weight.main_grad = torch.ones(48, 32, device=device)
        step(pipeline, pipeline, x)
        torch.testing.assert_close(pipeline[0].weight.main_grad, once + 1, rtol=2**-8, atol=2**-6)


class Counting(ops.Bias):
    """A third party's operation, which counts its passes."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.passes = []

    def pack_forward_args(self, *args, **kwargs):
        self.passes.append("forward")
        return super().pack_forward_args(*args, **kwargs)


def test_only_classes_that_say_so_are_replayed():
    pipeline = ops.Sequential(Counting(8))
    for _ in range(5):
        pipeline(torch.ones(2, 8))
    assert len(pipeline[0].passes) == 5


def test_copies_start_without_programs():
    pipeline = linear_bias(recipe=RECIPES[1])
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(4):
        step(pipeline, pipeline, x)
    for other in (copy.deepcopy(pipeline), pickle.loads(pickle.dumps(pipeline))):
        with torch.no_grad():
            other[0].weight.neg_()
        assert same(step(other, other, x), ordinary(other, x))


class NoGradient(torch.autograd.Function):
    """Gives its input back, and no gradient of it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_a_backward_of_nothing():
    pipeline, x = ops.Sequential(ops.ConstantScale(2.0)), torch.randn(3, requires_grad=True)
    for _ in range(4):
        NoGradient.apply(pipeline(x)).sum().backward()
        assert x.grad is None


@pytest.mark.parametrize("grads", [True, False])
def test_a_tensor_that_a_transform_left_behind(grads):
    """It has no storage: an ordinary call takes it."""
    pipeline, left = linear_bias(), []

    def keep(x):
        left.append(x)
        return x.sum()

    x = torch.randn(4, 32, dtype=torch.bfloat16)
    torch.func.grad(keep)(x)
    with torch.set_grad_enabled(grads):
        for _ in range(4):
            assert torch.equal(pipeline(left[0]), pipeline(x))
