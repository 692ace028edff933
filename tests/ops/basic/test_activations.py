"""The activations as operations, each with its backward and with the one that the bias before it is summed in."""

import pytest
import torch
import torch.nn.functional as F

from lowp import ops
from tests.ops import oracle
from tests.ops.graphs import CountOps, Graphs, lowp_ops
from tests.ops.pipelines import BOUNDARIES, compiled, rules, same, same_or_absent, step, step_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLASSES = {cls.__name__: cls for cls in ops.ACTIVATION_CLASSES}
K = 24


def clamped(a, b, limit=7.0, alpha=1.702, offset=1.0):
    c = a.clamp(max=limit)
    return c * torch.sigmoid(alpha * c) * (b.clamp(-limit, limit) + offset)


def qgelu(x):
    return x * torch.sigmoid(1.702 * x)


def gelu(x):
    return F.gelu(x, approximate="tanh")


FORMULAS = {
    "GELU": gelu,
    "GEGLU": lambda a, b: gelu(a) * b,
    "GLU": lambda a, b: torch.sigmoid(a) * b,
    "QGELU": qgelu,
    "QGEGLU": lambda a, b: qgelu(a) * b,
    "ReLU": F.relu,
    "ReGLU": lambda a, b: F.relu(a) * b,
    "SReLU": lambda x: F.relu(x).square(),
    "SReGLU": lambda a, b: F.relu(a).square() * b,
    "SiLU": F.silu,
    "SwiGLU": lambda a, b: F.silu(a) * b,
    "ClampedSwiGLU": clamped,
}


def batch(name, device, dtype=torch.bfloat16, leading=(2, 5)):
    """The input and the gradient of the output."""
    size = (1 + CLASSES[name]().gated) * K
    x = (torch.randn(*leading, size, device=device) * 3).to(dtype).requires_grad_()
    return x, torch.randn(*leading, K, device=device).to(dtype)


def check(name, module, x, dy, call=None, **params):
    """One step against float64: rounded once from fp32, in which a few steps are off by a unit or two each."""
    y, dx = step(call or module, module, x, dy)
    x64 = x.detach().double().requires_grad_()
    y64 = FORMULAS[name](*(x64.chunk(2, -1) if module.gated else (x64,)), **params)
    y64.backward(dy.double())
    largest = (1 + x64.detach().abs().amax(-1, keepdim=True)) ** 3
    for result, value, scale in (
        (y, y64.detach(), largest),
        (dx, x64.grad, largest * (1 + dy.double().abs().amax(-1, keepdim=True))),
    ):
        info = torch.finfo(x.dtype)
        bound = value.abs() * info.eps / 2 + scale * 8 * torch.finfo(torch.float32).eps + info.smallest_normal
        oracle.Near(value, bound).check(result, name)
        assert result.dtype == x.dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CLASSES)
def test_values_and_gradients(name, dtype, device):
    for leading in ((), (5,), (2, 5), (0,)):
        check(name, CLASSES[name](), *batch(name, device, dtype, leading))


def test_every_entry_of_the_table_is_a_class():
    from lowp.kernels.activations import ACTIVATIONS

    assert sorted(cls.entry for cls in CLASSES.values()) == sorted(ACTIVATIONS)
    assert CLASSES.keys() == FORMULAS.keys()


@pytest.mark.parametrize("call", ["eager", *BOUNDARIES])
def test_parameters(call, device):
    params = {"limit": 2.0, "alpha": 1.0, "glu_linear_offset": 0.5}
    module = ops.ClampedSwiGLU(params)
    run = module if call == "eager" else compiled(module, boundary=call)
    check("ClampedSwiGLU", module, *batch("ClampedSwiGLU", device), run, limit=2.0, alpha=1.0, offset=0.5)
    assert str(module) == "ClampedSwiGLU(limit=2.0, alpha=1.0, glu_linear_offset=0.5)"


@pytest.mark.parametrize("name", CLASSES)
def test_compiled_equals_eager(name, device):
    module = CLASSES[name]()
    x, dy = batch(name, device)
    boundary = BOUNDARIES[sorted(CLASSES).index(name) % 2]
    assert same(step(compiled(module, boundary=boundary), module, x, dy), step(module, module, x, dy))


@pytest.mark.parametrize("name", ["GELU", "SwiGLU"])
def test_inductor(name, device):
    module = CLASSES[name]()
    x, dy = batch(name, device)
    assert same(step(compiled(module, "inductor"), module, x, dy), step(module, module, x, dy))


def test_named_and_generic_classes_are_one_operation(device):
    x, dy = batch("SwiGLU", device)
    generic = ops.Activation("swiglu")
    assert same(step(generic, generic, x, dy), step(ops.SwiGLU(), generic, x, dy))
    graphs = Graphs()
    step(graphs.compile(ops.SwiGLU()), generic, x, dy)
    assert lowp_ops(graphs.forward[0]) == ["Activation_forward"]
    assert lowp_ops(graphs.backward[0]) == ["Activation_backward"]
    assert str(generic) == "Activation('swiglu')"


