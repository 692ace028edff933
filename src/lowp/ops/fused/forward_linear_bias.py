"""Linear + Bias in forward: the bias is added in the GEMM's epilogue. Backward stays two operations."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowp.distributed.collectives import group_size
from lowp.ops.basic.basic_linear import BasicLinear
from lowp.ops.basic.bias import Bias
from lowp.ops.linear_args import LinearForwardArgs
from lowp.ops.op import OperationContext
from lowp.ops.plan import FusedOperation, FusionRule, Window, register_fusion
from lowp.quantization import Quantized


class ForwardLinearBias(FusedOperation):
    """`y = x @ w.T + b`, rounded once."""

    fuses = (BasicLinear, Bias)
    fwd_args_type = LinearForwardArgs
    replays = True

    def pack_forward_args(
        self, basic_op_ctxs: list[OperationContext], input_: Tensor | Quantized, **_: Any
    ) -> LinearForwardArgs:
        """BasicLinear's arguments, with the bias."""
        linear, bias = self.basic_ops
        linear_ctx, bias_ctx = basic_op_ctxs
        bias.setup_bias(bias_ctx, linear.grad_output_request(linear_ctx) if linear_ctx.requires_grad else None)
        return linear.pack_linear(linear_ctx, input_, bias_ctx.parameters[0])

    @classmethod
    def forward_compute(cls, args: LinearForwardArgs, *, in_custom_op: bool = False) -> Any:
        """BasicLinear's forward, which adds the bias."""
        output, _, aux = BasicLinear.forward_compute(args, in_custom_op=in_custom_op)
        return output, ((), ()), aux

    def forward_setup_context(
        self, basic_op_ctxs: list[OperationContext], args: LinearForwardArgs, aux: tuple[Tensor, ...]
    ) -> None:
        """What BasicLinear's backward reads; Bias's reads nothing more."""
        if basic_op_ctxs[0].requires_grad:
            self.basic_ops[0].setup_linear(basic_op_ctxs[0], args, aux)


def _condition(window: Window) -> str | None:
    linear, bias = window.ops
    if linear.parallel.mode == "row" and group_size(linear.parallel.group) > 1:
        return "the bias is added once, after the sum over the ranks"
    if linear.local_out_features != bias.size:
        return f"the bias has {bias.size} elements for {linear.local_out_features} features"
    dtype = linear.output_dtype(window.dtype, window.autocast_dtype)
    if bias.output_dtype(dtype, window.autocast_dtype) != dtype:
        return f"the sum of {dtype} and a bias of {bias.parameter('bias').dtype} has another dtype than the product"
    return None


register_fusion(FusionRule("forward", ForwardLinearBias, _condition))
