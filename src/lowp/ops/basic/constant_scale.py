"""ConstantScale: `y = scale * x`, `dx = scale * dy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowp.kernels.elementwise import multiply
from lowp.ops.basic_op import BasicOperation
from lowp.ops.op import BackwardContext, OperationContext


@dataclass
class ConstantScaleArgs:
    """What either pass reads: the input, or the output's gradient, and the factor."""

    value: Tensor
    scale: float


class ConstantScale(BasicOperation):
    """Multiplies by a number that is not learned.

    Args:
        scale: the number; compiled, another one makes another graph.
    """

    fwd_args_type = ConstantScaleArgs
    bwd_args_type = ConstantScaleArgs
    replays = True

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = float(scale)

    def extra_repr(self) -> str:
        """For `print`."""
        return f"scale={self.scale}"

    def pack_forward_args(self, basic_op_ctxs: list[OperationContext], input_: Tensor, **_: Any) -> ConstantScaleArgs:
        """The input and the number."""
        self.setup_scale(basic_op_ctxs[0])
        return ConstantScaleArgs(input_, self.scale)

    def setup_scale(self, ctx: OperationContext) -> None:
        """Fill this operation's context; for fusions too."""
        ctx.scale = self.scale

    @classmethod
    def forward_compute(cls, args: ConstantScaleArgs, *, in_custom_op: bool = False) -> Any:
        """The product."""
        return multiply(args.value, args.scale), ((),), ()

    def pack_backward_args(
        self, basic_op_ctxs: list[BackwardContext], grad_output: Tensor, **_: Any
    ) -> ConstantScaleArgs:
        """The gradient and the number of the forward pass."""
        return ConstantScaleArgs(grad_output, basic_op_ctxs[0].scale)

    @classmethod
    def backward_compute(cls, args: ConstantScaleArgs, *, in_custom_op: bool = False) -> Any:
        """The product."""
        return multiply(args.value, args.scale), ((),), ((),)
