"""Activations and their gradients as sources.

    y_MK = f(x_MK)                 or, gated, f(a_MK) g(b_MK), where [a b] = x_MX, X = 2 K
    dx_MX = dy_MK f'(x_MK)         or, gated, [dy g(b) f'(a)   dy f(a) g'(b)]_MX

Shape legend: M = rows (tokens), K = features after the activation, X = before it: K, or 2 K where it is gated.
The functions are those of lowp.kernels.activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowp.errors import fail
from lowp.kernels._triton import jit, tl
from lowp.kernels.activations import (
    ACTIVATIONS,
    Activation,
    activation_gradient_ref,
    activation_ref,
    complete_params,
)
from lowp.kernels.sources import Kernel, Source, SourceSpec, Tensors, check_count, check_matrix, rounded, widened


@dataclass(frozen=True, kw_only=True)
class _OfActivation(SourceSpec):
    """What the two sources share.

    Attributes:
        dtype: to which the values are rounded.
        activation: a name of `ACTIVATIONS`.
        params: the activation's parameters; what is missing has its default.

    Raises:
        ValueError: the activation or a parameter is unknown, or out of range.
        TypeError: a parameter is not a number, or `dtype` is another.
    """

    dtype: torch.dtype
    activation: str
    params: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        params = complete_params(type(self).__name__, self.activation, self.params)
        object.__setattr__(self, "params", params)
        super().__post_init__()

    @property
    def entry(self) -> Activation:
        """The table's entry."""
        return ACTIVATIONS[self.activation]

    @property
    def gated(self) -> bool:
        """Whether the activation has a gate."""
        return self.entry.gate is not None

    def check_input(self, op: str, x_MX: Tensor) -> None:
        """Raise unless it is a matrix of two halves, if need be."""
        check_matrix(op, "x_MX", x_MX)
        if self.gated and x_MX.shape[1] % 2:
            rule = f"{self.activation} is gated, so x_MX must have an even number of columns"
            fail(op, rule, got=tuple(x_MX.shape))

    def kernel_of(self, load: Any, operands: tuple[Any, ...]) -> Kernel:
        """The functions of the table beside the operands."""
        gate = self.entry.gate
        gate_function = None if gate is None else gate.triton
        return Kernel(load, operands, self.entry.function.triton, gate_function, tuple(self.params.values()))


@dataclass(frozen=True, kw_only=True)
class Activated(_OfActivation):
    """An activation of a matrix.

    Tensors: `x_MX` bf16 | fp16 | fp32, any strides.
    """

    def check(self, op: str, tensors: Tensors) -> None:
        """Raise unless it is a matrix of two halves, if need be."""
        check_count(op, tensors, 1)
        self.check_input(op, tensors[0])

    def shape(self, tensors: Tensors) -> tuple[int, int]:
        """M and K."""
        M, X = tensors[0].shape
        return M, X // 2 if self.gated else X

    def produce_ref(self, tensors: Tensors) -> Tensor:
        """The formula in fp32."""
        return activation_ref(tensors[0].float(), self.entry, tuple(self.params.values())).to(self.dtype)

    def kernel(self, tensors: Tensors) -> Kernel:
        """One load, or one of each half."""
        kernel = self.kernel_of(load_activated, matrix_operands(tensors[0], self.gated))
        coarse = tensors[0].element_size() == 2  # two values differ by more than the function's own rounding
        return kernel._replace(rising=coarse and self.entry.function.rising and not self.gated)


