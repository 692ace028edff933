"""Activations as torch's own operations, which autograd differentiates. Shares no code with the library."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
NAMES = (*PLAIN, *GATED, "glu", "clamped_swiglu")
EXACT = ("relu", "reglu", "srelu", "sreglu")
"""Those without transcendentals."""


def is_gated(name: str) -> bool:
    return name not in PLAIN


def activation(x: Tensor, name: str, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Tensor:
    """`[..., K]`, or gated `[..., 2 K]`, to `[..., K]`, in the dtype of `x`."""
    if name == "gelu":
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    if name == "qgelu":
        return x * torch.sigmoid(1.702 * x)
    if name == "relu":
        return F.relu(x)
    if name == "srelu":
        return F.relu(x) ** 2
    if name == "silu":
        return x * torch.sigmoid(x)
    a, b = x.chunk(2, dim=-1)
    if name == "glu":
        return torch.sigmoid(a) * b
    if name == "clamped_swiglu":
        a, b = a.clamp(max=limit), b.clamp(-limit, limit) + offset
        return a * torch.sigmoid(alpha * a) * b
    return activation(a, GATED[name]) * b


def exponent(x: Tensor, name: str) -> Tensor:
    """`[n, 1]`: how large the argument of exp is, as far as it matters: beyond 104 the sigmoid is 0 or 1 in fp32."""
    a = x[:, :1].double().abs()
    return (a if name not in ("gelu", "geglu") else 1.6 * (a + 0.045 * a**3)).clamp(max=104 / 1.702) * 1.702


def gradient(dy: Tensor, x: Tensor, name: str, **params: float) -> Tensor:
    """The gradient of `x`, by autograd, in its dtype."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        (dx,) = torch.autograd.grad(activation(x, name, **params), x, dy)
    return dx
