"""AddExtraInput: adds an extra input, as where a residual branch ends.

y = x + extra    dx = d_extra = dy, the gradient itself
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowp.errors import fail
from lowp.kernels.elementwise import add
from lowp.ops.basic_op import BasicOperation
from lowp.ops.op import BackwardContext, OperationContext


@dataclass
class AddExtraInputArgs:
    """What the forward pass reads."""

    input: Tensor
    extra: Tensor


class AddExtraInput(BasicOperation):
    """Adds an extra input of the input's shape; the output's dtype is torch's promotion of both.

    Raises:
        ValueError: the extra input has another shape.
    """

    fwd_args_type = AddExtraInputArgs
    grad_input_is_grad_output = True
    num_extra_inputs = 1
    replays = True

    def output_dtype(
        self, input_dtype: torch.dtype, autocast_dtype: torch.dtype | None, extra_dtypes: tuple[torch.dtype, ...] = ()
    ) -> torch.dtype:
        """As torch promotes the input's and the extra input's."""
        return torch.promote_types(input_dtype, extra_dtypes[0]) if extra_dtypes else input_dtype

    def pack_forward_args(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        **_: Any,
    ) -> AddExtraInputArgs:
        """Both inputs."""
        extra = basic_op_extra_inputs[0][0]
        self.setup_extra(basic_op_ctxs[0], extra, input_.shape)
        return AddExtraInputArgs(input_, extra)

    def setup_extra(self, ctx: OperationContext, extra: Tensor, shape: Sequence[int]) -> None:
        """Fill this operation's context, whose input has `shape`; for fusions too."""
        if extra.shape != shape:
            fail("AddExtraInput", f"the extra input must have shape {tuple(shape)}", got=tuple(extra.shape))
        ctx.extra_dtype = extra.dtype

    @classmethod
    def forward_compute(cls, args: AddExtraInputArgs, *, in_custom_op: bool = False) -> Any:
        """The sum."""
        return add(args.input, args.extra), ((),), ()

    def pack_backward_args(
        self, basic_op_ctxs: list[BackwardContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor, torch.dtype, bool]:
        """The gradient, and what becomes of it."""
        ctx = basic_op_ctxs[0]
        return grad_output, ctx.extra_dtype, ctx.extra_inputs_require_grad[0]

    @classmethod
    def backward_compute(cls, args: tuple[Tensor, torch.dtype, bool], *, in_custom_op: bool = False) -> Any:
        """Nothing: the gradient passes through to both inputs."""
        grad_output, extra_dtype, wanted = args
        return None, ((),), ((grad_output.to(extra_dtype) if wanted else None,),)
