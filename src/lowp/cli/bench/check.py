"""Results are checked before anything is timed, against the same module in fp32.

    error = |actual - expected| / |expected| in the L2 norm
    bound = (sqrt(eps_a^2 + eps_b^2) / sqrt(12) + eps_bf16) * linear layers     for operands of formats a and b

Rounding to nearest is off by at most half of the format's eps, relative to the value, and evenly spread: its root mean
square is at most eps / sqrt(12). Errors of different values are independent, so a sum's relative error is no larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowp.cli.bench.cases import ModuleCase
from lowp.recipe import Recipe, Role

_BF16_EPS = torch.finfo(torch.bfloat16).eps


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """`|actual - expected| / |expected|` in the L2 norm, in fp32."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def results(module: nn.Module, function: Callable[[Tensor], Any], x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Output and gradients of one forward and backward: `output`, `input`, and `parameter i` in order."""
    x = x.detach().requires_grad_()
    output = function(x)
    output.backward(dy)
    found = {"output": output.detach(), "input": x.grad}
    for index, parameter in enumerate(module.parameters()):
        found[f"parameter {index}"] = parameter.grad
        parameter.grad = None
    return {name: value.detach().clone() for name, value in found.items() if value is not None}


def bound(name: str, expected: Tensor, case: ModuleCase, recipe: Recipe | None) -> float:
    """The largest relative error that a result may have.

    Args:
        name: of the result, as `results` gives it.
        expected: the result in fp32. The gradient of an only layer's bias is of values that are not quantized; those of
            a norm's parameters are of dgrad's, as the input's is.
        case: errors of one linear layer pass through the next, so the bound grows with their number.
        recipe: None: bf16.
    """
    roles: dict[str, tuple[Role, Role]] = {"output": ("input", "weight"), "input": ("grad_output", "weight")}
    roles |= {f"parameter {index}": roles["input"] for index in range(case.norm_parameters)}
    operands = roles.get(name, ("grad_output", "input"))
    bias_alone = expected.ndim == 1 and len(case.layers) == 1 and name not in roles
    if recipe is None or bias_alone:
        return _BF16_EPS * len(case.layers)
    eps = [recipe.quantizer(role).fmt.eps for role in operands]
    return (math.hypot(*eps) / math.sqrt(12) + _BF16_EPS) * len(case.layers)


def errors(
    actual: dict[str, Tensor], expected: dict[str, Tensor], case: ModuleCase, recipe: Recipe | None
) -> tuple[dict[str, float], str]:
    """Relative errors, and what is wrong with them.

    Returns:
        name -> relative error; a sentence that names results beyond their bound, empty if none is.
    """
    found = {name: relative_error(actual[name], value) for name, value in expected.items() if name in actual}
    missing = [name for name in expected if name not in actual]
    beyond = [
        f"{name} is off by {error:.2g}, more than {limit:.2g}"
        for name, error in found.items()
        if not error <= (limit := bound(name, expected[name], case, recipe))
    ]
    return found, "; ".join([f"{name} is missing" for name in missing] + beyond)
