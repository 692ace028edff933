"""What benchmarks/fused_kernels.py times: sources, and the same expressions in torch.

Shape legend: T = tokens, D = features of the model, H = hidden features of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.kernels.activated import activated, activation_gradient
from lowp.kernels.activations import ACTIVATIONS, activation_gradient_ref
from lowp.kernels.normalized import normalized
from lowp.kernels.sources import Source


class Sizes(NamedTuple):
    """Sizes, and how often to measure."""

    tokens: int
    features: int
    hidden: int
    rounds: int
    iterations: int


LLAMA_8B = Sizes(tokens=16384, features=4096, hidden=14336, rounds=9, iterations=10)
QUICK = Sizes(tokens=32, features=48, hidden=64, rounds=1, iterations=1)


class Case(NamedTuple):
    """A source, and the same expression for torch.compile."""

    name: str
    source: Source
    expression: Callable[..., Any]
    arguments: tuple[Tensor, ...]
    gradient: bool


def swiglu(x: Tensor) -> Tensor:
    """`silu(a) b`."""
    a, b = x.chunk(2, dim=-1)
    return F.silu(a.float()).mul(b.float()).to(x.dtype)


def swiglu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Both halves."""
    (a, b), dy = x.float().chunk(2, dim=-1), dy.float()
    s = torch.sigmoid(a)
    return torch.cat([dy * b * (s + a * s * (1 - s)), dy * a * s], dim=-1).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """The tanh approximation."""
    return F.gelu(x.float(), approximate="tanh").to(x.dtype)


def gelu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Of the tanh approximation."""
    return torch.ops.aten.gelu_backward(dy.float(), x.float(), approximate="tanh").to(x.dtype)


def gradient_by_formula(name: str, dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of an activation, as the library's reference has it."""
    activation = ACTIVATIONS[name]
    return activation_gradient_ref(dy.float(), x.float(), activation, tuple(activation.defaults.values())).to(x.dtype)


def norm(x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """LayerNorm's second step."""
    return ((x.float() - mean[:, None]) * rstd[:, None] * w.float() + b.float()).to(x.dtype)


def rms_norm(x: Tensor, rstd: Tensor, w: Tensor) -> Tensor:
    """RMSNorm's second step."""
    return (x.float() * rstd[:, None] * w.float()).to(x.dtype)


def cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """One at a time: together they may not fit the memory."""
    T, D, H = sizes.tokens, sizes.features, sizes.hidden
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    mean, rstd = torch.randn(T, device=device), torch.rand(T, device=device)
    for name, factor, forward, backward in (("swiglu", 2, swiglu, swiglu_gradient), ("gelu", 1, gelu, gelu_gradient)):
        x, dy = draw(T, factor * H), draw(T, H)
        yield Case(name, activated(x, name), forward, (x,), False)
        yield Case(f"gradient of {name}", activation_gradient(dy, x, name), backward, (dy, x), True)
    for name in ("geglu", "clamped_swiglu"):
        x, dy = draw(T, 2 * H), draw(T, H)
        yield Case(
            f"gradient of {name}", activation_gradient(dy, x, name), partial(gradient_by_formula, name), (dy, x), True
        )
    x, w, b = draw(T, D), draw(D), draw(D)
    yield Case("RMSNorm", normalized(x, None, rstd, w), rms_norm, (x, rstd, w), False)
    yield Case("LayerNorm", normalized(x, mean, rstd, w, b), norm, (x, mean, rstd, w, b), False)
