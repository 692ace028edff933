"""What the modules must give, worked out in float64, every operation's result rounded. Shares no code with the library.

    n = norm(x) w + b      h = q(n) @ q(w1).T + b1      a = act(h)      y = q(a) @ q(w2).T + b2

and backwards likewise. q is the table quantizer of `tests.oracle`. Gradients of elementwise formulas are autograd's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp import recipe as recipes
from tests.ops.oracle import dequantized

PARAMETERS = {"clamped_swiglu": {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}}


def _gelu(a: Tensor) -> Tensor:
    return 0.5 * a * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))


def _qgelu(a: Tensor) -> Tensor:
    return a * torch.sigmoid(1.702 * a)


def _gated(f: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda h: f(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]


def _clamped_swiglu(h: Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> Tensor:
    a, b = h.chunk(2, -1)
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return a * torch.sigmoid(alpha * a) * (b + glu_linear_offset)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": _gelu,
    "geglu": _gated(_gelu),
    "glu": _gated(torch.sigmoid),
    "qgelu": _qgelu,
    "qgeglu": _gated(_qgelu),
    "relu": F.relu,
    "reglu": _gated(F.relu),
    "srelu": lambda a: F.relu(a) ** 2,
    "sreglu": _gated(lambda a: F.relu(a) ** 2),
    "silu": F.silu,
    "swiglu": _gated(F.silu),
    "clamped_swiglu": _clamped_swiglu,
}
GATED = {name for name in ACTIVATIONS if "glu" in name}


def is_gated(activation: str) -> bool:
    return activation in GATED


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).double()


class Elementwise:
    """An operation with parameters, differentiated by autograd in float64 at its rounded inputs."""

    def __init__(self, function: Callable[..., Tensor], dtype: torch.dtype, **parameters: Tensor | None) -> None:
        self.function = function
        self.dtype = dtype
        given = {name: p for name, p in parameters.items() if p is not None}
        self.parameters = {name: p.detach().double().requires_grad_() for name, p in given.items()}
        self.dtypes = {name: p.dtype for name, p in given.items()}

    def forward(self, x: Tensor) -> Tensor:
        self.x = x.detach().requires_grad_()
        self.y = self.function(self.x, *self.parameters.values())
        return rounded(self.y.detach(), self.dtype)

    def backward(self, dy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        dx, *grads = torch.autograd.grad(self.y, [self.x, *self.parameters.values()], dy)
        named = dict(zip(self.parameters, grads, strict=True))
        return rounded(dx, self.dtype), {name: rounded(g, self.dtypes[name]) for name, g in named.items()}


class Linear:
    """A linear layer, its bias added before the only rounding."""

    def __init__(
        self, weight: tuple[str, Tensor], bias: tuple[str, Tensor] | None, recipe: recipes.Recipe | None, dtype: Any
    ) -> None:
        self.weight, self.bias, self.recipe, self.dtype = weight, bias, recipe, dtype

    def _operand(self, x: Tensor, role: recipes.Role) -> Tensor:
        return x if self.recipe is None else dequantized(x.to(self.dtype), self.recipe, role)

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        y = self._operand(self.x, "input") @ self._operand(self.weight[1].detach().double(), "weight").t()
        if self.bias is not None:
            y = y + self.bias[1].detach().double()
        return rounded(y, self.dtype)

    def backward(self, dy: Tensor, extra: Tensor | float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
        """`extra` is added to the gradient of the input before it is rounded."""
        override = "high_precision" if self.recipe is None else self.recipe.backward_override
        x, w, quantized_dy = self.x, self.weight[1].detach().double(), dy
        if override != "high_precision":
            x, w = self._operand(x, "input"), self._operand(w, "weight")
            if override == "dequantized":
                x, w = rounded(x, self.dtype), rounded(w, self.dtype)
            else:
                quantized_dy = self._operand(dy, "grad_output")
        grads = {self.weight[0]: rounded(quantized_dy.t() @ x, self.weight[1].dtype)}
        if self.bias is not None:
            grads[self.bias[0]] = rounded(dy.sum(0), self.bias[1].dtype)
        return rounded(quantized_dy @ w + extra, self.dtype), grads


@dataclass
class Results:
    """One forward and backward.

    Attributes:
        output, norm_output: what the module returns, or would.
        dx: of the input.
        grads: of the parameters by name.
    """

    output: Tensor
    norm_output: Tensor | None
    dx: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)


def norm(kind: str, zero_centered: bool, eps: float) -> Callable[..., Tensor]:
    """`(x, w, b) -> norm(x)`, w and b may be missing."""

    def function(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
        if kind == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
        if w is not None:
            y = y * (1 + w if zero_centered else w)
        return y if b is None else y + b

    return function


def run(
    x: Tensor,
    dy: Tensor | None,
    d_norm: Tensor | None,
    parameters: dict[str, Tensor],
    recipe: recipes.Recipe | None,
    *,
    normalization: str | None = "LayerNorm",
    zero_centered_gamma: bool = False,
    eps: float = 1e-5,
    activation: str = "gelu",
    activation_params: dict[str, float] | None = None,
) -> Results:
    """A module's outputs and gradients: LayerNormMLP where there are parameters `fc1_weight`, else (LayerNorm)Linear.

    Args:
        x: `[..., K]`.
        dy: of the output; None: it isn't used.
        d_norm: of the norm's output; None: it isn't used.
        parameters: by the module's names; a missing bias is no bias.
        recipe: None: high precision.
        normalization: "LayerNorm" or "RMSNorm"; None: there is no norm.
        zero_centered_gamma, eps, activation, activation_params: as the module's.
    """
    dtype, stages, leading = x.dtype, [], x.shape[:-1]
    M = math.prod(leading)
    value = _matrix(x.detach(), M)

    def linear(prefix: str) -> Linear:
        bias = parameters.get(f"{prefix}bias")
        name = f"{prefix}weight"
        return Linear((name, parameters[name]), None if bias is None else (f"{prefix}bias", bias), recipe, dtype)

    first: Elementwise | None = None
    if normalization is not None:
        affine = {name: parameters.get(name) for name in ("layer_norm_weight", "layer_norm_bias")}
        first = Elementwise(norm(normalization, zero_centered_gamma, eps), dtype, **affine)
    if "fc1_weight" in parameters:
        formula = ACTIVATIONS[activation]
        given = activation_params or {}
        stages = [linear("fc1_"), Elementwise(lambda h: formula(h, **given), dtype), linear("fc2_")]
    else:
        stages = [linear("")]
    norm_output = value = value if first is None else first.forward(value)
    for stage in stages:
        value = stage.forward(value)
    grads: dict[str, Tensor] = {}
    extra = torch.zeros_like(norm_output) if d_norm is None else _matrix(d_norm, M)
    gradient = extra
    if dy is not None:
        gradient = _matrix(dy, M)
        for index, stage in reversed(list(enumerate(stages))):
            gradient, own = stage.backward(gradient, extra) if index == 0 else stage.backward(gradient)
            grads |= own
    if first is not None:
        gradient, own = first.backward(gradient)
        grads |= own
    outputs = [value, norm_output, gradient]
    y, n, dx = (part.reshape(*leading, part.shape[1]) for part in outputs)
    return Results(y, None if first is None else n, dx, grads)


def _matrix(x: Tensor, rows: int) -> Tensor:
    return x.double().reshape(rows, x.shape[-1])


def relative_l2(a: Tensor, b: Tensor) -> float:
    """`|a - b| / |b|`; 0 where both are 0."""
    difference, size = (a.double() - b.double()).norm(), b.double().norm()
    return 0.0 if difference == 0 else (difference / size).item()
