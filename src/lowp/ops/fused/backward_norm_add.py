"""MakeExtraOutput + a norm in backward: the extra output's gradient is added where the norm's gradient is written.

As where the residual branch begins. The sum is rounded as the separate addition rounds it: bit for bit unfused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowp.ops.basic.make_extra_output import MakeExtraOutput
from lowp.ops.basic.normalization import Normalization
from lowp.ops.normalization_args import NormalizationBackwardArgs
from lowp.ops.op import BackwardContext
from lowp.ops.plan import FusedOperation, FusionRule, register_fusion


class BackwardNormAdd(FusedOperation):
    """`dx = norm's gradient of dy + d_extra`, in new memory: others may read `d_extra`."""

    fuses = (MakeExtraOutput, Normalization)
    bwd_args_type = NormalizationBackwardArgs
    replays = True

    def pack_backward_args(
        self,
        basic_op_ctxs: list[BackwardContext],
        grad_output: Tensor | None,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> NormalizationBackwardArgs:
        """The norm's arguments, with the residual."""
        grad_extra = basic_op_grad_extra_outputs[0][0]
        return self.basic_ops[1].pack_norm_grad(basic_op_ctxs[1], grad_output, grad_extra)

    @classmethod
    def backward_compute(cls, args: NormalizationBackwardArgs, *, in_custom_op: bool = False) -> Any:
        """The norm's backward, which adds; where only the extra output was used, its gradient."""
        if args.grad_output is None:
            return None if args.residual is None else args.residual.clone(), ((), (None, None)), ((), ())
        grad_input, parameters, _ = Normalization.backward_compute(args, in_custom_op=in_custom_op)
        return grad_input, ((), *parameters), ((), ())


register_fusion(FusionRule("backward", BackwardNormAdd))
