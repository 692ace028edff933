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
    x = args.input
    if args.weight_quantizer is None:
        assert isinstance(x, Tensor)
        y_MN = gemm(as_matrix(x).to(args.dtype), args.weight.to(args.dtype), args.bias, dtype=args.dtype)
        return with_leading(y_MN, x.shape[:-1]), ()
    kept: tuple[Tensor, ...] = ()
    if isinstance(x, Tensor):
        assert args.input_quantizer is not None
        leading = x.shape[:-1]
        x_MK = as_matrix(x).to(args.dtype)
        x = quantize_operand(x_MK, args.input_quantizer, row=True, column=args.keep_column)
        if args.keep_column or args.keep_row:
            kept = x.column if args.keep_column else x.row
    else:
        leading = x.row[0].shape[:-1]
        x = x._replace(row_data=as_matrix(x.row[0]))
    statistics = measure(args.weight, args.weight_quantizer)
    w = cast_operand(args.weight, statistics, args.weight_quantizer, row=True, column=False)
    y_MN = scaled_gemm(*x.row, *w.row, args.bias, dtype=args.dtype, fast_accumulation=args.fast_accumulation)
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
        w = _cast_weight(args, row=False, column=True)
        dx_MK = scaled_gemm(*dy.row, *w.column, dtype=args.input_dtype, fast_accumulation=args.fast_dgrad)
    elif args.override == "dequantized":
        w_NK = dequantize_rows(_cast_weight(args, row=True, column=False), args.weight.shape[1], args.dtype)
        dx_MK = gemm(dy, w_NK.t(), dtype=args.input_dtype)
    else:
        dx_MK = gemm(dy, args.weight.to(args.dtype).t(), dtype=args.input_dtype)
    return with_leading(dx_MK, args.leading)


def _cast_weight(args: LinearBackwardArgs, *, row: bool, column: bool) -> Quantized:
    """The weight as fprop read it: cast again with the statistics of the forward pass."""
    assert args.weight_quantizer is not None
    return cast_operand(args.weight, args.weight_statistics, args.weight_quantizer, row=row, column=column)


def wgrad(args: LinearBackwardArgs, dy: Tensor | Quantized) -> Tensor | None:
    """`dw = dy.T @ x`, `[N, K]` in the weight's dtype; None where it went into `main_grad`."""
    x = args.input
    assert x is not None
    if isinstance(dy, Quantized):
        assert isinstance(x, Quantized)
        operands = (*dy.column, *x.column)
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
