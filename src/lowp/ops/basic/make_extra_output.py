"""MakeExtraOutput: hands its input to the next operation and to the caller, as where a residual branch begins.

y = x    extra = x    dx = dy + d_extra
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lowp.kernels.elementwise import add
from lowp.ops.basic_op import BasicOperation
from lowp.ops.op import BackwardContext, OperationContext


@dataclass
class MakeExtraOutputBackwardArgs:
    """What the backward pass reads: the gradients of both outputs, of which one at least is there."""

    GRAD_OUTPUT_FIELDS: ClassVar[tuple[str, ...]] = ("grad_output", "grad_extra")

    grad_output: Tensor | None
    grad_extra: Tensor | None


class MakeExtraOutput(BasicOperation):
    """Gives its input as an extra output too.

    Nothing is computed in forward. What the operation before made is the extra output itself; the pipeline's own input
    and output are never an extra output, but copied to one.
    """

    bwd_args_type = MakeExtraOutputBackwardArgs
    output_is_input = True
    extra_output_is_input = True
    grad_input_is_grad_output = True
    num_extra_outputs = 1
    replays = True

    def pack_forward_args(self, basic_op_ctxs: list[OperationContext], input_: Tensor, **_: Any) -> None:
        """Nothing."""

    @classmethod
    def forward_compute(cls, args: None, *, in_custom_op: bool = False) -> Any:
        """Nothing: the input passes through, twice."""
        return None, ((None,),), ()

    def pack_backward_args(
        self,
        basic_op_ctxs: list[BackwardContext],
        grad_output: Tensor | None,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> MakeExtraOutputBackwardArgs:
        """The gradients of both outputs."""
        return MakeExtraOutputBackwardArgs(grad_output, basic_op_grad_extra_outputs[0][0])

    @classmethod
    def backward_compute(cls, args: MakeExtraOutputBackwardArgs, *, in_custom_op: bool = False) -> Any:
        """The sum, in new memory: others may read either gradient. None: the output's passes through."""
        grad_input: Tensor | None = None
        if args.grad_output is not None and args.grad_extra is not None:
            grad_input = add(args.grad_output, args.grad_extra)
        elif args.grad_extra is not None:
            grad_input = args.grad_extra.clone()
        return grad_input, ((),), ((),)
