"""Elementwise sums and products, each rounded once.

    add    z = x + y        multiply    y = x * factor

torch computes them; they are operators so that a compiler which merges elementwise code (Inductor keeps fp32 between
two bf16 steps) doesn't leave out the rounding at an operation's edge.
"""

from __future__ import annotations

from torch import Tensor

from lowp.registration import register


def add(x: Tensor, y: Tensor) -> Tensor:
    """`x + y`, as torch broadcasts and promotes.

    Args:
        x: any shape, floating point, any strides.
        y: likewise.

    Returns:
        z: of the shape and the dtype that torch gives.
    """
    return _add(x, y)


def multiply(x: Tensor, factor: float) -> Tensor:
    """`x * factor`.

    Args:
        x: any shape, floating point, any strides.
        factor: a number; in a compiled graph, a constant.

    Returns:
        y: of the shape and dtype of `x`.
    """
    return _multiply(x, factor)


def _add_ref(x: Tensor, y: Tensor) -> Tensor:
    """Torch's own."""
    return x + y


def _multiply_ref(x: Tensor, factor: float) -> Tensor:
    """Torch's own."""
    return x * factor


_add = register("add(Tensor x, Tensor y) -> Tensor", ref=_add_ref, launch=_add_ref, allocate=_add_ref)
_multiply = register(
    "multiply(Tensor x, float factor) -> Tensor", ref=_multiply_ref, launch=_multiply_ref, allocate=_multiply_ref
)
