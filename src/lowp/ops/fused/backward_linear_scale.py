"""ConstantScale + Linear in backward: dgrad's product is scaled in its epilogue."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowp.ops.basic.basic_linear import BasicLinear
from lowp.ops.basic.constant_scale import ConstantScale
from lowp.ops.fused.linear_epilogue import sum_over_ranks
from lowp.ops.linear_args import LinearBackwardArgs
from lowp.ops.op import BackwardContext
from lowp.ops.plan import FusedOperation, FusionRule, Window, register_fusion
from lowp.quantization import Quantized


class BackwardLinearScale(FusedOperation):
    """`dx = scale * dy @ w`, rounded once."""

    fuses = (ConstantScale, BasicLinear)
    bwd_args_type = LinearBackwardArgs
    replays = True

    def pack_backward_args(
        self, basic_op_ctxs: list[BackwardContext], grad_output: Tensor | Quantized, **_: Any
    ) -> LinearBackwardArgs:
        """BasicLinear's arguments, with the factor."""
        scale_ctx, linear_ctx = basic_op_ctxs
        return self.basic_ops[1].pack_linear_grad(linear_ctx, grad_output, factor=scale_ctx.scale)

    @classmethod
    def backward_compute(cls, args: LinearBackwardArgs, *, in_custom_op: bool = False) -> Any:
        """BasicLinear's backward, which scales."""
        grad_input, parameters, _ = BasicLinear.backward_compute(args, in_custom_op=in_custom_op)
        return grad_input, ((), *parameters), ((), ())


def _condition(window: Window) -> str | None:
    return sum_over_ranks(window.ops[1], "column")


register_fusion(FusionRule("backward", BackwardLinearScale, _condition))
