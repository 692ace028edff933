"""Faults that were found by using the library in ways that its own tests had not: each stays found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowp
from lowp import ops
from lowp.recipe import Float8CurrentScaling, Format

RECIPE = Float8CurrentScaling()


@pytest.mark.parametrize("features", [25, 32, 48])
def test_a_wrong_size_does_not_hide_behind_quantize(features):
    module = ops.Sequential(ops.Quantize(), ops.BasicLinear(30, 16), recipe=RECIPE)
    with pytest.raises(ValueError, match="must have 30 elements"):
        module(torch.randn(8, features))


@pytest.mark.parametrize("shape", [(30,), (2, 4, 30), (2, 0, 30)])
@pytest.mark.parametrize("forward", [False, True])
def test_a_gradient_is_quantized_whatever_its_leading_axes(shape, forward):
    module = ops.Sequential(ops.BasicLinear(30, 16), ops.Quantize(forward, True), recipe=RECIPE)
    x = torch.randn(shape, requires_grad=True)
    module(x).sum().backward()
    flat = x.detach().reshape(-1, 30).requires_grad_()
    module(flat).sum().backward()
    assert torch.equal(x.grad.reshape(-1, 30), flat.grad)


def test_autocast_takes_its_recipe_by_name_only():
    with pytest.raises(TypeError, match="Pass recipe="):
        lowp.autocast(Float8CurrentScaling(fp8_format=Format.E4M3))


def test_fp64_runs_in_both_directions():
    layer = ops.Linear(8, 4).double()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)
    layer(x).sum().backward()
    assert layer.bias.grad.dtype == torch.float64


class _Doubled(ops.Linear):
    def forward(self, input_):
        return 2 * super().forward(input_)


def test_a_forward_of_ones_own_is_called():
    layer = _Doubled(4, 5)
    x = torch.randn(3, 4)
    assert torch.equal(ops.Sequential(layer)(x), layer(x))
    plain = ops.Linear(4, 5)
    pipeline = ops.Sequential(plain)
    expected = 2 * pipeline(x)
    original = plain.forward
    plain.forward = lambda input_: 2 * original(input_)
    assert torch.equal(pipeline(x), expected)


def test_a_module_written_into_the_modules_is_the_one_that_runs():
    pipeline = ops.Sequential(ops.BasicLinear(4, 4))
    pipeline._modules["0"] = new = ops.BasicLinear(4, 4)
    x = torch.randn(2, 4)
    assert torch.equal(pipeline(x), new(x))


def test_a_hook_changes_no_numbers():
    module = ops.Sequential(ops.BasicLinear(16, 16), nn.Sequential(ops.Linear(16, 16)), recipe=RECIPE)
    x = torch.randn(4, 16)
    expected = module(x)
    module[0].register_forward_hook(lambda *_: None)
    assert torch.equal(module(x), expected)


def test_the_output_can_be_changed_in_place_behind_a_view_inside():
    module = ops.Sequential(ops.BasicLinear(6, 6), ops.Reshape((-1, 3)), ops.Quantize())
    module(torch.randn(4, 6)).relu_().sum().backward()
    assert module[0].weight.grad is not None


def test_a_bias_is_neither_added_nor_removed():
    for layer, value in ((ops.Linear(4, 5), None), (ops.Linear(4, 5, bias=False), nn.Parameter(torch.zeros(5)))):
        with pytest.raises(ValueError, match="neither added nor removed"):
            layer.bias = value


def test_linear_under_torch_autocast_gives_its_dtype_as_torchs_does():
    layer, plain = ops.Linear(16, 8), nn.Linear(16, 8)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = layer(x), plain(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)
    y.float().sum().backward()
    assert layer.bias.grad.dtype == torch.float32


def test_a_parametrization_is_not_evaluated_in_backward():
    class Counted(nn.Module):
        calls = 0

        def forward(self, weight):
            Counted.calls += 1
            return weight * 1

    linear = ops.BasicLinear(8, 8)
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", Counted())
    y = linear(torch.randn(2, 8))
    before = Counted.calls
    y.sum().backward()
    assert Counted.calls == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp8_gemm_fprop", True),
        ("fp8_quant_fwd_inp", 0.5),
        ("amax_epsilon", "0.1"),
        ("use_power_2_scales", "yes"),
    ],
)
def test_a_recipes_arguments_have_types(name, value):
    with pytest.raises(TypeError, match=f"{name} must be"):
        Float8CurrentScaling(**{name: value})


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own use
def test_forward_mode_differentiation_is_refused():
    layer = ops.Sequential(ops.BasicLinear(8, 4), ops.Bias(4)).requires_grad_(False)
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(layer, (torch.ones(2, 8),), (torch.ones(2, 8),))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        layer(torch.autograd.forward_ad.make_dual(torch.ones(2, 8), torch.ones(2, 8)))
