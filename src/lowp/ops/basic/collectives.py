"""Collectives along the first axis as operations.

AllGather      y = rows of all ranks              dx = this rank's rows of the sum of dy
ReduceScatter  y = this rank's rows of the sum    dx = rows of all ranks' dy
AllReduce      y = sum over the ranks             dx = dy
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from lowp.distributed.collectives import Pending, all_gather, all_reduce, group_size, reduce_scatter
from lowp.distributed.groups import GroupHandle
from lowp.distributed.shapes import check_divisible_sequence
from lowp.ops.basic_op import BasicOperation
from lowp.ops.op import BackwardContext, OperationContext
from lowp.recipe import Recipe


@dataclass
class CollectiveArgs:
    """What either pass reads."""

    value: Tensor
    group: ProcessGroup | None


def _fresh(pending: Pending, value: Tensor) -> Tensor:
    """The result; a copy on one rank, where the collective gives its own input."""
    result = pending.wait()
    return result.clone() if result is value else result


class _Collective(BasicOperation):
    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        super().__init__()
        self._group = GroupHandle(process_group)

    def set_tensor_parallel_group(self, group: ProcessGroup | None) -> None:
        """Say which ranks they are, where they weren't known."""
        self._group = GroupHandle(group)

    def bypassed(self, recipe: Recipe | None) -> bool:
        """On one rank."""
        return group_size(self._group.group) == 1

    def pack_forward_args(self, basic_op_ctxs: list[OperationContext], input_: Tensor, **_: Any) -> CollectiveArgs:
        """The input and the group."""
        return CollectiveArgs(input_, self._group.group)

    def pack_backward_args(self, basic_op_ctxs: list[BackwardContext], grad_output: Tensor, **_: Any) -> CollectiveArgs:
        """The gradient and the group."""
        return CollectiveArgs(grad_output, self._group.group)


class AllGather(_Collective):
    """`[M, ...] -> [T * M, ...]`, rows of all ranks in rank order.

    Args:
        process_group: the ranks; None: this process alone.

    Raises:
        ValueError: the input has no axis.
    """

    fwd_args_type = CollectiveArgs
    bwd_args_type = CollectiveArgs

    def pack_forward_args(self, basic_op_ctxs: list[OperationContext], input_: Tensor, **_: Any) -> CollectiveArgs:
        """The input and the group."""
        check_divisible_sequence("AllGather", input_.shape, 1)
        return CollectiveArgs(input_, self._group.group)

    @classmethod
    def forward_compute(cls, args: CollectiveArgs, *, in_custom_op: bool = False) -> Any:
        """Gather."""
        return _fresh(all_gather(args.value, args.group), args.value), ((),), ()

    @classmethod
    def backward_compute(cls, args: CollectiveArgs, *, in_custom_op: bool = False) -> Any:
        """Sum and scatter."""
        return _fresh(reduce_scatter(args.value, args.group), args.value), ((),), ((),)


class ReduceScatter(_Collective):
    """`[T * M, ...] -> [M, ...]`, this rank's rows of the sum.

    Args:
        process_group: the ranks; None: this process alone.

    Raises:
        ValueError: the ranks don't divide the first axis.
    """

    fwd_args_type = CollectiveArgs
    bwd_args_type = CollectiveArgs

    def pack_forward_args(self, basic_op_ctxs: list[OperationContext], input_: Tensor, **_: Any) -> CollectiveArgs:
        """The input and the group."""
        check_divisible_sequence("ReduceScatter", input_.shape, group_size(self._group.group))
        return CollectiveArgs(input_, self._group.group)

    @classmethod
    def forward_compute(cls, args: CollectiveArgs, *, in_custom_op: bool = False) -> Any:
        """Sum and scatter."""
        return _fresh(reduce_scatter(args.value, args.group), args.value), ((),), ()

    @classmethod
    def backward_compute(cls, args: CollectiveArgs, *, in_custom_op: bool = False) -> Any:
        """Gather."""
        return _fresh(all_gather(args.value, args.group), args.value), ((),), ((),)


class AllReduce(_Collective):
    """`y = sum of x over the ranks`; the gradient passes through.

    Args:
        process_group: the ranks; None: this process alone.
    """

    fwd_args_type = CollectiveArgs
    bwd_args_type = CollectiveArgs
    grad_input_is_grad_output = True

    @classmethod
    def forward_compute(cls, args: CollectiveArgs, *, in_custom_op: bool = False) -> Any:
        """Sum."""
        return _fresh(all_reduce(args.value, args.group), args.value), ((),), ()

    @classmethod
    def backward_compute(cls, args: CollectiveArgs, *, in_custom_op: bool = False) -> Any:
        """Nothing: the gradient passes through."""
        return None, ((),), ((),)
