"""Which modules are timed, as data: a new one is one entry of `MODULES`.

Shape legend: T = tokens, N = out features, K = in features, F = hidden features of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp import ops

BF16_BYTES = 2
FP8_BYTES = 1


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer of a case, and where its operands come from.

    Attributes:
        n: N.
        k: K.
        input_values: values a token that are read to work out the input once; None: the K of the input itself.
        grad_values: the same of the output's gradient; None: its N values.
    """

    n: int
    k: int
    input_values: int | None = None
    grad_values: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModuleCase:
    """A module's forward and backward.

    Attributes:
        name: of the table and of `--only`.
        tokens: T, one measurement each.
        layers: linear layers, in order; the first one's K is the module's input.
        reference: builds torch's own module.
        lowp: builds lowp's, with parameters in the same order as the reference's.
        norm_parameters: how many the norm has that it begins with; they come first. 0: there is no norm.
        host: report the time on the host, in us, on sizes where the device's time doesn't matter.
    """

    name: str
    tokens: tuple[int, ...]
    layers: tuple[Layer, ...]
    reference: Callable[[], nn.Module]
    lowp: Callable[[], nn.Module]
    norm_parameters: int = 0
    host: bool = False

    def flop(self, tokens: int) -> int:
        """Floating-point operations of all GEMMs, forward and backward."""
        return sum(3 * 2 * tokens * layer.n * layer.k for layer in self.layers)


class SwiGLU(nn.Module):
    """`silu(a) b`, of the halves `a` and `b` of the last axis, in torch."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., 2 F] -> [..., F]`."""
        a, b = x.chunk(2, -1)
        return F.silu(a) * b


def linear_bias(k: int, n: int, tokens: tuple[int, ...], *, host: bool = False) -> ModuleCase:
    """A linear layer with bias."""
    return ModuleCase(
        name=f"{'host: ' * host}linear+bias {k}x{n}",
        tokens=tokens,
        layers=(Layer(n=n, k=k),),
        reference=lambda: nn.Linear(k, n),
        lowp=lambda: ops.Sequential(ops.BasicLinear(k, n), ops.Bias(n)),
        host=host,
    )


def norm_linear(k: int, n: int, tokens: tuple[int, ...]) -> ModuleCase:
    """An RMSNorm and a linear layer without bias."""
    return ModuleCase(
        name=f"RMSNorm+linear {k}x{n}",
        tokens=tokens,
        layers=(Layer(n=n, k=k),),
        reference=lambda: nn.Sequential(nn.RMSNorm(k, eps=1e-5), nn.Linear(k, n, bias=False)),
        lowp=lambda: lowp.LayerNormLinear(k, n, normalization="RMSNorm", bias=False),
        norm_parameters=1,
    )


def swiglu_mlp(k: int, f: int, tokens: tuple[int, ...]) -> ModuleCase:
    """An RMSNorm and a SwiGLU MLP without biases."""
    return ModuleCase(
        name=f"RMSNorm+SwiGLU MLP {k}/{f}",
        tokens=tokens,
        layers=(Layer(n=2 * f, k=k, grad_values=3 * f), Layer(n=k, k=f, input_values=2 * f)),
        reference=lambda: nn.Sequential(
            nn.RMSNorm(k, eps=1e-5), nn.Linear(k, 2 * f, bias=False), SwiGLU(), nn.Linear(f, k, bias=False)
        ),
        lowp=lambda: lowp.LayerNormMLP(k, f, normalization="RMSNorm", activation="swiglu", bias=False),
        norm_parameters=1,
    )


def gelu_mlp(k: int, f: int, tokens: tuple[int, ...]) -> ModuleCase:
    """A LayerNorm and a GELU MLP with biases."""
    return ModuleCase(
        name=f"LayerNorm+GELU MLP {k}/{f}",
        tokens=tokens,
        layers=(Layer(n=f, k=k, grad_values=2 * f), Layer(n=k, k=f)),
        reference=lambda: nn.Sequential(nn.LayerNorm(k), nn.Linear(k, f), nn.GELU("tanh"), nn.Linear(f, k)),
        lowp=lambda: lowp.LayerNormMLP(k, f, activation="gelu"),
        norm_parameters=2,
    )


MODULES: tuple[ModuleCase, ...] = (
    linear_bias(4096, 4096, (8192, 16384)),
    norm_linear(4096, 6144, (8192, 16384)),
    swiglu_mlp(4096, 14336, (8192, 16384)),
    gelu_mlp(4096, 16384, (16384,)),
    linear_bias(256, 256, (64,), host=True),
)

QUICK_MODULES: tuple[ModuleCase, ...] = (
    linear_bias(48, 64, (32,)),
    norm_linear(48, 64, (32,)),
    swiglu_mlp(48, 80, (32,)),
    gelu_mlp(48, 64, (32,)),
    linear_bias(32, 32, (16,), host=True),
)
"""Tiny stand-ins for `--quick`, which only shows that everything runs."""
