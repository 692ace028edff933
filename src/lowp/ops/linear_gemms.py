"""The three GEMMs of a linear layer, on the operands that a recipe asks for.

Shape legend: M = tokens, N = out features, K = in features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowp.kernels.gemm import gemm, gemm_into, scaled_gemm, scaled_gemm_into
from lowp.quantization import Quantized, as_matrix, cast_operand, dequantize_rows, measure, quantize_operand

if TYPE_CHECKING:
    from lowp.ops.basic.basic_linear import LinearBackwardArgs, LinearForwardArgs


def fprop(args: LinearForwardArgs) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`y = x @ w.T + bias`.

    Returns:
        y: `[..., N]`.
        aux: fresh tensors: the input's copy that backward reads and its scale, where this call makes one; the weight's
            statistics, where its quantizer has any.
    """
    if args.weight_quantizer is None:
        y_MN = gemm(as_matrix(args.input).to(args.dtype), args.weight.to(args.dtype), args.bias, dtype=args.dtype)
        return with_leading(y_MN, args.input.shape[:-1]), ()
    x, kept = args.input, ()
    if isinstance(x, Tensor):
        leading = x.shape[:-1]
        x = quantize_operand(as_matrix(x).to(args.dtype), args.input_quantizer, row=True, column=args.keep_column)
        if args.keep_column or args.keep_row:
            kept = x[2:] if args.keep_column else x[:2]
    else:
        leading = x.row_data.shape[:-1]
        x = x._replace(row_data=as_matrix(x.row_data))
    statistics = measure(args.weight, args.weight_quantizer)
    w = cast_operand(args.weight, statistics, args.weight_quantizer, row=True, column=False)
    y_MN = scaled_gemm(
        x.row_data,
        x.row_scale,
        w.row_data,
        w.row_scale,
        args.bias,
        dtype=args.dtype,
        fast_accumulation=args.fast_accumulation,
    )
    return with_leading(y_MN, leading), (*kept, *(() if statistics is None else (statistics,)))


def grad_operand(args: LinearBackwardArgs) -> Tensor | Quantized:
    """The output's gradient as dgrad and wgrad read it: `[M, N]`, quantized where the recipe says so."""
    if isinstance(args.grad_output, Quantized):
        return args.grad_output
    dy_MN = as_matrix(args.grad_output).to(args.dtype)
    if args.grad_output_quantizer is None or not (args.input_requires_grad or args.weight_requires_grad):
        return dy_MN
    return quantize_operand(
        dy_MN, args.grad_output_quantizer, row=args.input_requires_grad, column=args.weight_requires_grad
    )


def dgrad(args: LinearBackwardArgs, dy: Tensor | Quantized) -> Tensor:
    """`dx = dy @ w`, `[..., K]`."""
    if isinstance(dy, Quantized):
        w = cast_operand(args.weight, args.weight_statistics, args.weight_quantizer, row=False, column=True)
        dx_MK = scaled_gemm(
            dy.row_data,
            dy.row_scale,
            w.column_data,
            w.column_scale,
            dtype=args.input_dtype,
            fast_accumulation=args.fast_dgrad,
        )
    else:
        dx_MK = gemm(dy, _backward_weight(args).t(), dtype=args.input_dtype)
    return with_leading(dx_MK, args.leading)


def _backward_weight(args: LinearBackwardArgs) -> Tensor:
    """The weight of an unquantized dgrad: as it is, or as fprop read it."""
    if args.override != "dequantized":
        return args.weight.to(args.dtype)
    w = cast_operand(args.weight, args.weight_statistics, args.weight_quantizer, row=True, column=False)
    return dequantize_rows(w, args.weight.shape[1], args.dtype)


def wgrad(args: LinearBackwardArgs, dy: Tensor | Quantized) -> Tensor | None:
    """`dw = dy.T @ x`, `[N, K]` in the weight's dtype; None where it went into `main_grad`."""
    x = args.input
    if isinstance(dy, Quantized):
        operands = (dy.column_data, dy.column_scale, x.column_data, x.column_scale)
        if args.main_grad is None:
            return scaled_gemm(*operands, dtype=args.weight.dtype, fast_accumulation=args.fast_wgrad)
        scaled_gemm_into(*operands, args.main_grad, fast_accumulation=args.fast_wgrad, accumulate=args.accumulate)
        return None
    if isinstance(x, Quantized):
        x = dequantize_rows(x, args.weight.shape[1], args.dtype)
    x_MK = as_matrix(x).to(args.dtype)
    if args.main_grad is None:
        return gemm(dy.t(), x_MK.t(), dtype=args.weight.dtype)
    gemm_into(dy.t(), x_MK.t(), args.main_grad, accumulate=args.accumulate)
    return None


def with_leading(y_MN: Tensor, leading: tuple[int, ...] | torch.Size) -> Tensor:
    """`[M, N] -> [..., N]`, not as a view: users may change an operation's output in place."""
    if len(leading) == 1:
        return y_MN
    return torch.ops.aten._unsafe_view.default(y_MN, [*leading, y_MN.shape[-1]])
