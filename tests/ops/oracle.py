"""What a linear layer with bias must give under every recipe, worked out in float64. Shares no code with the library.

    y = q(x) @ q(w).T + b    dx = q(dy) @ q(w)    dw = q(dy).T @ q(x)    db = sum of dy

q is the table quantizer of `tests.oracle`; under a backward override the operands of dx and dw are the ones it names.

Shape legend: M = tokens, N = out features, K = in features.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp import recipe as recipes
from tests import oracle

ROLE_PARAMETERS = {"input": "fp8_quant_fwd_inp", "weight": "fp8_quant_fwd_weight", "grad_output": "fp8_quant_bwd_grad"}

HYBRID = recipes.Float8CurrentScaling()
E4M3 = recipes.Float8CurrentScaling(fp8_format=recipes.Format.E4M3)
HIGH_PRECISION_BACKWARD = recipes.Float8CurrentScaling(backward_override="high_precision")
DEQUANTIZED_BACKWARD = recipes.Float8CurrentScaling(backward_override="dequantized")

RECIPES = {
    "none": None,
    "hybrid": HYBRID,
    "e4m3": E4M3,
    "high_precision": HIGH_PRECISION_BACKWARD,
    "dequantized": DEQUANTIZED_BACKWARD,
}
"""The recipes that take another path through the code."""

SETTINGS = {
    **RECIPES,
    "power_2": recipes.Float8CurrentScaling(use_power_2_scales=True),
    "power_2_e4m3": recipes.Float8CurrentScaling(use_power_2_scales=True, fp8_format=recipes.Format.E4M3),
    "epsilon": recipes.Float8CurrentScaling(amax_epsilon=8.0),
    "roles": recipes.Float8CurrentScaling(
        fp8_quant_fwd_inp=recipes.QParams(power_2_scale=True),
        fp8_quant_fwd_weight=recipes.QParams(amax_epsilon=4.0),
        fp8_quant_bwd_grad=recipes.QParams(power_2_scale=True, amax_epsilon=16.0),
    ),
    "accumulators": recipes.Float8CurrentScaling(
        fp8_gemm_fprop=recipes.MMParams(use_split_accumulator=True),
        fp8_gemm_dgrad=recipes.MMParams(use_split_accumulator=False),
        fp8_gemm_wgrad=recipes.MMParams(use_split_accumulator=False),
    ),
    "high_precision_e4m3": recipes.Float8CurrentScaling(
        fp8_format=recipes.Format.E4M3, backward_override="high_precision"
    ),
    "dequantized_power_2": recipes.Float8CurrentScaling(use_power_2_scales=True, backward_override="dequantized"),
}
"""Every setting of a recipe at least once."""


class Near(NamedTuple):
    """A float64 value and how far from it a result may be."""

    value: Tensor
    bound: Tensor

    def check(self, result: Tensor, name: str) -> None:
        """Assert that `result` is near."""
        assert result.shape == self.value.shape, name
        error = (result.double() - self.value).abs()
        assert bool((error <= self.bound).all()), f"{name}: off by {(error - self.bound).max().item()} too much"


def dequantized(x: Tensor, recipe: recipes.Recipe, role: recipes.Role) -> Tensor:
    """`x` as the recipe's quantizer of this role leaves it, in float64: code times scale, not rounded."""
    hybrid = recipe.fp8_format is recipes.Format.HYBRID
    name = "E5M2" if hybrid and role == "grad_output" else "E4M3"
    own = getattr(recipe, ROLE_PARAMETERS[role])
    power_2 = recipe.use_power_2_scales if own is None else own.power_2_scale
    epsilon = recipe.amax_epsilon if own is None else own.amax_epsilon
    table, amax, x_cpu = oracle.TABLES[name], oracle.amax(x.cpu()), x.cpu()
    codes = oracle.cast(x_cpu, amax, table, power_2, epsilon)
    return (oracle.decode(codes, table) * oracle.scale(amax, table, power_2, epsilon).double()).to(x.device)


class Linear(NamedTuple):
    """One forward and backward of a linear layer."""

    y: Near
    dx: Near
    dw: Near
    db: Near


def linear(x: Tensor, w_NK: Tensor, b_N: Tensor | None, dy: Tensor, recipe: recipes.Recipe | None) -> Linear:
    """Outputs and gradients for inputs that all have one dtype.

    Args:
        x: `[..., K]`.
        w_NK: `[N, K]`.
        b_N: `[N]`; None: no bias.
        dy: `[..., N]`.
        recipe: None: high precision.
    """
    N, K = w_NK.shape
    M = math.prod(x.shape[:-1])
    x_MK, dy_MN = x.detach().reshape(M, K), dy.reshape(M, N)
    w_NK = w_NK.detach()
    dtype = x.dtype
    operands = {"input": x_MK.double(), "weight": w_NK.double(), "grad_output": dy_MN.double()}
    forward = dict(operands)
    if recipe is not None:
        forward = {
            "input": dequantized(x_MK, recipe, "input"),
            "weight": dequantized(w_NK, recipe, "weight"),
        }
        if recipe.backward_override is None:
            operands = {**forward, "grad_output": dequantized(dy_MN, recipe, "grad_output")}
        elif recipe.backward_override == "dequantized":
            operands = {**operands, **{role: value.to(dtype).double() for role, value in forward.items()}}
    product = _product(forward["input"], forward["weight"].t(), dtype, b_N, quantized=recipe is not None)
    y = Near(*(part.reshape(*x.shape[:-1], N) for part in product))
    backward = recipe is not None and recipe.backward_override is None
    dx = _product(operands["grad_output"], operands["weight"], dtype, quantized=backward)
    dx = Near(*(part.reshape(x.shape) for part in dx))
    dw = _product(operands["grad_output"].t(), operands["input"], dtype, quantized=backward)
    ones_M = torch.ones(1, dy_MN.shape[0], dtype=torch.float64, device=dy.device)
    db = Near(*(part[0] for part in _product(ones_M, dy_MN.double(), dtype)))
    return Linear(y, dx, dw, db)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None, *, quantized: bool = False) -> Near:
    """`a @ b + bias`, rounded once to `dtype`. Sums are in fp32; on CUDA, of 32 FP8 products at a time, in 14 bits."""
    value, magnitude = a @ b, a.abs() @ b.abs()
    if bias is not None:
        value, magnitude = value + bias.detach().double(), magnitude + bias.detach().double().abs()
    sum_eps = torch.finfo(torch.float32).eps * (a.shape[1] + 4)
    if quantized and a.device.type == "cuda":
        sum_eps += 2.0**-13 * math.ceil(a.shape[1] / 32)
    out = torch.finfo(dtype)
    return Near(value, value.abs() * out.eps / 2 + magnitude * sum_eps * (1 + out.eps) + out.smallest_normal * out.eps)


def override_gradients(x: Tensor, w_NK: Tensor, dy: Tensor, recipe: recipes.Recipe) -> tuple[Tensor, Tensor]:
    """dx and dw as plain torch computes them from the operands that the override saves; one dtype, bit for bit."""
    x_MK, w_NK, dy_MN = x.detach().flatten(0, -2), w_NK.detach(), dy.flatten(0, -2)
    if recipe.backward_override == "dequantized":
        x_MK, w_NK = (
            dequantized(operand, recipe, role).float().to(x.dtype)
            for operand, role in ((x_MK, "input"), (w_NK, "weight"))
        )
    return F.linear(dy_MN, w_NK.t()).reshape(x.shape), F.linear(dy_MN.t(), x_MK.t())
