"""Activations: one table that says everything about each of them.

    y = f(a)            dx = dy f'(x)
    y = f(a) g(b)       da = (dy g(b)) f'(a)      db = (dy f(a)) g'(b)      gated: a, b = halves of the columns of x

Shape legend: K = features after the activation.
Source: Hendrycks and Gimpel, Gaussian Error Linear Units (2016); Shazeer, GLU Variants Improve Transformer (2020);
So et al., Primer (2021), for squared ReLU; the clamped SwiGLU of gpt-oss (2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowp.errors import fail
from lowp.kernels.activation_functions import (
    CLAMPED_LINEAR,
    CLAMPED_SILU,
    GELU,
    IDENTITY,
    QGELU,
    RELU,
    SIGMOID,
    SILU,
    SRELU,
    Function,
    Params,
)


@dataclass(frozen=True)
class Activation:
    """An activation.

    Attributes:
        function: f.
        gate: g, for the second half of the columns; None: the activation is not gated.
        defaults: its parameters' names and defaults.
    """

    function: Function
    gate: Function | None = None
    defaults: Mapping[str, float] = field(default_factory=dict)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(GELU),
    "geglu": Activation(GELU, IDENTITY),
    "glu": Activation(SIGMOID, IDENTITY),
    "qgelu": Activation(QGELU),
    "qgeglu": Activation(QGELU, IDENTITY),
    "relu": Activation(RELU),
    "reglu": Activation(RELU, IDENTITY),
    "srelu": Activation(SRELU),
    "sreglu": Activation(SRELU, IDENTITY),
    "silu": Activation(SILU),
    "swiglu": Activation(SILU, IDENTITY),
    "clamped_swiglu": Activation(
        CLAMPED_SILU, CLAMPED_LINEAR, {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}
    ),
}
"""Every activation by its name. One more entry is one more activation, with all that quantizes or sums it."""


def register_activation(
    name: str, function: Function, *, gate: Function | None = None, defaults: Mapping[str, float] | None = None
) -> None:
    """Add an activation to the table.

    Args:
        name: of the activation.
        function: f.
        gate: g, for the second half of the columns; None: the activation is not gated.
        defaults: its parameters' names and defaults, in the order in which the functions take them.

    Raises:
        ValueError: there is one of this name; or the activation of 0 is not 0, which padding is made of.
    """
    op = "register_activation"
    if name in ACTIVATIONS:
        fail(op, "each activation has its own name", got=repr(name))
    activation = Activation(function, gate, dict(defaults or {}))
    at_zero = activation_ref(torch.zeros(2), activation, tuple(activation.defaults.values()))
    if at_zero.any():
        fail(op, "the activation of 0 must be 0", got=at_zero[0].item())
    ACTIVATIONS[name] = activation


def find_activation(op: str, name: str) -> Activation:
    """The table's entry.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in ACTIVATIONS:
        fail(op, f"activation must be one of {', '.join(ACTIVATIONS)}", got=repr(name))
    return ACTIVATIONS[name]


def complete_params(op: str, name: str, params: Mapping[str, float] | None) -> dict[str, float]:
    """An activation's parameters by name, defaults filled in.

    Args:
        op: what the user called.
        name: the activation.
        params: those that differ from the defaults.

    Raises:
        ValueError: the activation or a parameter's name is unknown, or a value is out of range.
        TypeError: a value is not a number.
    """
    defaults = find_activation(op, name).defaults
    given = params or {}
    for key, value in given.items():
        if key not in defaults:
            known = ", ".join(defaults) or "no parameters"
            fail(op, f"{name} has {known}", got=repr(key), hint="Check activation_params.")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            fail(op, f"{key} must be a number", got=type(value).__name__, error=TypeError)
        if not math.isfinite(value):
            fail(op, f"{key} must be finite", got=value)
    if given.get("limit", 1.0) <= 0:
        fail(op, "limit must be > 0", got=given["limit"])
    return {key: float(given.get(key, default)) for key, default in defaults.items()}


def activation_ref(x: Tensor, activation: Activation, params: Params) -> Tensor:
    """The activation in torch, in the dtype of `x`: `[..., K]`, gated `[..., 2 K]`, to `[..., K]`."""
    if activation.gate is None:
        return activation.function.ref(x, params)[0]
    a, b = x.chunk(2, dim=-1)
    return activation.function.ref(a, params)[0] * activation.gate.ref(b, params)[0]


def activation_gradient_ref(dy: Tensor, x: Tensor, activation: Activation, params: Params) -> Tensor:
    """The gradient of `x` in torch, in the dtype of `x`."""
    if activation.gate is None:
        return dy * activation.function.ref(x, params)[1]
    a, b = x.chunk(2, dim=-1)
    (value, slope), (gate, gate_slope) = activation.function.ref(a, params), activation.gate.ref(b, params)
    return torch.cat([dy * gate * slope, dy * value * gate_slope], dim=-1)
