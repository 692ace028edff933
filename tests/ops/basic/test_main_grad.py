"""Weight gradients that backward adds to `weight.main_grad`: in place, eager and compiled."""

import pytest
import torch

from lowp import ops
from tests.ops import oracle
from tests.ops.exact import exact, exact_
from tests.ops.graphs import Graphs, other_ops
from tests.ops.pipelines import BOUNDARIES, compiled, linear_bias

K, N = 32, 48
DTYPE = torch.bfloat16
CALLS = ["eager", "aot_eager", "inductor"]
FAST_CALLS = ["eager", "aot_eager"]


def module_with_main_grad(device, recipe, main_dtype=torch.float32, start=1.0, **kwargs):
    module = linear_bias(K, N, device=device, dtype=DTYPE, recipe=recipe, accumulate_into_main_grad=True, **kwargs)
    exact_(module[0].weight)
    exact_(module[1].bias)
    module[0].weight.main_grad = torch.full((N, K), start, dtype=main_dtype, device=device)
    return module


def call_of(module, call, boundary="operation"):
    return module if call == "eager" else compiled(module, call, boundary)


def batch(device, rows=8):
    """Input and output gradient for which the weight's gradient is exact."""
    x = exact(rows, K, device=device, requires_grad=True)
    return x, exact(rows, N, device=device)


def wgrad(x, dy):
    return dy.double().t() @ x.detach().double()


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("call", FAST_CALLS)
def test_microbatches_accumulate_in_place(call, recipe, main_dtype, device):
    module = module_with_main_grad(device, oracle.RECIPES[recipe], main_dtype)
    weight, buffer = module[0].weight, module[0].weight.main_grad
    run, pointer, total = call_of(module, call), buffer.data_ptr(), 1.0
    for _ in range(3):
        x, dy = batch(device)
        run(x).backward(dy)
        total = total + wgrad(x, dy)
        assert torch.equal(buffer.double(), total)
        assert torch.equal(x.grad.double(), dy.double() @ weight.detach().double())
    assert weight.main_grad is buffer
    assert buffer.data_ptr() == pointer
    assert weight.grad is None
    assert weight.grad_added_to_main_grad is True


@pytest.mark.parametrize(
    ("recipe", "boundary"), [("hybrid", "operation"), ("hybrid", "kernel"), ("dequantized", "operation")]
)
def test_inductor_accumulates_in_place(recipe, boundary, device):
    """Forward, forward, backward, backward, and a step more."""
    module = module_with_main_grad(device, oracle.RECIPES[recipe])
    buffer = module[0].weight.main_grad
    run, pointer = call_of(module, "inductor", boundary), buffer.data_ptr()
    (x1, dy1), (x2, dy2), (x3, dy3) = batch(device), batch(device), batch(device)
    y1, y2 = run(x1), run(x2)
    y2.backward(dy2)
    y1.backward(dy1)
    run(x3).backward(dy3)
    assert torch.equal(buffer.double(), 1 + wgrad(x1, dy1) + wgrad(x2, dy2) + wgrad(x3, dy3))
    assert buffer.data_ptr() == pointer
    assert module[0].weight.grad is None


