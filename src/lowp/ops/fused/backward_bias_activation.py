"""Bias + activation in backward: the bias's gradient is summed where the activation's is quantized, from its source.

Bit for bit the two operations one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowp.formats import HIGH_PRECISION
from lowp.kernels.bias_grad import bias_grad
from lowp.kernels.materialize import materialize
from lowp.ops.basic.activation import Activation, ActivationBackwardArgs, gradient_source
from lowp.ops.basic.bias import Bias
from lowp.ops.handover import copies, shaped, wants_quantized
from lowp.ops.linear_gemms import with_leading
from lowp.ops.op import BackwardContext, Direction, OperationContext
from lowp.ops.plan import FusedOperation, FusionRule, Window, register_fusion
from lowp.quantization import QuantizeRequest, cast_operand_bias_grad


@dataclass(kw_only=True)
class BiasActivationBackwardArgs(ActivationBackwardArgs):
    """What the activation's backward reads, and of the bias's gradient the dtype; None: it isn't wanted."""

    bias_dtype: torch.dtype | None
    input_requires_grad: bool


class BackwardBiasActivation(FusedOperation):
    """`dx = dy f'(x)`, `db = sum of dx over all leading axes`."""

    fuses = (Bias, Activation)
    bwd_args_type = BiasActivationBackwardArgs
    quantizes_grad_input = True
    replays = True

    def hands_over(
        self, basic_op_ctxs: list[OperationContext], direction: Direction, request: QuantizeRequest | None
    ) -> bool:
        """To what is before the bias."""
        return wants_quantized(request)

    def pack_backward_args(
        self, basic_op_ctxs: list[BackwardContext], grad_output: Tensor, **_: Any
    ) -> BiasActivationBackwardArgs:
        """The activation's arguments, and what the operation before the bias reads."""
        bias, activation = self.basic_ops
        bias_ctx, ctx = basic_op_ctxs
        quantizer, row, column = copies(bias_ctx.bias_request, bias.size)
        args = activation.pack_activation_grad(ctx, grad_output, quantizer, row, column)
        return BiasActivationBackwardArgs(
            grad_output=args.grad_output,  # field by field: torch 2.11 doesn't trace `**vars(args)`
            input=args.input,
            spec=args.spec,
            quantizer=args.quantizer,
            row=args.row,
            column=args.column,
            bias_dtype=bias_ctx.bias_dtype if bias_ctx.parameters_require_grad[0] else None,
            input_requires_grad=bias_ctx.input_requires_grad,
        )

    @classmethod
    def backward_compute(cls, args: BiasActivationBackwardArgs, *, in_custom_op: bool = False) -> Any:
        """Both gradients, in one pass where the operation before reads a quantized one."""
        if args.bias_dtype is None:
            grad_input, _, _ = Activation.backward_compute(args, in_custom_op=in_custom_op)
            return grad_input, ((None,), ()), ((), ())
        source, leading = gradient_source(args), args.input.shape[:-1]
        if args.quantizer is not None:
            dx, grad_bias = cast_operand_bias_grad(
                source, None, args.quantizer, row=args.row, column=args.column, dtype=args.bias_dtype
            )
            return shaped(dx, leading), ((grad_bias,), ()), ((), ())
        if not args.input_requires_grad:
            return None, ((bias_grad(source, args.bias_dtype),), ()), ((), ())
        dx_MK = materialize(source)  # read again for the sums: less traffic than working it out twice
        return with_leading(dx_MK, leading), ((bias_grad(dx_MK, args.bias_dtype),), ()), ((), ())


def _condition(window: Window) -> str | None:
    bias, _ = window.ops
    dtype = bias.output_dtype(window.dtype, window.autocast_dtype)
    if dtype != window.dtype:
        return f"the bias promotes {window.dtype} to {dtype}"
    if bias.parameter("bias").dtype not in HIGH_PRECISION:
        return f"there is no kernel for a bias of {bias.parameter('bias').dtype}"
    return None


register_fusion(FusionRule("backward", BackwardBiasActivation, _condition))
