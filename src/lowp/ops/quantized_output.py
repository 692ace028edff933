"""Outputs that leave a module quantized, and stay differentiable.

    q = quantize(y)      dy = the gradient of whatever is made of q

A tensor of FP8 can't carry a gradient, so the autograd edge hangs on an anchor: a tensor of the output's shape and
dtype that holds one element.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowp.errors import fail
from lowp.kernels.dequantize import dequantize_data
from lowp.ops.linear_gemms import with_leading
from lowp.quantization import as_matrix, quantize_operand
from lowp.quantizers import Quantizer
from lowp.recipe import Recipe


class QuantizedOutput(NamedTuple):
    """A quantized output.

    Attributes:
        data: `[..., N]` codes, quantized along the last axis.
        scale: fp32; multiplies to dequantize.
        anchor: `[..., N]` in the dtype of the unquantized output; its gradient is that of the output, its content
            means nothing.
    """

    data: Tensor
    scale: Tensor
    anchor: Tensor

    def dequantize(self) -> Tensor:
        """The output in high precision, `[..., N]` in the anchor's dtype; differentiable."""
        return _Dequantize.apply(self.anchor, self.data, self.scale)


def quantize_output(op: str, y: Tensor, recipe: Recipe | None) -> QuantizedOutput:
    """Quantize an output, as the recipe's role "input".

    Args:
        op: what the user called.
        y: `[..., N]`.
        recipe: of the call.

    Raises:
        ValueError: there is no recipe.
    """
    if recipe is None:
        fail(op, "fp8_output needs a recipe", hint="Call it under lowp.autocast, or give it recipe=.")
    return QuantizedOutput(*_Quantize.apply(y, recipe.quantizer("input")))


class _Quantize(torch.autograd.Function):
    """The gradient passes through."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
        """Data, scale and anchor."""
        with torch.autocast(y.device.type, enabled=False):
            data, scale = quantize_operand(as_matrix(y), quantizer, row=True, column=False).row
        if data.shape[1] != y.shape[-1]:  # else torch 2.11, tracing, takes what `contiguous` gives for differentiable
            data = data[:, : y.shape[-1]].contiguous()
        data = with_leading(data, y.shape[:-1])
        ctx.mark_non_differentiable(data, scale)
        return data, scale, torch.empty_strided(y.shape, [0] * y.ndim, dtype=y.dtype, device=y.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_data: None, d_scale: None, d_anchor: Tensor) -> tuple[Tensor, None]:
        """The anchor's."""
        return d_anchor, None


class _Dequantize(torch.autograd.Function):
    """The gradient passes through."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, data: Tensor, scale: Tensor) -> Tensor:
        """Data times scale, rounded."""
        y = dequantize_data(as_matrix(data), scale, data.shape[-1], anchor.dtype)
        return with_leading(y, data.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        """To the anchor."""
        return dy, None, None
