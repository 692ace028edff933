"""Where weight gradients go: added to `main_grad`, or left by backward for `backward_dw()`."""

import copy

import pytest
import torch

from tests.modules.cases import CASES, batch, build, call_of, same, step
from tests.modules.pairwise import sampled
from tests.ops import oracle
from tests.ops.graphs import Graphs

CALLS = ["eager", "aot_eager", "kernel"]
WAYS = ["none", "hybrid", "high_precision", "dequantized"]
over_modules = pytest.mark.parametrize("name", CASES)


def weights(module):
    return {name: p for name, p in module.named_parameters() if p.ndim == 2}


def dy_of(name, x):
    return torch.randn(*x.shape[:-1], CASES[name].out_features, dtype=x.dtype).to(x.device)


def with_main_grads(module, dtype=torch.float32, start=0.0):
    for weight in weights(module).values():
        weight.main_grad = torch.full_like(weight, start, dtype=dtype, requires_grad=False)
    return module


# ---- main_grad


@sampled(recipe=WAYS, call=CALLS, name=list(CASES))
def test_fuse_wgrad_accumulation(recipe, call, name, device):
    """Two microbatches: the sum of their gradients, each of which is not rounded to the weight's dtype first."""
    module = build(name, device, recipe=oracle.RECIPES[recipe], dtype=torch.float32)
    fused = build(name, device, recipe=oracle.RECIPES[recipe], dtype=torch.float32, fuse_wgrad_accumulation=True)
    fused.load_state_dict(module.state_dict())
    with_main_grads(fused)
    buffers = {key: weight.main_grad.data_ptr() for key, weight in weights(fused).items()}
    run, total = call_of(fused, call), dict.fromkeys(weights(module), 0.0)
    for _ in range(2):
        x = batch(2, 15, device=device, dtype=torch.float32)
        dy = dy_of(name, x)
        expected, results = step(module, module, x, dy), step(run, fused, x, dy)
        for key in total:
            total[key] = total[key] + expected[key]
            assert results.pop(key) is None
            expected.pop(key)
        assert same(results, expected)
    for key, weight in weights(fused).items():
        torch.testing.assert_close(weight.main_grad, total[key], rtol=1e-5, atol=1e-5 * total[key].abs().max().item())
        assert weight.grad_added_to_main_grad is True
        assert weight.main_grad.data_ptr() == buffers[key]


@over_modules
@pytest.mark.parametrize("call", ["eager", "aot_eager"])
def test_overwrite_main_grad(call, name, device):
    module = with_main_grads(build(name, device, recipe=oracle.HYBRID, fuse_wgrad_accumulation=True), start=7.0)
    for weight in weights(module).values():
        weight.overwrite_main_grad = True
    x = batch(8, device=device)
    dy = dy_of(name, x)
    plain = build(name, device, recipe=oracle.HYBRID)
    plain.load_state_dict(module.state_dict())
    expected, run = step(plain, plain, x, dy), call_of(module, call)
    for _ in range(2):
        step(run, module, x, dy)
        for key, weight in weights(module).items():
            assert torch.equal(weight.main_grad.to(weight.dtype), expected[key])


@over_modules
def test_inductor_adds_in_place(name, device):
    """Forward, forward, backward, backward."""
    module = with_main_grads(build(name, device, recipe=oracle.HYBRID, fuse_wgrad_accumulation=True))
    eager = copy.deepcopy(module)
    with_main_grads(eager)
    xs = [batch(8, device=device) for _ in range(2)]
    for call, target in ((call_of(module, "inductor"), module), (eager, eager)):
        ys = [call(x) for x in xs]
        for y in ys:
            y.sum().backward()
        assert all(weight.main_grad.count_nonzero() for weight in weights(target).values())
    for key, weight in weights(module).items():
        assert torch.equal(weight.main_grad, weights(eager)[key].main_grad)


@over_modules
def test_a_missing_main_grad_is_an_error(name, device):
    module = build(name, device, fuse_wgrad_accumulation=True)
    with pytest.raises(ValueError, match="accumulate_into_main_grad needs"):
        module(batch(8, device=device))


# ---- delayed


def pair(name, device, recipe, **kwargs):
    """A module, and one with the same parameters that delays its weight gradients."""
    module = build(name, device, recipe=oracle.RECIPES[recipe], **kwargs)
    delayed = build(name, device, recipe=oracle.RECIPES[recipe], delay_wgrad_compute=True, **kwargs)
    delayed.load_state_dict(module.state_dict())
    return module, delayed


@sampled(recipe=WAYS, call=CALLS, name=list(CASES))
def test_delay_wgrad_compute(recipe, call, name, device):
    module, delayed = pair(name, device, recipe)
    run = call_of(delayed, call)
    for leading in ((2, 15), (2, 15), (7,), (0,)):
        x = batch(*leading, device=device)
        dy = dy_of(name, x)
        expected, results = step(module, module, x, dy), step(run, delayed, x, dy)
        for key in weights(delayed):
            assert results[key] is None
        delayed.backward_dw()
        results |= {key: weight.grad for key, weight in weights(delayed).items()}
        assert same(results, expected)


