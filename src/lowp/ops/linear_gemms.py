"""The three GEMMs of a linear layer, on the operands that a recipe asks for, with the collectives around them.

Shape legend: M = tokens, N = out features, K = in features, all of them local; see `lowp.distributed.shapes` for local
shapes. Under sequence parallelism the operand that holds part of the tokens is gathered: quantized, one amax is agreed
first and fp8 bytes travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lowp.distributed.collectives import Pending, all_gather, all_reduce, reduce_scatter
from lowp.distributed.shapes import Parallel, ParallelMode
from lowp.kernels.gemm import gemm, scaled_gemm
from lowp.kernels.transpose import transpose_data
from lowp.ops.delayed_wgrad import WgradOperands, keep
from lowp.quantization import (
    Quantized,
    as_matrix,
    cast_operand,
    dequantize_rows,
    measure,
    measure_once,
    quantize_operand,
)
from lowp.quantizers import Quantizer

if TYPE_CHECKING:
    from lowp.ops.linear_args import LinearBackwardArgs, LinearForwardArgs


class Rows(NamedTuple):
    """A quantized operand whose rows are on their way from all ranks, and the one scale of them all."""

    data: Pending
    scale: Tensor

    def wait(self, columns: int, *, row: bool, column: bool) -> Quantized:
        """The gathered operand with the copies asked for; the column copy is the transpose of the row copy."""
        data = self.data.wait()
        column_data = transpose_data(data, columns) if column else None
        return Quantized(
            data if row else None, self.scale if row else None, column_data, self.scale if column else None
        )


class _Gathering(NamedTuple):
    """An operand of which each rank has some rows.

    Attributes:
        own: this rank's rows, quantized with statistics that all ranks agree on.
        statistics: these.
        rows: of all ranks.
    """

    own: Quantized
    statistics: Tensor | None
    rows: Rows


def _start_rows(x_MK: Tensor, spec: Quantizer, parallel: Parallel) -> _Gathering:
    """Quantize this rank's rows and start gathering all ranks'."""
    statistics = measure(x_MK, spec)
    if statistics is not None:
        statistics = all_reduce(statistics, parallel.group, "max").wait()
    own = cast_operand(x_MK, statistics, spec, row=True, column=False)
    return _Gathering(own, statistics, Rows(all_gather(own.row[0], parallel.group), own.row[1]))


def _reduced(y_MN: Tensor, parallel: Parallel, mode: ParallelMode) -> Pending:
    """The sum over the ranks where the GEMM's contraction axis is split: fprop under "row", dgrad under "column"."""
    if parallel.mode != mode:
        return Pending(y_MN, started=False)
    if parallel.sequence_parallel:
        return reduce_scatter(y_MN, parallel.group)
    return all_reduce(y_MN, parallel.group)


