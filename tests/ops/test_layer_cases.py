"""Faults that users met in norms, activations and residual branches. Each test is named after the case's number."""

import pytest
import torch
import torch.nn.functional as F

from lowp import ops
from tests.ops import normal, oracle
from tests.ops.pipelines import compiled, same_or_absent, step, step_of
from tests.ops.timing import device_ms

BF16 = torch.bfloat16
CALLS = ["eager", "aot_eager"]


def call_of(function, call):
    return function if call == "eager" else compiled(function)


# ---- 24: an in-place backward overwrites a gradient that the residual branch needs too


def residual_model(style, device, recipe):
    """h = x + norm2(f(norm1(x))): the branch as an extra output, as an extra input, or outside of the pipeline."""
    inner = [
        ops.RMSNorm(32, device=device, dtype=BF16),
        ops.BasicLinear(32, 64, device=device, dtype=BF16),
        ops.Bias(64, device=device, dtype=BF16),
        ops.SwiGLU(),
        ops.BasicLinear(32, 32, device=device, dtype=BF16),
        ops.LayerNorm(32, device=device, dtype=BF16),
    ]
    recipe = oracle.RECIPES[recipe]
    if style == "extra output":
        module = ops.Sequential(ops.MakeExtraOutput(), *inner, recipe=recipe)
        return module, lambda x: torch.add(*module(x))
    if style == "extra input":
        module = ops.Sequential(*inner, ops.AddExtraInput(), recipe=recipe)
        return module, lambda x: module(x, x)
    module = ops.Sequential(*inner, recipe=recipe)
    return module, lambda x: x + module(x)


