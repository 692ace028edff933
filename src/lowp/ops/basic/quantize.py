"""Quantize: hands its input, its gradient, or both on in the recipe's format.

Where the neighbour reads quantized operands it is handed them; elsewhere the value is dequantized again to its own
dtype, and keeps the rounding only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowp.ops.basic_op import BasicOperation, check_size
from lowp.ops.linear_gemms import with_leading
from lowp.ops.op import BackwardContext, Direction, OperationContext
from lowp.quantization import Quantized, QuantizeRequest, as_matrix, dequantize_rows, quantize_operand
from lowp.quantizers import Quantizer
from lowp.recipe import Recipe


@dataclass
class QuantizeArgs:
    """What either pass reads: the value, how to quantize it if at all, and the copies that the neighbour reads."""

    value: Tensor
    quantizer: Quantizer | None
    row: bool
    column: bool


def _pack(value: Tensor, quantizer: Quantizer | None, request: QuantizeRequest | None) -> QuantizeArgs:
    if not _fits(quantizer, request):
        return QuantizeArgs(value, quantizer, row=False, column=False)
    assert request is not None
    check_size("Quantize", "the last axis of what the next operation reads", value, request.size)
    return QuantizeArgs(value, quantizer, request.row, request.column)


def _fits(quantizer: Quantizer | None, request: QuantizeRequest | None) -> bool:
    """Whether the neighbour reads what this quantizer gives."""
    return request is not None and request.quantizer == quantizer


def _compute(args: QuantizeArgs) -> Tensor | Quantized | None:
    """The quantized copies where a neighbour reads them, else the rounded value; None: passed through."""
    if args.quantizer is None:
        return None
    x_MK, leading = as_matrix(args.value), args.value.shape[:-1]
    if args.row or args.column:
        x = quantize_operand(x_MK, args.quantizer, row=args.row, column=args.column)
        return x if x.row_data is None else x._replace(row_data=with_leading(x.row_data, leading))
    x = quantize_operand(x_MK, args.quantizer, row=True, column=False)
    return with_leading(dequantize_rows(x, x_MK.shape[1], args.value.dtype), leading)


class Quantize(BasicOperation):
    """Quantizes what passes through; without a recipe it does nothing.

    Args:
        forward: quantize the input, as the recipe's role "input".
        backward: quantize the gradient, as the recipe's role "grad_output".
    """

    fwd_args_type = QuantizeArgs
    bwd_args_type = QuantizeArgs
    grad_input_is_grad_output = True
    output_is_input = True
    quantizes_output = True
    quantizes_grad_input = True
    replays = True

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self.quantizes_forward = forward
        self.quantizes_backward = backward

    def extra_repr(self) -> str:
        """For `print`."""
        return f"forward={self.quantizes_forward}, backward={self.quantizes_backward}"

    def bypassed(self, recipe: Recipe | None) -> bool:
        """Without a recipe."""
        return recipe is None or not (self.quantizes_forward or self.quantizes_backward)

    def hands_over(
        self, basic_op_ctxs: list[OperationContext], direction: Direction, request: QuantizeRequest | None
    ) -> bool:
        """Where the neighbour's quantizer is the same."""
        recipe = basic_op_ctxs[0].recipe
        if recipe is None or not (self.quantizes_forward if direction == "forward" else self.quantizes_backward):
            return False
        return _fits(recipe.quantizer("input" if direction == "forward" else "grad_output"), request)

    def pack_forward_args(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: QuantizeRequest | None,
        next_op_input_quantizer: QuantizeRequest | None,
        **_: Any,
    ) -> QuantizeArgs:
        """The input, and what the next operation reads."""
        ctx = basic_op_ctxs[0]
        ctx.grad_request = prev_op_grad_output_quantizer
        assert ctx.recipe is not None  # bypassed otherwise
        ctx.grad_quantizer = ctx.recipe.quantizer("grad_output") if self.quantizes_backward else None
        return _pack(input_, ctx.recipe.quantizer("input") if self.quantizes_forward else None, next_op_input_quantizer)

    @classmethod
    def forward_compute(cls, args: QuantizeArgs, *, in_custom_op: bool = False) -> Any:
        """Quantize, or quantize and dequantize."""
        return _compute(args), ((),), ()

    def pack_backward_args(self, basic_op_ctxs: list[BackwardContext], grad_output: Tensor, **_: Any) -> QuantizeArgs:
        """The gradient, and what the operation before reads."""
        ctx = basic_op_ctxs[0]
        return _pack(grad_output, ctx.grad_quantizer, ctx.grad_request)

    @classmethod
    def backward_compute(cls, args: QuantizeArgs, *, in_custom_op: bool = False) -> Any:
        """Quantize, or quantize and dequantize."""
        return _compute(args), ((),), ((),)
