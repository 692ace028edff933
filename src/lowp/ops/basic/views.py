"""Operations that compute nothing: `y = x`, and `y = x.reshape(shape)`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowp.ops.basic_op import ViewOperation
from lowp.ops.op import BackwardContext, OperationContext
from lowp.recipe import Recipe


class _View(ViewOperation):
    def pack_forward_args(self, basic_op_ctxs: list[OperationContext], input_: Tensor, **_: Any) -> Any:
        basic_op_ctxs[0].shape = tuple(input_.shape)
        return self, input_

    @classmethod
    def forward_compute(cls, args: Any, *, in_custom_op: bool = False) -> Any:
        op, input_ = args
        return op.view(input_), ((),), ()

    def pack_backward_args(self, basic_op_ctxs: list[BackwardContext], grad_output: Tensor, **_: Any) -> Any:
        return grad_output, basic_op_ctxs[0].shape

    @classmethod
    def backward_compute(cls, args: Any, *, in_custom_op: bool = False) -> Any:
        grad_output, shape = args
        return grad_output.reshape(shape), ((),), ((),)


class Identity(_View):
    """`y = x`."""

    replays = True

    def bypassed(self, recipe: Recipe | None) -> bool:
        """Always."""
        return True

    def view(self, input_: Tensor) -> Tensor:
        """The input."""
        return input_


class Reshape(_View):
    """`y = x.reshape(shape)`.

    Args:
        shape: sizes of the output; one of them may be -1.
    """

    replays = True

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def view(self, input_: Tensor) -> Tensor:
        """`input_.reshape(shape)`."""
        return input_.reshape(self.shape)

    def extra_repr(self) -> str:
        """For `print`."""
        return f"{self.shape}"
