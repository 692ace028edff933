"""`fp8_output`: outputs that leave a module quantized, and stay differentiable."""

import pytest
import torch

import lowp
from tests.modules.cases import K, N, batch, call_of, randomize, same, step
from tests.modules.pairwise import sampled
from tests.ops import oracle

DTYPE = torch.bfloat16
CALLS = ["eager", "aot_eager", "kernel", "inductor"]
MODULES = {
    "linear": lambda **kwargs: lowp.Linear(K, N, **kwargs),
    "norm_linear": lambda **kwargs: lowp.LayerNormLinear(K, N, **kwargs),
}


def build(name, device, recipe="hybrid", **kwargs):
    module = MODULES[name](device=device, dtype=DTYPE, recipe=oracle.RECIPES[recipe], **kwargs)
    randomize(module)
    return module


@sampled(leading=[(), (0,), (7,), (2, 3)], call=CALLS, name=list(MODULES))
def test_codes_are_those_of_the_output(leading, call, name, device):
    module = build(name, device)
    x = batch(*leading, device=device)
    y = module(x)
    expected = lowp.quantize(y.detach(), oracle.HYBRID.quantizer("input"))
    with torch.no_grad():
        inferred = call_of(lambda x: module(x, fp8_output=True), call)(x)
    for output in (call_of(lambda x: module(x, fp8_output=True), call)(x), inferred):
        assert isinstance(output, lowp.QuantizedOutput)
        assert torch.equal(output.data.view(torch.uint8), expected.row_data.view(torch.uint8))
        assert torch.equal(output.scale, expected.row_scale)
        assert (output.anchor.shape, output.anchor.dtype) == (y.shape, y.dtype)
        assert output.anchor.untyped_storage().nbytes() <= y.element_size()
        assert not output.data.requires_grad
        assert not output.scale.requires_grad
    assert not inferred.anchor.requires_grad


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("call", CALLS)
def test_the_gradient_passes_through(call, name, device):
    """In every mix: dequantized inside the graph, or outside."""
    module = build(name, device)
    x, dy = batch(7, device=device), torch.randn(7, N, device=device, dtype=DTYPE)
    expected = step(module, module, x, dy)
    inside = call_of(lambda x: module(x, fp8_output=True).dequantize(), call)
    quantized = call_of(lambda x: module(x, fp8_output=True), call)
    for run in (inside, lambda x: quantized(x).dequantize()):
        results = step(run, module, x, dy)
        y = results.pop("y0")
        assert ((y - expected["y0"]).abs() <= expected["y0"].abs() * 2.0**-4 + y.abs().max() * 2.0**-9).all()
        assert same({"y0": None, **results}, {**expected, "y0": None})


def test_a_loss_on_the_anchor_alone(device):
    module = build("linear", device)
    x = batch(7, device=device)
    output = module(x, fp8_output=True)
    dy = torch.randn(7, N, device=device, dtype=DTYPE)
    output.anchor.backward(dy)
    assert torch.equal(x.grad, step(module, module, x, dy)["dx"])


def test_beside_other_outputs(device):
    module = build("norm_linear", device, return_layernorm_output=True, return_bias=True)
    output, bias, norm_output = module(batch(7, device=device), fp8_output=True)
    assert isinstance(output, lowp.QuantizedOutput)
    assert bias is module.bias
    assert norm_output.shape == (7, K)


@pytest.mark.parametrize("name", MODULES)
def test_it_takes_a_recipe(name, device):
    module = build(name, device, "none")
    with pytest.raises(ValueError, match=r"fp8_output needs a recipe\. Call it under lowp.autocast"):
        module(batch(7, device=device), fp8_output=True)
    with lowp.autocast():
        module(batch(7, device=device), fp8_output=True)
