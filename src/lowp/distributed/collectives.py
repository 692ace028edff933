"""Collectives along the first axis, by group, eager and compiled alike.

    all_gather      [M, ...] on each of T ranks -> [T * M, ...] on all
    reduce_scatter  [T * M, ...] -> [M, ...], the sum's part of this rank
    all_reduce      [...] -> [...], the sum or the maximum

Each starts at once and returns a `Pending`; `wait()` gives the result, and independent work goes in between. A group of
one rank, or None, costs nothing. Shape legend: T = ranks of the group, M = rows of one rank.
Source: torch.distributed functional collectives, by their operators: the Python names differ between torch versions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lowp.formats import FP8


class Pending:
    """The result of a collective that was started."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype | None = None, *, started: bool = True) -> None:
        self._tensor = tensor
        self._dtype = dtype
        self._started = started

    def wait(self) -> Tensor:
        """The result, once it is there (on the current stream)."""
        if not self._started:
            return self._tensor
        result = torch.ops._c10d_functional.wait_tensor.default(self._tensor)
        return result if self._dtype is None else result.view(self._dtype)


def group_size(group: ProcessGroup | None) -> int:
    """T; 1 without a group."""
    return 1 if group is None else group.size()


def all_gather(x: Tensor, group: ProcessGroup | None) -> Pending:
    """Rows of all ranks, in rank order.

    Args:
        x: `[M, ...]`, any dtype; fp8 travels as bytes.
        group: the ranks.

    Returns:
        `[T * M, ...]`.
    """
    size = group_size(group)
    if size == 1 or group is None:
        return Pending(x, started=False)
    dtype = x.dtype if x.dtype in FP8 else None
    sent = x.contiguous() if dtype is None else x.contiguous().view(torch.uint8)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor.default(sent, size, group.group_name)
    return Pending(gathered, dtype)


def reduce_scatter(x: Tensor, group: ProcessGroup | None) -> Pending:
    """This rank's rows of the sum.

    Args:
        x: `[T * M, ...]`.
        group: the ranks.

    Returns:
        `[M, ...]`.
    """
    size = group_size(group)
    if size == 1 or group is None:
        return Pending(x, started=False)
    reduced = torch.ops._c10d_functional.reduce_scatter_tensor.default(x.contiguous(), "sum", size, group.group_name)
    return Pending(reduced)


def all_reduce(x: Tensor, group: ProcessGroup | None, reduction: Literal["sum", "max"] = "sum") -> Pending:
    """The sum or the maximum over all ranks; `x` itself where there is one."""
    if group_size(group) == 1 or group is None:
        return Pending(x, started=False)
    return Pending(torch.ops._c10d_functional.all_reduce.default(x.contiguous(), reduction, group.group_name))