def test_errors(device):
    with pytest.raises(ValueError, match=r"activation must be one of gelu, .*, got 'tanh'"):
        ops.Activation("tanh")
    with pytest.raises(ValueError, match=r"silu has no parameters, got 'limit'"):
        ops.SiLU({"limit": 1.0})
    with pytest.raises(ValueError, match=r"SwiGLU: the input's last axis must have an even size, got \(4, 3\)"):
        ops.SwiGLU()(torch.zeros(4, 3, device=device))
    with pytest.raises(ValueError, match=r"GELU: the input must have an axis, got \(\)"):
        ops.GELU()(torch.zeros((), device=device))
    with pytest.raises(TypeError, match=r"GELU: the input must be one of .*, got torch.float64"):
        ops.GELU()(torch.zeros(4, device=device, dtype=torch.float64))


@pytest.mark.parametrize("call", ["eager", "operation"])
def test_under_torch_autocast_the_output_has_its_dtype(call, device):
    module = ops.SwiGLU()
    x = torch.randn(4, 16, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = (module if call == "eager" else compiled(module))(x)
    assert torch.equal(y, module(x).bfloat16())
    y.sum().backward()
    assert x.grad.dtype == torch.float32


# ---- between layers


def layers(name, device, recipe, bias=True, dtype=torch.bfloat16):
    """fc1, perhaps with bias, the activation, fc2."""
    size = (1 + CLASSES[name]().gated) * 32
    steps = [ops.BasicLinear(16, size, device=device, dtype=dtype)]
    if bias:
        steps.append(ops.Bias(size, device=device, dtype=dtype))
        torch.nn.init.normal_(steps[1].bias)
    steps += [CLASSES[name](), ops.BasicLinear(32, 16, device=device, dtype=dtype)]
    return ops.Sequential(*steps, recipe=oracle.RECIPES[recipe])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("name", CLASSES)
def test_bit_for_bit_the_operations_one_by_one(name, recipe, bias, device):
    """Quantized as they are made, the values are those of the unfused pipeline."""
    with rules(lambda rule: "Linear" not in rule.fused.__name__):
        module = layers(name, device, recipe, bias)
    assert not bias or "BackwardBiasActivation[1..2]" in module.plan
    alone = torch.nn.Sequential(*[ops.Sequential(op, recipe=module.recipe) for op in module])
    x = torch.randn(3, 7, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    for _ in range(3):
        assert same(step(module, module, x, dy), step(alone, module, x, dy))


@pytest.mark.parametrize("wanted", [(i, w, b) for i in (0, 1) for w in (0, 1) for b in (0, 1)], ids=str)
@pytest.mark.parametrize("call", ["eager", "operation"])
@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_gradients_on_and_off(recipe, call, wanted, device):
    """Of the input, of fc1's weight, of its bias."""
    module = layers("SwiGLU", device, recipe)
    x = torch.randn(7, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    everything = step_of(module, module, [x])
    for tensor, want in zip((x, module[0].weight, module[1].bias), wanted, strict=True):
        tensor.requires_grad_(bool(want))
    run = module if call == "eager" else compiled(module)
    y, dx, dw, db, dw2 = everything
    expected = [y, *[g if w else None for g, w in zip((dx, dw, db), wanted, strict=True)], dw2]
    assert same(step_of(run, module, [x]), expected)


COUNTS = {
    "none": ({"materialize": 1, "gemm": 2}, {"materialize": 1, "bias_grad": 1, "gemm": 4}),
    "hybrid": ({"cast": 4, "scaled_gemm": 2}, {"cast": 3, "cast_bias_grad": 1, "scaled_gemm": 4}),
    "high_precision": (
        {"materialize": 1, "cast": 4, "scaled_gemm": 2},
        {"materialize": 1, "bias_grad": 1, "gemm": 4},
    ),
}
"""The operators that run in each direction: under a recipe, no activated value is ever written."""


@pytest.mark.parametrize("recipe", COUNTS)
def test_what_runs(recipe, device):
    module = layers("SwiGLU", device, recipe)
    x = torch.randn(7, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    with CountOps() as forward:
        y = module(x)
    with CountOps() as backward:
        y.backward(torch.ones_like(y))
    assert (dict(forward.counts), dict(backward.counts)) == COUNTS[recipe]


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("recipe", ["none", "hybrid", "dequantized"])
@pytest.mark.parametrize("name", ["GELU", "ClampedSwiGLU"])
def test_layers_compiled(name, recipe, boundary, device):
    module = layers(name, device, recipe)
    x = torch.randn(7, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    assert same_or_absent(step(compiled(module, boundary=boundary), module, x), step(module, module, x))