@pytest.mark.parametrize("recipe", ["none", "hybrid", "dequantized"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_forward_forward_backward_backward(boundary, recipe, device):
    module = module_with_main_grad(device, oracle.RECIPES[recipe])
    run = call_of(module, "aot_eager", boundary)
    (x1, dy1), (x2, dy2) = batch(device), batch(device)
    y1, y2 = run(x1), run(x2)
    y1.backward(dy1)
    y2.backward(dy2)
    assert torch.equal(module[0].weight.main_grad.double(), 1 + wgrad(x1, dy1) + wgrad(x2, dy2))


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_the_graph_copies_nothing(recipe, device):
    module = module_with_main_grad(device, oracle.RECIPES[recipe])
    graphs = Graphs()
    x, dy = batch(device)
    graphs.compile(module)(x).backward(dy)
    names = other_ops(graphs.backward[0])
    assert not [name for name in names if "clone" in name or "empty" in name or "add" in name], names


@pytest.mark.parametrize("recipe", ["none", "hybrid", "high_precision"])
@pytest.mark.parametrize("call", FAST_CALLS)
def test_overwrite(call, recipe, device):
    """The first microbatch overwrites, the next accumulates."""
    module = module_with_main_grad(device, oracle.RECIPES[recipe], start=float("nan"))
    run, weight, total = call_of(module, call), module[0].weight, 0.0
    for overwrite in (True, False, False, True):
        weight.overwrite_main_grad = overwrite
        x, dy = batch(device)
        run(x).backward(dy)
        total = wgrad(x, dy) + (0 if overwrite else total)
        assert torch.equal(weight.main_grad.double(), total)


@pytest.mark.parametrize("call", CALLS)
def test_buffers_swapped_between_steps(call, device):
    module = module_with_main_grad(device, oracle.HYBRID)
    graphs = Graphs()
    run = graphs.compile(module) if call == "aot_eager" else call_of(module, call)
    buffers = [torch.zeros(N, K, device=device) for _ in range(3)]
    expected = [torch.zeros(N, K, dtype=torch.float64, device=device) for _ in range(3)]
    for index in (0, 1, 0, 2):
        module[0].weight.main_grad = buffers[index]
        x, dy = batch(device)
        run(x).backward(dy)
        expected[index] += wgrad(x, dy)
        for buffer, total in zip(buffers, expected, strict=True):
            assert torch.equal(buffer.double(), total)
    if call == "aot_eager":
        assert graphs.frames == 1


@pytest.mark.parametrize("call", CALLS)
def test_views_into_one_bucket(call, device):
    bucket = torch.zeros(2 * N * K + 8, device=device)
    first, second = (ops.BasicLinear(K, N, device=device, accumulate_into_main_grad=True) for _ in range(2))
    back = ops.BasicLinear(N, K, device=device)
    for index, linear in enumerate((first, second)):
        linear.weight.main_grad = bucket[4 + index * N * K :][: N * K].view(N, K)
    module = ops.Sequential(first, back, second, recipe=oracle.HYBRID)
    x = torch.randn(16, K, device=device)
    run = module if call == "eager" else compiled(module, call)
    run(x).sum().backward()
    alone = ops.Sequential(*module, recipe=oracle.HYBRID)
    expected = bucket.clone()
    bucket.zero_()
    alone(x).sum().backward()
    assert torch.equal(bucket, expected)
    assert torch.equal(bucket[:4], torch.zeros_like(bucket[:4]))
    assert bucket[4 : 4 + N * K].count_nonzero() > 0
    assert bucket[4 + N * K : -4].count_nonzero() > 0


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
@pytest.mark.parametrize("call", FAST_CALLS)
def test_the_post_accumulate_hook_fires_once(call, recipe, device):
    module = module_with_main_grad(device, oracle.RECIPES[recipe])
    weight, fired = module[0].weight, []
    run = call_of(module, call)
    weight.register_post_accumulate_grad_hook(lambda p: fired.append((p.grad, p.grad_added_to_main_grad)))
    for count in (1, 2):
        x, dy = batch(device)
        run(x).backward(dy)
        assert fired == [(None, True)] * count


@pytest.mark.parametrize("call", FAST_CALLS)
def test_hooks_on_the_accumulator_fire_once(call, device):
    """As in data-parallel wrappers that hook the gradient accumulator."""
    module = module_with_main_grad(device, oracle.HYBRID)
    fired = []
    accumulator = module[0].weight.view_as(module[0].weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_: fired.append(1))
    x, dy = batch(device)
    call_of(module, call)(x).backward(dy)
    assert fired == [1]


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_placeholder_gradient(recipe, device):
    module = module_with_main_grad(device, oracle.RECIPES[recipe], placeholder_grad=True)
    weight, seen = module[0].weight, []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    x, dy = batch(device)
    module(x).backward(dy)
    assert seen == [weight.shape]
    assert weight.grad.dtype == weight.dtype
    assert torch.equal(weight.main_grad.double(), 1 + wgrad(x, dy))


def test_no_placeholder_inside_the_operator(device):
    """An operator changes only what it declares: compiled, the gradient stays None."""
    module = module_with_main_grad(device, oracle.HYBRID, placeholder_grad=True)
    x, dy = batch(device)
    compiled(module)(x).backward(dy)
    assert module[0].weight.grad is None
    assert torch.equal(module[0].weight.main_grad.double(), 1 + wgrad(x, dy))


@pytest.mark.parametrize("call", FAST_CALLS)
def test_a_missing_main_grad_is_an_error(call, device):
    module = linear_bias(K, N, device=device, dtype=DTYPE, accumulate_into_main_grad=True)
    error = ValueError if call == "eager" else torch._dynamo.exc.Unsupported
    x, _ = batch(device)
    for wrong, got in ((None, "None"), (torch.zeros(K, N, device=device), r"\(32, 48\)")):
        module[0].weight.main_grad = wrong
        text = rf"accumulate_into_main_grad needs weight.main_grad .*\(48, 32\), got {got}"
        with pytest.raises(error, match=text):
            call_of(module, call)(x)


def test_inference_needs_no_main_grad(device):
    module = linear_bias(K, N, device=device, dtype=DTYPE, accumulate_into_main_grad=True)
    with torch.no_grad():
        module(batch(device)[0])


def test_a_frozen_weight_needs_no_main_grad(device):
    module = linear_bias(K, N, device=device, dtype=DTYPE, accumulate_into_main_grad=True)
    module[0].weight.requires_grad_(False)
    x, dy = batch(device)
    module(x).backward(dy)
    assert x.grad is not None
    assert not getattr(module[0].weight, "grad_added_to_main_grad", False)


@pytest.mark.parametrize("call", CALLS)
def test_one_weight_used_twice(call, device):
    """y = f(f(x)), both uses adding to the same buffer."""
    linear = ops.BasicLinear(K, K, device=device, dtype=DTYPE, accumulate_into_main_grad=True)
    exact_(linear.weight)
    linear.weight.main_grad = torch.ones(K, K, device=device)

    def twice(x):
        return linear(x) + linear(x * 2)

    x, dy = exact(8, K, device=device), exact(8, K, device=device)
    run = twice if call == "eager" else compiled(twice, call)
    run(x).backward(dy)
    assert torch.equal(linear.weight.main_grad.double(), 1 + 3 * wgrad(x, dy))


@pytest.mark.parametrize("call", FAST_CALLS)
def test_retain_graph_adds_twice(call, device):
    module = module_with_main_grad(device, oracle.HYBRID)
    x, dy = batch(device)
    y = call_of(module, call)(x)
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    assert torch.equal(module[0].weight.main_grad.double(), 1 + 2 * wgrad(x, dy))


@pytest.mark.parametrize("recipe", ["none", "hybrid", "dequantized"])
@pytest.mark.parametrize("call", FAST_CALLS)
def test_one_weight_twice_in_a_pipeline(call, recipe, device):
    """Values for which the second layer's operands are exact too."""
    first, second = (ops.BasicLinear(16, 16, device=device, accumulate_into_main_grad=True) for _ in range(2))
    second.weight = first.weight
    with torch.no_grad():
        first.weight.copy_(torch.eye(16).roll(1, 0))
        first.weight[0, 15] = 1.75
    first.weight.main_grad = torch.ones(16, 16, device=device)
    module = ops.Sequential(first, second, recipe=oracle.RECIPES[recipe])
    x, dy = (exact(8, 16, dtype=torch.float32, device=device).clamp(-1, 1) for _ in range(2))
    x[0, 3] = dy[0, 3] = 1.75
    call_of(module, call)(x).backward(dy)
    w = first.weight.detach().double()
    total = 1 + wgrad(x.double() @ w.t(), dy) + wgrad(x, dy.double() @ w)
    assert torch.equal(first.weight.main_grad.double(), total)
