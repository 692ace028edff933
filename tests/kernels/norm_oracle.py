"""Norms and their gradients in float64, by torch's autograd, with bounds on what fp32 arithmetic may add.

Every fp32 result is a sum of products. Its error is at most the roundings on the way of a summand, times half an eps,
times the sum of the magnitudes; the stored mean adds half an eps of itself. Then comes the rounding to the dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP32 = torch.finfo(torch.float32)
KINDS = ("layer", "rms", "l2")
LENGTHS = (1, 3, 17, 127, 768, 5120, 7168, 12288, 16385, 65536, 131072)
"""Features, of CASES row 28."""
EPS = 1e-5

ROUNDINGS = 96
"""Roundings on the way of a summand: sums over a row are trees over sums of at most 64 elements, of 2**17 in all."""


class Norm(NamedTuple):
    """A norm in float64, its gradients for the output gradient that it was given, and the errors allowed to each."""

    y: Tensor
    mean: Tensor
    rstd: Tensor
    dx: Tensor
    dweight: Tensor
    dbias: Tensor
    error_y: Tensor
    error_mean: Tensor
    error_rstd: Tensor
    error_dx: Tensor
    error_dweight: Tensor
    error_dbias: Tensor


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dy: Tensor | None = None,
    *,
    kind: str,
    zero_centered: bool = False,
    eps: float = EPS,
) -> Norm:
    """The formulas, and the bounds; tensors of any dtype, on the CPU."""
    M, K = x.shape
    x = x.double().requires_grad_()
    w = torch.full((K,), 1.0 - zero_centered) if weight is None else weight
    w = w.double().requires_grad_()
    b = (torch.zeros(K) if bias is None else bias).double().requires_grad_()
    dy = torch.zeros_like(x) if dy is None else dy.double()
    share = 1.0 if kind == "l2" else 1.0 / max(K, 1)
    gamma = w + float(zero_centered)

    mean = x.sum(1, keepdim=True) * share if kind == "layer" else x.new_zeros(M, 1)
    off = x - mean
    rstd = (off.square().sum(1, keepdim=True) * share + eps).rsqrt()
    y = off * rstd * gamma + b
    y.backward(dy)

    with torch.no_grad():
        few, many = ROUNDINGS * FP32.eps / 2, (ROUNDINGS + M) * FP32.eps / 2
        size = (x.abs().sum(1, keepdim=True) * share) if kind == "layer" else mean
        shift = few * size * rstd  # of xhat, from the mean's error; the variance's is of second order
        xhat, g = off * rstd, dy * gamma
        along = (g * xhat).abs().sum(1, keepdim=True) * share
        level = g.abs().sum(1, keepdim=True) * share
        relative = few + shift.square()  # of rstd
        error_y = gamma.abs() * (xhat.abs() * 2 * relative + shift) + few * (y.abs() + b.abs())
        terms = g.abs() + xhat.abs() * along + level
        error_dx = rstd * (terms * 3 * relative + shift * (along + level * (1 + xhat.abs())))
        error_dweight = (dy.abs() * (xhat.abs() * (many + 2 * relative) + shift)).sum(0)
        gradients = [t.new_zeros(t.shape) if t.grad is None else t.grad for t in (x, w, b)]
        errors = (error_y, few * size[:, 0], rstd[:, 0] * relative[:, 0])
        return Norm(
            *(t.detach() for t in (y, mean[:, 0], rstd[:, 0])),
            *gradients,
            *errors,
            error_dx,
            error_dweight,
            many * dy.abs().sum(0),
        )


def check(actual: Tensor, exact: Tensor, error: Tensor) -> None:
    """Within the error before the rounding to the dtype of `actual`, and that rounding."""
    info = torch.finfo(actual.dtype)
    assert actual.shape == exact.shape
    difference = (actual.cpu().double() - exact).abs()
    rounding = info.eps / 2 * (exact.abs() + error) + info.smallest_normal * info.eps / 2
    assert (difference <= error + rounding).all(), (difference - error - rounding).max()
