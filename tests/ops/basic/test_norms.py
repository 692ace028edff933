"""LayerNorm, RMSNorm and L2Normalization over shapes, dtypes and options, against float64."""

import copy

import pytest
import torch

import lowp
from lowp import ops
from tests.ops import normal, oracle
from tests.ops.graphs import Graphs, lowp_ops
from tests.ops.pipelines import BOUNDARIES, compiled, same, step

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(7, 2), (32,), (19,), (64,)]
INPUTS = [(), (6,), (2, 3)]
KINDS = {"layer": ops.LayerNorm, "rms": ops.RMSNorm}


def build(kind, shape, device="cpu", **options):
    """A norm whose parameters are no constants."""
    if kind == "l2":
        return ops.L2Normalization()
    module = KINDS[kind](shape, device=device, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(shape))
    return module


def batch(leading, shape, dtype, device):
    x = (torch.randn(*leading, *shape, device=device) * 2 + 1).to(dtype).requires_grad_()
    return x, torch.randn(*leading, *shape, device=device).to(dtype)


def check(module, x, dy, call=None):
    results = step(call or module, module, x, dy)
    options = {"kind": module.kind, "eps": module.eps, "zero_centered": module.zero_centered_gamma}
    reference = normal.step(x, module.weight, module.bias, dy, axes=module.axes, **options)
    names = ["y", "dx"] + ["dw"] * (module.weight is not None) + ["db"] * (module.bias is not None)
    for name, result in zip(names, results, strict=True):
        reference[name].check(result, name)
    assert results[0].dtype == results[1].dtype == x.dtype


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_dtypes(kind, shape, dtype, zero_centered, device):
    for leading in INPUTS:
        for weight_dtype in {dtype, torch.float32}:
            module = build(kind, shape, device, dtype=weight_dtype, zero_centered_gamma=zero_centered)
            check(module, *batch(leading, shape, dtype, device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 19, 64])
def test_l2(size, dtype, device):
    for leading in INPUTS:
        check(ops.L2Normalization(1e-6), *batch(leading, (size,), dtype, device))


@pytest.mark.parametrize("options", [{"elementwise_affine": False}, {"bias": False}], ids=str)
def test_no_weight_or_bias(options, device):
    check(build("layer", (19,), device, **options), *batch((6,), (19,), torch.bfloat16, device))
    if "bias" not in options:
        check(build("rms", (19,), device, **options), *batch((6,), (19,), torch.bfloat16, device))


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, "l2"])
def test_compiled(kind, dtype, boundary, device):
    module = build(kind, (19,), device, **({} if kind == "l2" else {"zero_centered_gamma": True}))
    x, dy = batch((2, 3), (19,), dtype, device)
    call = compiled(module, boundary=boundary)
    check(module, x, dy, call)
    assert same(step(call, module, x, dy), step(module, module, x, dy))


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_inductor(boundary, device):
    module = ops.Sequential(build("layer", (7, 2), device), build("rms", (2,), device))
    x, dy = batch((5,), (7, 2), torch.bfloat16, device)
    assert same(step(compiled(module, "inductor", boundary), module, x, dy), step(module, module, x, dy))


def test_one_node_per_direction(device):
    module, graphs = build("layer", (32,), device), Graphs()
    x, dy = batch((5,), (32,), torch.bfloat16, device)
    step(graphs.compile(module), module, x, dy)
    assert lowp_ops(graphs.forward[0]) == ["Normalization_forward"]
    assert lowp_ops(graphs.backward[0]) == ["Normalization_backward"]


WANTED = [(i, w, b) for i in (0, 1) for w in (0, 1) for b in (0, 1) if i + w + b]


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_only_wanted_gradients(wanted, device):
    """Each against float64: without the input's gradient, sums over tokens may be made in another order."""
    module = build("layer", (19,), device)
    x, dy = batch((6,), (19,), torch.float32, device)
    reference = normal.step(x, module.weight, module.bias, dy, axes=1, kind="layer", eps=module.eps)
    for tensor, want in zip((x, module.weight, module.bias), wanted, strict=True):
        tensor.requires_grad_(bool(want))
    results = step(module, module, x, dy)
    for name, result, want in zip(("y", "dx", "dw", "db"), results, (1, *wanted), strict=True):
        assert (result is not None) == bool(want)
        if result is not None:
            reference[name].check(result, name)
    assert same(step(compiled(module), module, x, dy), results)


