"""MakeExtraOutput + Linear in backward: the extra output's gradient is added in the epilogue of dgrad."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowp.ops.basic.basic_linear import BasicLinear
from lowp.ops.basic.make_extra_output import MakeExtraOutput
from lowp.ops.fused.linear_epilogue import sum_over_ranks
from lowp.ops.linear_args import LinearBackwardArgs
from lowp.ops.op import BackwardContext
from lowp.ops.plan import FusedOperation, FusionRule, Window, register_fusion
from lowp.quantization import Quantized


class BackwardLinearAdd(FusedOperation):
    """`dx = dy @ w + d_extra`, in new memory: others may read `d_extra`."""

    fuses = (MakeExtraOutput, BasicLinear)
    bwd_args_type = LinearBackwardArgs
    replays = True

    def pack_backward_args(
        self,
        basic_op_ctxs: list[BackwardContext],
        grad_output: Tensor | Quantized | None,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> LinearBackwardArgs:
        """BasicLinear's arguments, with the addend."""
        grad_extra = basic_op_grad_extra_outputs[0][0]
        return self.basic_ops[1].pack_linear_grad(basic_op_ctxs[1], grad_output, addend=grad_extra)

    @classmethod
    def backward_compute(cls, args: LinearBackwardArgs, *, in_custom_op: bool = False) -> Any:
        """BasicLinear's backward, which adds; where only the extra output was used, its gradient."""
        if args.grad_output is None:
            return None if args.addend is None else args.addend.clone(), ((), (None,)), ((), ())
        grad_input, parameters, _ = BasicLinear.backward_compute(args, in_custom_op=in_custom_op)
        return grad_input, ((), *parameters), ((), ())


def _condition(window: Window) -> str | None:
    return sum_over_ranks(window.ops[1], "column")


register_fusion(FusionRule("backward", BackwardLinearAdd, _condition))