@pytest.mark.parametrize("recipe", ["none", "hybrid", "dequantized"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("style", ["extra output", "extra input", "outside"])
def test_case_24_a_gradient_is_never_overwritten(style, call, recipe, device):
    torch.manual_seed(1)
    module, function = residual_model(style, device, recipe)
    torch.manual_seed(1)
    native, plain = residual_model("outside", device, recipe)
    x = torch.randn(4, 5, 32, device=device, dtype=BF16, requires_grad=True)
    dy = torch.randn_like(x)
    kept = dy.clone()
    run = call_of(function, call)
    first = step(run, module, x, dy)
    second = step(run, module, x, dy)
    assert torch.equal(dy, kept)
    assert same_or_absent(first, second)
    reference = step(plain, native, x, dy)
    for result, other in zip(first, reference, strict=True):  # a sum is rounded in another place
        assert (result.double() - other.double()).norm() <= 2 * torch.finfo(BF16).eps * other.double().norm()


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
@pytest.mark.parametrize("call", CALLS)
def test_case_24_a_gradient_used_twice_by_the_caller(call, recipe, device):
    """One tensor as the gradient of both outputs."""
    module = ops.Sequential(
        ops.MakeExtraOutput(), ops.LayerNorm(32, device=device), ops.MakeExtraOutput(), ops.ReLU(), ops.Dropout(),
        recipe=oracle.RECIPES[recipe],
    )  # fmt: skip
    x = torch.randn(4, 32, device=device, requires_grad=True)
    dy = torch.randn_like(x)
    kept = dy.clone()
    run = call_of(module, call)
    results = [step_of(run, module, [x], [dy, dy, dy]) for _ in range(3)]
    assert torch.equal(dy, kept)
    assert all(same_or_absent(other, results[0]) for other in results)


# ---- 25: zero-centered gamma, in forward and in dx


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("call", CALLS)
def test_case_25_zero_centered_gamma(call, kind, zero_centered, device):
    module = {"rms": ops.RMSNorm, "layer": ops.LayerNorm}[kind](8, device=device, zero_centered_gamma=zero_centered)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    dy = torch.randn_like(x)
    results = step(call_of(module, call), module, x, dy)
    leaves = [t.detach().double().requires_grad_() for t in (x, *module.parameters())]
    x64, w, *b = leaves
    y = normal.normalized(x64, 1 + w if zero_centered else w, b[0] if b else None, kind, module.eps)
    y.backward(dy.double())
    for result, reference in zip(results, [y.detach(), *[leaf.grad for leaf in leaves]], strict=True):
        torch.testing.assert_close(result.double(), reference, rtol=1e-5, atol=1e-5)


# ---- 27: rows without variance


@pytest.mark.parametrize("value", [3.0, 0.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_case_27_constant_rows(dtype, value, device):
    layer, rms = ops.LayerNorm(64, device=device), ops.RMSNorm(64, device=device)
    for parameter in (*layer.parameters(), *rms.parameters()):
        torch.nn.init.normal_(parameter)
    x = torch.full((4, 64), value, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn(4, 64, device=device).to(dtype)
    y, *gradients = step(layer, layer, x, dy)
    assert torch.equal(y, layer.bias.detach().to(dtype).expand(4, 64))
    y, *more = step(rms, rms, x, dy)
    x64 = x.detach().double()
    expected = rms.weight.detach().double() * x64 / (x64.square() + rms.eps).sqrt()
    eps = torch.finfo(dtype).eps / 2 + 80 * torch.finfo(torch.float32).eps
    assert bool(((y.double() - expected).abs() <= expected.abs() * eps).all())
    assert value != 0 or not y.any()
    assert all(gradient.isfinite().all() for gradient in (*gradients, *more))
    l2 = step(ops.L2Normalization(), rms, x, dy)
    assert all(t.isfinite().all() for t in l2[:2])


# ---- 28: many features, few, and no powers of two


@pytest.mark.parametrize("K", [1, 3, 17, 127, 768, 5120, 7168, 12288, 16385, 65536, 131072])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_case_28_any_number_of_features(recipe, kind, K, device):
    norm = {"rms": ops.RMSNorm, "layer": ops.LayerNorm}[kind](K, device=device, dtype=BF16)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, K, device=device, dtype=BF16, requires_grad=True)
    if recipe == "none":
        dy = torch.randn_like(x)
        reference = normal.step(x, norm.weight, norm.bias, dy, kind=kind, eps=norm.eps)
        names = ["y", "dx", "dw"] + ["db"] * (kind == "layer")
        for name, result in zip(names, step(norm, norm, x, dy), strict=True):
            reference[name].check(result, name)
        return
    linear = ops.BasicLinear(K, 8, device=device, dtype=BF16)
    module = ops.Sequential(norm, linear, recipe=oracle.HYBRID)
    alone = torch.nn.Sequential(*[ops.Sequential(op, recipe=oracle.HYBRID) for op in module])
    assert same_or_absent(step(module, module, x), step(alone, module, x))


# ---- 73, 74: device time


@pytest.mark.gpu
@pytest.mark.timed
def test_case_73_a_compiled_norm_costs_the_device_no_more():
    module = ops.RMSNorm(5120, device="cuda", dtype=BF16)
    x = torch.randn(9450, 5120, device="cuda", dtype=BF16)
    run = torch.compile(module, fullgraph=True)
    with torch.no_grad():
        eager, whole = device_ms(lambda: module(x), lambda: run(x))
    assert whole <= 1.1 * eager


@pytest.mark.gpu
@pytest.mark.timed
@pytest.mark.parametrize("compiled_too", [False, True])
def test_case_74_swiglu_is_not_slower_than_inductors(compiled_too):
    module = ops.SwiGLU()
    x = torch.randn(3072, 2 * 12288, device="cuda", dtype=BF16, requires_grad=True)
    dy = torch.randn(3072, 12288, device="cuda", dtype=BF16)

    def native(x):
        a, b = x.chunk(2, dim=-1)
        return F.silu(a) * b

    ours = torch.compile(module, fullgraph=True) if compiled_too else module
    inductor = torch.compile(native, fullgraph=True)
    mine, theirs = device_ms(
        lambda: torch.autograd.grad(ours(x), x, dy),
        lambda: torch.autograd.grad(inductor(x), x, dy),
    )
    assert mine <= 1.05 * theirs
