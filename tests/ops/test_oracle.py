"""Linear + Bias against the float64 oracle, and against numbers of another library."""

import pytest
import torch

import lowp
from lowp import ops
from tests.goldens import goldens
from tests.ops import oracle


def run(x, w_NK, b_N, dy, recipe, device):
    """One forward and backward of Linear + Bias: y, dx, dw, db."""
    N, K = w_NK.shape
    linear = ops.BasicLinear(K, N, device=device, dtype=w_NK.dtype)
    bias = ops.Bias(N, device=device, dtype=b_N.dtype)
    with torch.no_grad():
        linear.weight.copy_(w_NK)
        bias.bias.copy_(b_N)
    x = x.detach().clone().requires_grad_()
    y = ops.Sequential(linear, bias, recipe=recipe)(x)
    y.backward(dy)
    return y.detach(), x.grad, linear.weight.grad, bias.bias.grad


@pytest.mark.parametrize("setting", oracle.SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(32, 48, 64), (30, 35, 17), (1, 16, 8)], ids=str)
def test_every_setting(setting, dtype, shape, device):
    M, N, K = shape
    recipe = oracle.SETTINGS[setting]
    x, w_NK, b_N, dy = (torch.randn(*s, dtype=dtype, device=device) for s in ((M, K), (N, K), (N,), (M, N)))
    reference = oracle.linear(x, w_NK, b_N, dy, recipe)
    for name, result in zip(reference._fields, run(x, w_NK, b_N, dy, recipe, device), strict=True):
        getattr(reference, name).check(result, name)
        assert result.dtype == dtype


@pytest.mark.parametrize("setting", ["power_2", "epsilon", "roles"])
def test_settings_are_not_without_effect(setting, device):
    x, w_NK, b_N, dy = (torch.randn(*s, device=device) for s in ((32, 64), (48, 64), (48,), (32, 48)))
    default = run(x, w_NK, b_N, dy, oracle.HYBRID, device)
    other = run(x, w_NK, b_N, dy, oracle.SETTINGS[setting], device)
    assert not any(torch.equal(a, b) for a, b in zip(default[:3], other[:3], strict=True))


TE_RECIPES = {
    "bf16": (None, 1.5e-3, 1.5e-3),
    "current": (oracle.HYBRID, 1.5e-3, 1.5e-3),
    "current_e4m3": (oracle.E4M3, 1.5e-3, 1.5e-3),
    "current_hp_bwd": (oracle.HIGH_PRECISION_BACKWARD, 1.5e-3, 1.5e-3),
    "current_dq_bwd": (oracle.DEQUANTIZED_BACKWARD, 1.5e-3, 5e-4),
}
"""How near TE's numbers are (relative L2, outputs and gradients); the unquantized result is 2e-2 and more away."""


def relative_l2(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("te_recipe", TE_RECIPES)
@pytest.mark.parametrize("module", ["linear_bias", "ops_linear_bias"])
def test_transformer_engine(module, te_recipe, device):
    recipe, output_bound, gradient_bound = TE_RECIPES[te_recipe]
    weight, bias = ("0.weight", "1.bias") if module == "ops_linear_bias" else ("weight", "bias")
    numbers = {key: value.to(device) for key, value in goldens().items() if key.startswith(f"module/{module}/")}
    step = f"module/{module}/{te_recipe}/step0"
    y, dx, dw, db = run(
        numbers[f"{step}/x"],
        numbers[f"module/{module}/param/{weight}"],
        numbers[f"module/{module}/param/{bias}"],
        numbers[f"{step}/gy0"],
        recipe,
        device,
    )
    assert relative_l2(y, numbers[f"{step}/y0"]) <= output_bound
    for name, result in (("dx", dx), (f"grad/{weight}", dw), (f"grad/{bias}", db)):
        assert relative_l2(result, numbers[f"{step}/{name}"]) <= gradient_bound, name


@pytest.mark.parametrize("te_recipe", ["current", "current_e4m3", "current_dq_bwd"])
def test_transformer_engine_is_far_from_the_unquantized_result(te_recipe):
    step = f"module/linear_bias/{te_recipe}/step0"
    plain = "module/linear_bias/bf16/step0"
    assert relative_l2(goldens()[f"{step}/y0"], goldens()[f"{plain}/y0"]) > 1e-2


def test_autocast_equals_the_recipe_argument(device):
    x, w_NK, b_N, dy = (torch.randn(*s, device=device) for s in ((32, 64), (48, 64), (48,), (32, 48)))
    inside = run(x, w_NK, b_N, dy, oracle.E4M3, device)
    with lowp.autocast(recipe=oracle.E4M3):
        ambient = run(x, w_NK, b_N, dy, None, device)
    assert all(torch.equal(a, b) for a, b in zip(inside, ambient, strict=True))