@pytest.mark.parametrize("shape", [(0, 19), (3, 0), (0,)], ids=str)
def test_no_elements(shape, device):
    module = build("layer", shape[-1:], device)
    x = torch.randn(shape, device=device, requires_grad=True)
    y, dx, dw, db = step(module, module, x)
    assert y.shape == dx.shape == shape
    assert torch.equal(dw, torch.zeros_like(dw))
    assert torch.equal(db, torch.zeros_like(db))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_starts_as_plain_normalization(kind, zero_centered, device):
    module = KINDS[kind](32, device=device, zero_centered_gamma=zero_centered)
    x = torch.randn(4, 32, device=device)
    native = {"layer": torch.nn.LayerNorm, "rms": torch.nn.RMSNorm}[kind](32, eps=module.eps, device=device)
    torch.testing.assert_close(module(x), native(x))


@pytest.mark.parametrize("options", [{}, {"elementwise_affine": False}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_are_those_of_torch(kind, options, device):
    native = {"layer": torch.nn.LayerNorm, "rms": torch.nn.RMSNorm}[kind]((7, 2), eps=1e-5, device=device, **options)
    module = KINDS[kind]((7, 2), device=device, **options)
    for parameter in native.parameters():
        torch.nn.init.normal_(parameter)
    module.load_state_dict(native.state_dict(), strict=True)
    native.load_state_dict(module.state_dict(), strict=True)
    x = torch.randn(4, 7, 2, device=device)
    torch.testing.assert_close(module(x), native(x))


@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_the_recipe_does_not_change_a_norm_alone(recipe, device):
    module = build("rms", (32,), device)
    x, dy = batch((8,), (32,), torch.float32, device)
    recipe = oracle.RECIPES[recipe]
    within = lowp.autocast(enabled=recipe is not None, recipe=recipe)
    assert same(step(module, module, x, dy, within=within), step(module, module, x, dy))


@pytest.mark.parametrize("call", ["eager", *BOUNDARIES])
def test_under_torch_autocast_the_output_has_its_dtype(call, device):
    module = build("layer", (32,), device)
    x = torch.randn(8, 32, device=device, requires_grad=True)
    run = module if call == "eager" else compiled(module, boundary=call)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = run(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, module(x).bfloat16())
    y.sum().backward()
    assert (x.grad.dtype, module.weight.grad.dtype) == (torch.float32, torch.float32)


def test_parameters_of_split_tokens_are_marked():
    module = ops.LayerNorm(8, sequence_parallel=True)
    for other in (
        module,
        copy.deepcopy(module),
        ops.LayerNorm(8, sequence_parallel=True, device="meta").to_empty(device="cpu"),
    ):
        assert [parameter.sequence_parallel for parameter in other.parameters()] == [True, True]
    assert not hasattr(ops.LayerNorm(8).weight, "sequence_parallel")


def test_strides_of_the_input_do_not_matter(device):
    module = build("layer", (32,), device)
    base = torch.randn(32, 24, device=device, dtype=torch.bfloat16)
    for x in (base.t(), torch.cat([base, base]).t()[:, ::2], base[:, :1].t().expand(24, 32)):
        strided = x.detach().requires_grad_()
        assert same(step(module, module, strided), step(module, module, x.contiguous().requires_grad_()))


def test_errors(device):
    with pytest.raises(ValueError, match=r"LayerNorm: the input's last axes must be \(7, 2\), got \(4, 2, 7\)"):
        ops.LayerNorm((7, 2), device=device)(torch.zeros(4, 2, 7, device=device))
    with pytest.raises(ValueError, match=r"RMSNorm: the input's last axes must be \(4,\), got \(\)"):
        ops.RMSNorm(4, device=device)(torch.zeros((), device=device))
    with pytest.raises(TypeError, match=r"RMSNorm: the input must be one of .*, got torch.float64"):
        ops.RMSNorm(4, device=device)(torch.zeros(4, device=device, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"LayerNorm: normalized_shape must name at least one axis"):
        ops.LayerNorm(())
    with pytest.raises(ValueError, match=r"LayerNorm: eps must be finite and >= 0, got -1"):
        ops.LayerNorm(4, eps=-1)
    with pytest.raises(ValueError, match=r"L2Normalization: the input's last axes must be there"):
        ops.L2Normalization()(torch.zeros((), device=device))
