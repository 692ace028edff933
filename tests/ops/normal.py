"""What norms must give, in float64 by autograd of the formula, with bounds. Shares no code with the library.

    layer  y = (x - mean) / sqrt(var + eps) * w + b    rms  y = x / sqrt(mean x^2 + eps) * w    l2  the sum, no mean

Shape legend: M = rows, K = features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.oracle import Near


def normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, axes: int = 1) -> Tensor:
    """The formula in the dtype of `x`; `weight` is what is multiplied by."""
    over = tuple(range(-axes, 0))
    if kind == "layer":
        x = x - x.mean(over, keepdim=True)
    square = x.square().sum(over, keepdim=True)
    if kind != "l2":
        square = square / x.shape[-axes:].numel()
    y = x / (square + eps).sqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def step(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dy: Tensor,
    *,
    kind: str,
    eps: float,
    zero_centered: bool = False,
    axes: int = 1,
) -> dict[str, Near]:
    """y, dx, dw and db, rounded once from what fp32 gives: no nearer than the sums of its terms allow."""
    leaves = {"x": x, "weight": weight, "bias": bias}
    wide = {name: None if t is None else t.detach().double().requires_grad_() for name, t in leaves.items()}
    factor = wide["weight"]
    if factor is not None and zero_centered:
        factor = 1 + factor
    y = normalized(wide["x"], factor, wide["bias"], kind, eps, axes)
    y.backward(dy.double())
    over = tuple(range(-axes, 0))
    x64, dy64, K = x.detach().double(), dy.double(), x.shape[-axes:].numel()
    M = x.numel() // max(K, 1)
    mean = x64.mean(over, keepdim=True) if kind == "layer" else torch.zeros_like(x64)
    share = 1 if kind == "l2" else 1 / K
    rstd = ((x64 - mean).square().sum(over, keepdim=True) * share + eps).rsqrt()
    xhat = (x64.abs() + mean.abs()) * rstd
    g = dy64.abs() * (1 if factor is None else factor.detach().abs())
    b = 0 if bias is None else bias.detach().double().abs()
    magnitude = xhat * (1 if factor is None else factor.detach().abs()) + b
    fp32 = torch.finfo(torch.float32).eps
    row, column = fp32 * (K + 16), fp32 * (K + M + 16)
    spread = g + xhat * share * (g * xhat).sum(over, keepdim=True) + share * g.sum(over, keepdim=True)
    leading = tuple(range(x.ndim - axes))
    bounds = {"dx": (wide["x"].grad, x.dtype, rstd * spread * 2 * row * xhat.amax(over, keepdim=True).clamp(min=1))}
    bounds["y"] = (y.detach(), x.dtype, magnitude * row)
    for name, wanted, terms in (("dw", "weight", dy64.abs() * xhat), ("db", "bias", dy64.abs())):
        if wide[wanted] is not None:
            bounds[name] = (wide[wanted].grad, leaves[wanted].dtype, terms.sum(leading) * column)
    return {name: _near(*bound) for name, bound in bounds.items()}


def _near(value: Tensor, dtype: torch.dtype, error: Tensor) -> Near:
    info = torch.finfo(dtype)
    return Near(value, value.abs() * info.eps / 2 + error * (1 + info.eps) + info.smallest_normal * info.eps)
