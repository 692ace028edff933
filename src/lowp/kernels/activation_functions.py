"""The functions that activations are made of, each with its slope, in torch and in Triton.

Both give value and slope by the same steps in the same order, and round every step: kernels that call the `@jit`
functions are launched with `enable_fp_fusion=False`. sigmoid(z) and 1 - sigmoid(z) are worked out from exp(-|z|), which
keeps both tails accurate and overflows nowhere. NaN and Inf do what they do in torch's own formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.kernels._triton import constexpr, jit, tl

Params = tuple[float, ...]
"""An activation's parameters, in the order in which the table names them."""


class Function(NamedTuple):
    """A function of one number and its slope.

    Attributes:
        ref: `(x, params) -> (value, slope)` in torch, in the dtype of `x`.
        triton: the same for an fp32 tile, a `@jit` function; `params` is a `tl.constexpr`.
        rising: whether it rises from `RISES_FROM` on, and exceeds all magnitudes below: the amax of its values is then
            its value for the largest input, and only that one need be worked out.
    """

    ref: Callable[[Tensor, Params], tuple[Tensor, Tensor]]
    triton: Any
    rising: bool = False


RISES_FROM = constexpr(0.5)


# ---- sigmoid


_LOG2E = constexpr(math.log2(math.e))


@jit
def sigmoid_of(t):
    """`1 / (1 + 2^t)`, which is `sigmoid(z)` for `t = -z log2(e)`: by these instructions, whatever surrounds them.

    Off by a few units in the last place. The quarters keep what is less than 2^-126: rcp.ftz would make 0 of it.
    """
    return tl.inline_asm_elementwise(
        "{.reg .f32 e; ex2.approx.ftz.f32 e, $1; fma.rn.f32 e, e, 0f3E800000, 0f3E800000;"
        "rcp.approx.ftz.f32 e, e; mul.rn.f32 $0, e, 0f3E800000;}",
        "=f,f",
        [t],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


def _sigmoid_ref(a: Tensor, params: Params) -> tuple[Tensor, Tensor]:
    """`sigmoid(a)`."""
    s = torch.sigmoid(a)
    return s, s * (1.0 - s)


@jit
def _sigmoid(a, PARAMS: tl.constexpr):
    s = sigmoid_of(a * -_LOG2E)
    return s, s * (1.0 - s)


# ---- gelu, qgelu, silu: a sigmoid(z(a))

_C1 = 2.0 * math.sqrt(2.0 / math.pi)
_C3 = 0.044715 * _C1
_LARGEST_SQUARE = 1024.0
"""From this `a^2` on, the slope of the sigmoid is 0 in fp64 too: its factor need not grow until it is infinite."""

_GELU_1, _GELU_3, _GELU_9 = constexpr(_C1), constexpr(_C3), constexpr(3.0 * _C3)
_GELU_SQUARE = constexpr(_LARGEST_SQUARE)


def _gelu_ref(a: Tensor, params: Params) -> tuple[Tensor, Tensor]:
    """`a sigmoid(2 u)`, which is `0.5 a (1 + tanh(u))`, with `u = sqrt(2 / pi) (a + 0.044715 a^3)`."""
    squared = a * a
    s = torch.sigmoid(a * (_C1 + _C3 * squared))
    value = a * s
    return value, s + value * (1.0 - s) * (_C1 + 3.0 * _C3 * squared.clamp(max=_LARGEST_SQUARE))


@jit
def _gelu(a, PARAMS: tl.constexpr):
    squared = a * a
    s = sigmoid_of(a * tl.fma(squared, -_LOG2E * _GELU_3, -_LOG2E * _GELU_1))
    value = a * s
    return value, tl.fma(value * (1.0 - s), tl.fma(tl.minimum(squared, _GELU_SQUARE), _GELU_9, _GELU_1), s)


def _qgelu_ref(a: Tensor, params: Params) -> tuple[Tensor, Tensor]:
    """`a sigmoid(1.702 a)`."""
    s = torch.sigmoid(1.702 * a)
    value = a * s
    return value, s + value * (1.0 - s) * 1.702


@jit
def _qgelu(a, PARAMS: tl.constexpr):
    s = sigmoid_of(a * (-1.702 * _LOG2E))
    value = a * s
    return value, tl.fma(value * (1.0 - s), 1.702, s)


def _silu_ref(a: Tensor, params: Params) -> tuple[Tensor, Tensor]:
    """`a sigmoid(a)`."""
    s = torch.sigmoid(a)
    value = a * s
    return value, s + value * (1.0 - s)


@jit
def _silu(a, PARAMS: tl.constexpr):
    s = sigmoid_of(a * -_LOG2E)
    value = a * s
    return value, tl.fma(value, 1.0 - s, s)


# ---- relu, srelu


def _relu_ref(a: Tensor, params: Params) -> tuple[Tensor, Tensor]:
    """`max(a, 0)`, NaN for NaN."""
    return torch.where(a <= 0, 0.0, a), torch.where(a <= 0, 0.0, torch.ones_like(a))


def _srelu_ref(a: Tensor, params: Params) -> tuple[Tensor, Tensor]:
    """`max(a, 0)^2`."""
    positive = torch.where(a <= 0, 0.0, a)
    return positive * positive, positive + positive


@jit
def _relu(a, PARAMS: tl.constexpr):
    return tl.where(a <= 0, 0.0, a), tl.where(a <= 0, 0.0, 1.0)


@jit
def _srelu(a, PARAMS: tl.constexpr):
    positive = tl.where(a <= 0, 0.0, a)
    return positive * positive, positive + positive


# ---- clamped_swiglu: params are limit, alpha, glu_linear_offset


def _clamped_silu_ref(a: Tensor, params: Params) -> tuple[Tensor, Tensor]:
    """`c sigmoid(alpha c)` with `c = min(a, limit)`."""
    limit, alpha, _ = params
    clamped = a.clamp(max=limit)
    s = torch.sigmoid(alpha * clamped)
    value = clamped * s
    return value, torch.where(a <= limit, s + value * (1.0 - s) * alpha, 0.0)


def _clamped_linear_ref(b: Tensor, params: Params) -> tuple[Tensor, Tensor]:
    """`b`, clamped to +-limit, + offset."""
    limit, _, offset = params
    return b.clamp(-limit, limit) + offset, torch.where(b.abs() <= limit, torch.ones_like(b), 0.0)


@jit
def _clamped_silu(a, PARAMS: tl.constexpr):
    limit: tl.constexpr = PARAMS[0]
    alpha: tl.constexpr = PARAMS[1]
    # Also beside a transposed fp8 store: what broke those is kept out by lowp.kernels.float8.
    clamped = tl.minimum(a, limit, propagate_nan=tl.PropagateNan.ALL)
    s = sigmoid_of(clamped * (-alpha * _LOG2E))
    value = clamped * s
    return value, tl.where(a <= limit, tl.fma(value * (1.0 - s), alpha, s), 0.0)


@jit
def _clamped_linear(b, PARAMS: tl.constexpr):
    limit: tl.constexpr = PARAMS[0]
    within = tl.abs(b) <= limit
    clamped = tl.clamp(b, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return clamped + PARAMS[2], tl.where(within, 1.0, 0.0)


# ---- the gate of the others


def _identity_ref(b: Tensor, params: Params) -> tuple[Tensor, Tensor]:
    """`b`."""
    return b, torch.ones((), dtype=b.dtype, device=b.device)


@jit
def identity(b, PARAMS: tl.constexpr):
    """`b`."""
    return b, 1.0


SIGMOID = Function(_sigmoid_ref, _sigmoid)
GELU = Function(_gelu_ref, _gelu, rising=True)
QGELU = Function(_qgelu_ref, _qgelu, rising=True)
SILU = Function(_silu_ref, _silu, rising=True)
RELU = Function(_relu_ref, _relu, rising=True)
SRELU = Function(_srelu_ref, _srelu, rising=True)
IDENTITY = Function(_identity_ref, identity)
CLAMPED_SILU = Function(_clamped_silu_ref, _clamped_silu)
CLAMPED_LINEAR = Function(_clamped_linear_ref, _clamped_linear)