@over_modules
@pytest.mark.parametrize("call", ["eager", "aot_eager", "inductor"])
def test_backwards_are_made_up_for_in_their_order(call, name, device):
    """Forward, forward, backward, backward, then their weight gradients."""
    module, delayed = pair(name, device, "hybrid")
    run, xs = call_of(delayed, call), [batch(8, device=device), batch(8, device=device)]
    dys = [dy_of(name, x) for x in xs]
    ys = [run(x) for x in xs]
    for y, dy in zip(ys, dys, strict=True):
        y.backward(dy)
    for x, dy in zip(xs, dys, strict=True):
        expected = step(module, module, x, dy)
        for weight in weights(delayed).values():
            weight.grad = None
        delayed.backward_dw()
        for key, weight in weights(delayed).items():
            assert torch.equal(weight.grad, expected[key])


@over_modules
@pytest.mark.parametrize("call", ["eager", "aot_eager"])
def test_delayed_gradients_are_added_up(call, name, device):
    module, delayed = pair(name, device, "hybrid")
    x = batch(8, device=device)
    run, dy = call_of(delayed, call), dy_of(name, x)
    for _ in range(2):
        run(x).backward(dy)
        module(x).backward(dy)
        delayed.backward_dw()
    for key, weight in weights(delayed).items():
        assert torch.equal(weight.grad, weights(module)[key].grad)


@over_modules
@pytest.mark.parametrize("call", ["eager", "aot_eager"])
def test_delayed_into_main_grad(call, name, device):
    _, delayed = pair(name, device, "hybrid", fuse_wgrad_accumulation=True)
    _, direct = pair(name, device, "hybrid", fuse_wgrad_accumulation=True)
    direct = build(name, device, recipe=oracle.HYBRID, fuse_wgrad_accumulation=True)
    direct.load_state_dict(delayed.state_dict())
    with_main_grads(delayed)
    with_main_grads(direct)
    x = batch(8, device=device)
    run, dy = call_of(delayed, call), dy_of(name, x)
    for overwrite in (False, False, True):
        for weight in (*weights(delayed).values(), *weights(direct).values()):
            weight.overwrite_main_grad = overwrite
        run(x).backward(dy)
        direct(x).backward(dy)
        delayed.backward_dw()
        for key, weight in weights(delayed).items():
            assert torch.equal(weight.main_grad, weights(direct)[key].main_grad)
            assert weight.grad is None


@over_modules
def test_hooks_of_the_weight_see_the_delayed_gradient(name, device):
    """In backward they see None, as torch has it for a gradient that a Function doesn't give."""
    _, delayed = pair(name, device, "hybrid")
    seen = []
    weight = next(iter(weights(delayed).values()))
    weight.register_hook(lambda grad: seen.append(None if grad is None else grad.shape))
    delayed(batch(8, device=device)).sum().backward()
    assert seen == [None]
    delayed.backward_dw()
    assert seen == [None, weight.shape]


@over_modules
def test_there_must_have_been_a_backward(name, device):
    _, delayed = pair(name, device, "hybrid")
    with pytest.raises(RuntimeError, match=r"backward_dw: a backward must have run before, got none\. Call it once"):
        delayed.backward_dw()
    with pytest.raises(RuntimeError, match="delay_wgrad_compute=True"):
        build(name, device).backward_dw()


@over_modules
def test_a_frozen_weight_has_nothing_to_delay(name, device):
    _, delayed = pair(name, device, "hybrid")
    for weight in weights(delayed).values():
        weight.requires_grad_(False)
    delayed(batch(8, device=device)).sum().backward()
    delayed.backward_dw()
    assert all(weight.grad is None for weight in weights(delayed).values())


def test_operands_changed_since_backward_are_an_error(device):
    _, delayed = pair("linear", device, "none")
    x = batch(8, device=device).detach()
    delayed(x).sum().backward()
    x.zero_()
    with pytest.raises(RuntimeError, match="an operand was changed in place since backward"):
        delayed.backward_dw()


def test_copies_have_stores_of_their_own(device):
    _, delayed = pair("linear", device, "hybrid")
    x = batch(8, device=device)
    delayed(x).sum().backward()
    other = copy.deepcopy(delayed)
    with pytest.raises(RuntimeError, match="a backward must have run before"):
        other.backward_dw()
    other(x).sum().backward()
    other.backward_dw()
    delayed.backward_dw()
    assert torch.equal(other.weight.grad, delayed.weight.grad)


def test_the_backward_of_a_module_that_is_gone_keeps_nothing(device):
    _, delayed = pair("linear", device, "hybrid")
    x = batch(8, device=device)
    y = delayed(x)
    del delayed
    y.sum().backward()
    assert x.grad is not None


def test_the_compiled_backward_has_no_wgrad(device):
    _, delayed = pair("linear", device, "hybrid")
    graphs = Graphs()
    x = batch(8, device=device)
    graphs.compile(delayed)(x).sum().backward()
    delayed.backward_dw()
    assert graphs.frames == 1