@dataclass(frozen=True, kw_only=True)
class ActivationGradient(_OfActivation):
    """The gradient of an activation's input.

    Tensors: `dy_MK` and `x_MX`, bf16 | fp16 | fp32 each, any strides.
    """

    @property
    def halves(self) -> int:
        """2 where the activation is gated."""
        return 1 + self.gated

    def check(self, op: str, tensors: Tensors) -> None:
        """Raise unless both are matrices that fit each other."""
        check_count(op, tensors, 2)
        dy_MK, x_MX = tensors
        self.check_input(op, x_MX)
        check_matrix(op, "dy_MK", dy_MK)
        expected = (x_MX.shape[0], x_MX.shape[1] // self.halves)
        if dy_MK.shape != expected:
            fail(op, f"dy_MK must be {expected}, the shape after {self.activation}", got=tuple(dy_MK.shape))

    def shape(self, tensors: Tensors) -> tuple[int, int]:
        """M and X."""
        M, X = tensors[1].shape
        return M, X

    def produce_ref(self, tensors: Tensors) -> Tensor:
        """The formula in fp32."""
        dy_MK, x_MX = tensors
        params = tuple(self.params.values())
        return activation_gradient_ref(dy_MK.float(), x_MX.float(), self.entry, params).to(self.dtype)

    def kernel(self, tensors: Tensors) -> Kernel:
        """The load of the output's gradient beside those of the input."""
        dy_MK, x_MX = tensors
        operands = (dy_MK, *dy_MK.stride(), *matrix_operands(x_MX, self.gated))
        return self.kernel_of(load_activation_gradient, operands)


def activated(
    x_MX: Tensor,
    activation: str,
    params: Mapping[str, float] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Source:
    """The source of an activation's output.

    Args:
        x_MX: `[M, K]`, or `[M, 2 K]` where the activation is gated; bf16 | fp16 | fp32, any strides.
        activation: a name of `ACTIVATIONS`.
        params: the activation's parameters; what is missing has its default.
        dtype: to which the values are rounded; that of `x_MX` by default.

    Raises:
        ValueError: the activation or a parameter is unknown, or out of range.
        TypeError: a parameter is not a number, or `dtype` is another.
    """
    return Source((x_MX,), Activated(dtype=dtype or x_MX.dtype, activation=activation, params=params or {}))


def activation_gradient(
    dy_MK: Tensor,
    x_MX: Tensor,
    activation: str,
    params: Mapping[str, float] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Source:
    """The source of the gradient of an activation's input.

    Args:
        dy_MK: `[M, K]` bf16 | fp16 | fp32, any strides: the gradient of the output.
        x_MX: `[M, K]`, or `[M, 2 K]` where the activation is gated; bf16 | fp16 | fp32, any strides: the input.
        activation: a name of `ACTIVATIONS`.
        params: the activation's parameters; what is missing has its default.
        dtype: to which the values are rounded; that of `dy_MK` by default.

    Raises:
        ValueError: the activation or a parameter is unknown, or out of range.
        TypeError: a parameter is not a number, or `dtype` is another.
    """
    spec = ActivationGradient(dtype=dtype or dy_MK.dtype, activation=activation, params=params or {})
    return Source((dy_MK, x_MX), spec)


def matrix_operands(x_MX: Tensor, gated: bool) -> tuple[Any, ...]:
    """A matrix, its strides, and how far its second half is from the first, if it has two."""
    stride_m, stride_k = x_MX.stride()
    return x_MX, stride_m, stride_k, x_MX.shape[1] // 2 * stride_k if gated else None


@jit
def load_activated(
    operands,
    m,
    k,
    M,
    K,
    DTYPE: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATE: tl.constexpr,
    PARAMS: tl.constexpr,
):
    """`f(a)`, or `f(a) g(b)`."""
    x_ptr, stride_m, stride_k, second = operands
    present = (m < M) & (k < K)
    x_pointers = x_ptr + m * stride_m + k * stride_k
    a = widened(tl.load(x_pointers, mask=present, other=0.0))
    y, _ = FUNCTION(a, PARAMS)
    if GATE is not None:
        b = widened(tl.load(x_pointers + second, mask=present, other=0.0))
        gate, _ = GATE(b, PARAMS)
        y = y * gate
    return (rounded(y, DTYPE),)


@jit
def load_activation_gradient(
    operands,
    m,
    k,
    M,
    K,
    DTYPE: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATE: tl.constexpr,
    PARAMS: tl.constexpr,
):
    """`dy f'(x)`, or `dy g(b) f'(a)` and `dy f(a) g'(b)`."""
    dy_ptr, dy_stride_m, dy_stride_k, x_ptr, stride_m, stride_k, second = operands
    present = (m < M) & (k < K)
    x_pointers = x_ptr + m * stride_m + k * stride_k
    dy = widened(tl.load(dy_ptr + m * dy_stride_m + k * dy_stride_k, mask=present, other=0.0))
    a = widened(tl.load(x_pointers, mask=present, other=0.0))
    value, slope = FUNCTION(a, PARAMS)
    if GATE is None:
        return (rounded(dy * slope, DTYPE),)
    else:
        b = widened(tl.load(x_pointers + second, mask=present, other=0.0))
        gate, gate_slope = GATE(b, PARAMS)
        return (rounded(dy * gate * slope, DTYPE), rounded(dy * value * gate_slope, DTYPE))
