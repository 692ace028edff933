"""What fusions of BasicLinear with operations that its GEMM's epilogue computes have in common.

    forward   y = factor * x @ w.T + b + extra      dgrad   dx = factor * dy @ w + d_extra

Each result is rounded once, or has the bits of the unfused operations: see `lowp.kernels.gemm`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowp.distributed.collectives import group_size
from lowp.distributed.shapes import ParallelMode
from lowp.ops.basic.add_extra_input import AddExtraInput
from lowp.ops.basic.basic_linear import BasicLinear
from lowp.ops.basic.bias import Bias
from lowp.ops.basic.constant_scale import ConstantScale
from lowp.ops.linear_args import LinearForwardArgs
from lowp.ops.op import OperationContext
from lowp.ops.plan import FusedOperation, Window
from lowp.quantization import Quantized


class ForwardLinearEpilogue(FusedOperation):
    """BasicLinear, then perhaps Bias or ConstantScale, then perhaps AddExtraInput; a rule says which of them."""

    def pack_forward_args(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor | Quantized,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        **_: Any,
    ) -> LinearForwardArgs:
        """BasicLinear's arguments, with the bias, the factor and the addend."""
        linear, linear_ctx = self.basic_ops[0], basic_op_ctxs[0]
        args = linear.pack_linear(linear_ctx, input_)
        whole = input_.row[0] if isinstance(input_, Quantized) else input_
        shape = (*linear.parallel.output_leading(whole.shape[:-1]), linear.local_out_features)
        for index in range(1, len(self.basic_ops)):
            op, ctx = self.basic_ops[index], basic_op_ctxs[index]
            if isinstance(op, Bias):
                op.setup_bias(ctx, linear.grad_output_request(linear_ctx) if linear_ctx.requires_grad else None)
                args.bias = ctx.parameters[0]
            elif isinstance(op, ConstantScale):
                op.setup_scale(ctx)
                args.factor = ctx.scale
            elif isinstance(op, AddExtraInput):
                args.addend = basic_op_extra_inputs[index][0]
                op.setup_extra(ctx, args.addend, shape)
        return args

    @classmethod
    def forward_compute(cls, args: LinearForwardArgs, *, in_custom_op: bool = False) -> Any:
        """BasicLinear's forward, with the epilogue."""
        output, _, aux = BasicLinear.forward_compute(args, in_custom_op=in_custom_op)
        return output, ((),) * len(cls.fuses), aux

    def forward_setup_context(
        self, basic_op_ctxs: list[OperationContext], args: LinearForwardArgs, aux: tuple[Tensor, ...]
    ) -> None:
        """What BasicLinear's backward reads; the others' reads nothing more."""
        if basic_op_ctxs[0].requires_grad:
            self.basic_ops[0].setup_linear(basic_op_ctxs[0], args, aux)


def sum_over_ranks(linear: BasicLinear, mode: ParallelMode) -> str | None:
    """Why nothing can be added in the epilogue of the GEMM that this mode splits; None: it can."""
    if linear.parallel.mode == mode and group_size(linear.parallel.group) > 1:
        return "it is applied once, after the sum over the ranks"
    return None


def epilogue_condition(window: Window) -> str | None:
    """Why the epilogue can't compute what follows BasicLinear."""
    linear, *others = window.ops
    reason = sum_over_ranks(linear, "row")
    if reason is not None:
        return reason
    dtype = linear.output_dtype(window.dtype, window.autocast_dtype)
    for op, extra_dtypes in zip(others, window.extra_dtypes[1:], strict=True):
        if isinstance(op, Bias) and linear.local_out_features != op.size:
            return f"the bias has {op.size} elements for {linear.local_out_features} features"
        if op.output_dtype(dtype, window.autocast_dtype, extra_dtypes) != dtype:
            added = f"a bias of {op.parameter('bias').dtype}" if isinstance(op, Bias) else f"{extra_dtypes[0]}"
            return f"the sum of {dtype} and {added} has another dtype than the product"
    return None