def fprop(args: LinearForwardArgs) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`y = factor * x @ w.T + bias + addend`.

    Returns:
        y: `[..., N]`.
        aux: fresh tensors: the input's copy that backward reads and its scale, where this call makes one, or its
            statistics; those of the weight, where they are kept and cost a pass of their own.
    """
    x, parallel = args.input, args.parallel
    leading = x.row[0].shape[:-1] if isinstance(x, Quantized) else x.shape[:-1]
    aux: tuple[Tensor, ...] = ()
    addend_MN = None if args.addend is None else as_matrix(args.addend)
    epilogue: dict[str, Any] = {"addend_MN": addend_MN, "factor": args.factor, "dtype": args.dtype}
    if args.weight_quantizer is None:
        assert isinstance(x, Tensor)
        x_MK = as_matrix(x).to(args.dtype)
        gathering = all_gather(x_MK, parallel.group if parallel.gathers("column") else None)
        w_NK = args.weight.to(args.dtype)
        y_MN = gemm(gathering.wait(), w_NK, args.bias, **epilogue)
    else:
        wait_for_input = _start_input(args)
        statistics = measure_once(args.weight, args.weight_quantizer) if args.keep_weight_statistics else None
        w = cast_operand(args.weight, statistics, args.weight_quantizer, row=True, column=False)
        operand, aux = wait_for_input()
        y_MN = scaled_gemm(*operand.row, *w.row, args.bias, fast_accumulation=args.fast_accumulation, **epilogue)
        aux = (*aux, *(() if statistics is None else (statistics,)))
    y_MN = _reduced(y_MN, parallel, "row").wait()
    return with_leading(y_MN, parallel.output_leading(leading)), aux


def _start_input(args: LinearForwardArgs) -> Callable[[], tuple[Quantized, tuple[Tensor, ...]]]:
    """Quantize the input and start gathering it, if fprop needs it whole; the weight is cast meanwhile.

    Returns:
        A function that waits and gives the operand, and the copy that backward reads where it is made here.
    """
    x = args.input
    if isinstance(x, Quantized):
        operand = x._replace(row_data=as_matrix(x.row[0]))
        return lambda: (operand, ())
    assert args.input_quantizer is not None
    x_MK, spec = as_matrix(x).to(args.dtype), args.input_quantizer
    if not args.parallel.gathers("column"):
        # whatever the size, which may be symbolic
        statistics = measure(x_MK, spec) if args.keep_statistics else None
        operand = cast_operand(x_MK, statistics, spec, row=True, column=args.keep_column)
        return lambda: (operand, _kept(args, operand, operand, statistics))
    gathering = _start_rows(x_MK, spec, args.parallel)

    def wait() -> tuple[Quantized, tuple[Tensor, ...]]:
        gathered = gathering.rows.wait(x_MK.shape[1], row=True, column=args.keep_column)
        return gathered, _kept(args, gathered, gathering.own, gathering.statistics)

    return wait


def _kept(
    args: LinearForwardArgs, gathered: Quantized, own: Quantized, statistics: Tensor | None
) -> tuple[Tensor, ...]:
    """What backward reads of the input; an empty bool tensor stands for no statistics."""
    if args.keep_column:
        return gathered.column
    if args.keep_row:
        return own.row
    if not args.keep_statistics:
        return ()
    return (own.row[1].new_empty(0, dtype=torch.bool) if statistics is None else statistics,)


def start_grad(args: LinearBackwardArgs) -> Callable[[], Tensor | Quantized]:
    """Start gathering the output's gradient, if dgrad and wgrad need it whole; the weight is cast meanwhile.

    Returns:
        A function that waits and gives it as `[M, N]`, quantized where the recipe says so.
    """
    dy = args.grad_output
    assert dy is not None
    if isinstance(dy, Quantized):
        flat = dy if dy.row_data is None else dy._replace(row_data=as_matrix(dy.row_data))
        return lambda: flat
    dy_MN = as_matrix(dy).to(args.dtype)
    group = args.parallel.group if args.parallel.gathers("row") else None
    spec = args.grad_output_quantizer
    if spec is None or not (args.input_requires_grad or args.weight_requires_grad):
        return all_gather(dy_MN, group).wait
    copies = {"row": args.input_requires_grad, "column": args.weight_requires_grad}
    if group is not None:
        rows = _start_rows(dy_MN, spec, args.parallel).rows
        return lambda: rows.wait(dy_MN.shape[1], **copies)
    operand = quantize_operand(dy_MN, spec, **copies)
    return lambda: operand


def start_input(args: LinearBackwardArgs) -> Callable[[], Tensor | Quantized]:
    """Start gathering what forward kept of the input, if wgrad needs it whole; dgrad may run meanwhile.

    Returns:
        A function that waits and gives wgrad's operand: `[M, K]`, or the column copy.
    """
    x, group = args.input, args.parallel.group if args.parallel.gathers("column") else None
    assert x is not None
    if isinstance(x, Tensor) and args.input_quantizer is not None:
        by_row = group is not None or not args.is_quantized
        x_MK = as_matrix(x).to(args.dtype)
        x = cast_operand(x_MK, args.input_statistics, args.input_quantizer, row=by_row, column=not by_row)
    if isinstance(x, Tensor):
        return all_gather(as_matrix(x).to(args.dtype), group).wait
    if x.row_data is None:
        column = x
        return lambda: column
    rows, K = Rows(all_gather(as_matrix(x.row_data), group), x.row[1]), args.weight_shape[1]
    if args.is_quantized:
        return lambda: rows.wait(K, row=False, column=True)
    return lambda: dequantize_rows(rows.wait(K, row=True, column=False), K, args.dtype)


def dgrad_weight(args: LinearBackwardArgs) -> Tensor | Quantized:
    """The weight as dgrad reads it."""
    assert args.weight is not None
    if args.is_quantized:
        return _cast_weight(args, row=False, column=True)
    if args.override == "dequantized":
        return dequantize_rows(_cast_weight(args, row=True, column=False), args.weight_shape[1], args.dtype)
    return args.weight.to(args.dtype)


def dgrad(args: LinearBackwardArgs, dy: Tensor | Quantized, w: Tensor | Quantized) -> Pending:
    """`dx = factor * dy @ w + addend`, `[M, K]`; its reduction has started, and wgrad runs meanwhile."""
    addend_MK = None if args.addend is None else as_matrix(args.addend)
    epilogue: dict[str, Any] = {"addend_MN": addend_MK, "factor": args.factor, "dtype": args.input_dtype}
    if isinstance(w, Quantized):
        assert isinstance(dy, Quantized)
        dx_MK = scaled_gemm(*dy.row, *w.column, fast_accumulation=args.fast_dgrad, **epilogue)
    else:
        assert isinstance(dy, Tensor)
        dx_MK = gemm(dy, w.t(), **epilogue)
    return _reduced(dx_MK, args.parallel, "column")


def _cast_weight(args: LinearBackwardArgs, *, row: bool, column: bool) -> Quantized:
    """The weight as fprop read it: cast again, with the statistics of the forward pass where these were kept."""
    assert args.weight is not None
    assert args.weight_quantizer is not None
    return cast_operand(args.weight, args.weight_statistics, args.weight_quantizer, row=row, column=column)


def wgrad(args: LinearBackwardArgs, operands: WgradOperands, *, in_custom_op: bool) -> Tensor | None:
    """`dw = dy.T @ x`, `[N, K]` in the weight's dtype; None where it went into `main_grad`, or is left for later."""
    if args.ticket is not None:
        keep(args.ticket, operands, copy=in_custom_op or torch.compiler.is_compiling())
    elif args.main_grad is not None:
        operands.multiply_into(args.main_grad, accumulate=args.accumulate)
    else:
        return operands.multiply(args.weight_dtype)
    return None


def empty_weight(args: LinearBackwardArgs) -> Tensor:
    """A tensor like the weight, of undefined content."""
    assert args.main_grad is not None
    return args.main_grad.new_empty(args.weight_shape, dtype=args.weight_dtype)


def released(args: LinearBackwardArgs, dy: Tensor | Quantized, copy: str, in_custom_op: bool) -> Tensor | Quantized:
    """The gradient without the copy that is read no more; in eager mode, its memory is free then."""
    if in_custom_op or not isinstance(dy, Quantized):
        return dy
    if copy == "column_data":
        args.input = None  # wgrad is done
    args.grad_output = dy._replace(**{copy: None})
    return args.grad_output


def with_leading(y_MN: Tensor, leading: tuple[int, ...] | torch.Size) -> Tensor:
    """`[M, N] -> [..., N]`, not as a view: users may change an operation's output in place."""
    if len(leading) == 1:
        return y_MN
    return torch.ops.aten._unsafe_view.default(y_MN, [*leading, y_MN.shape[-1]])
