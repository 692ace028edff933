"""One source of each kind, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowp.kernels.activated import activated, activation_gradient
from lowp.kernels.dropped import dropped
from lowp.kernels.normalized import normalized
from lowp.kernels.sources import PLAIN, Source

Make = Callable[..., Source]


def draw(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape) * 2).to(device, dtype)


def _rms(M: int, K: int, device: str, dtype: torch.dtype) -> Source:
    rstd, weight = draw((M,), device, torch.float32).abs(), draw((K,), device, dtype)
    return normalized(draw((M, K), device, dtype), None, rstd, weight)


def _layer_norm(M: int, K: int, device: str, dtype: torch.dtype) -> Source:
    mean, rstd = draw((M,), device, torch.float32), draw((M,), device, torch.float32).abs()
    weight, bias = draw((K,), device, dtype), draw((K,), device, torch.float32)
    return normalized(draw((M, K), device, dtype), mean, rstd, weight, bias, zero_centered=True)


def _activated(name: str, factor: int) -> Make:
    return lambda M, K, device, dtype: activated(draw((M, factor * K), device, dtype), name)


def _gradient(name: str, factor: int) -> Make:
    """`K` is the width of the output's gradient."""
    return lambda M, K, device, dtype: activation_gradient(
        draw((M, K), device, dtype), draw((M, factor * K), device, dtype), name
    )


SOURCES: dict[str, Make] = {
    "tensor": lambda M, K, device, dtype: Source((draw((M, K), device, dtype),), PLAIN[dtype]),
    "swiglu": _activated("swiglu", 2),
    "gelu": _activated("gelu", 1),
    "clamped_swiglu": _activated("clamped_swiglu", 2),
    "gradient of swiglu": _gradient("swiglu", 2),
    "gradient of gelu": _gradient("gelu", 1),
    "gradient of clamped_swiglu": _gradient("clamped_swiglu", 2),
    "RMSNorm": _rms,
    "LayerNorm": _layer_norm,
    "dropout": lambda M, K, device, dtype: dropped(
        draw((M, K), device, dtype), torch.tensor([7, 2**40 + 3], device=device), 0.3
    ),
}
"""`(M, K, device, dtype) -> source` by name; the tensors are drawn anew each time."""


def relayout(source: Source, layout: Callable[[Tensor], Tensor]) -> Source:
    """The same values from tensors in another layout; the seed stays."""
    return source._replace(tensors=tuple(layout(x) if x.is_floating_point() else x for x in source.tensors))


def transposed(x: Tensor) -> Tensor:
    """Column-major."""
    return x.t().contiguous().t() if x.ndim == 2 else x


def spread(x: Tensor) -> Tensor:
    """With gaps between the elements of every axis, from an odd offset."""
    wide = x.new_full([2 * size + 1 for size in x.shape], 99.0)
    return wide[tuple(slice(1, None, 2) for _ in x.shape)].copy_(x)


def padded(x: Tensor) -> Tensor:
    """Rows that are longer than the matrix, and start at odd addresses."""
    if x.ndim != 2:
        return x
    return x.new_full((x.shape[0], x.shape[1] + 3), 99.0)[:, 1:-2].copy_(x)


LAYOUTS = {"transposed": transposed, "spread": spread, "padded": padded}
