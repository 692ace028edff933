"""Local shapes of a linear layer under tensor parallelism.

T = ranks of the group; M = tokens, N = out features, K = in features of the whole layer; local shapes:

| mode              | input      | weight     | bias  | output     | reduced in fprop | reduced in dgrad |
|-------------------|------------|------------|-------|------------|------------------|------------------|
| None              | [M, K]     | [N, K]     | [N]   | [M, N]     |                  |                  |
| "column"          | [M, K]     | [N / T, K] | [N/T] | [M, N / T] |                  | all-reduce       |
| "column", SP      | [M / T, K] | [N / T, K] | [N/T] | [M, N / T] | (input gathered) | reduce-scatter   |
| "row"             | [M, K / T] | [N, K / T] | [N]   | [M, N]     | all-reduce       |                  |
| "row", SP         | [M, K / T] | [N, K / T] | [N]   | [M / T, N] | reduce-scatter   | (dy gathered)    |

SP = sequence parallelism: tokens are split along the input's first axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch.distributed import ProcessGroup

from lowp.distributed.collectives import group_size
from lowp.errors import fail

ParallelMode = Literal["column", "row"]
PARALLEL_MODES = (None, "column", "row")


class Parallel(NamedTuple):
    """How a linear layer is split.

    Attributes:
        mode: "column": the weight's rows (out features) are split; "row": its columns (in features); None: neither.
        sequence_parallel: tokens are split where the layer is not: the input under "column", the output under "row".
        group: the ranks.
    """

    mode: ParallelMode | None
    sequence_parallel: bool
    group: ProcessGroup | None

    def gathers(self, mode: ParallelMode) -> bool:
        """Whether an operand's tokens are gathered before its GEMM: the input's ("column"), the gradient's ("row")."""
        return self.sequence_parallel and self.mode == mode and group_size(self.group) > 1

    def output_leading(self, leading: tuple[int, ...]) -> tuple[int, ...]:
        """`sp_out_leading` of an input's leading axes."""
        return sp_out_leading(leading, self.mode, self.sequence_parallel, group_size(self.group))


@dataclass(frozen=True)
class Split:
    """How a linear layer is split over ranks.

    Attributes:
        mode: None, "column" or "row".
        group: the ranks; None: this process alone, or, where `size` says more, not known yet.
        size: number of ranks; None: the group's.
        sequence_parallel: tokens are split along the first axis where the layer is not.
        communicates: False: the operations around gather the input and reduce its gradient.
        parts: under "column", the out features are this many equal parts, each of which is split: a rank has its share
            of the first part, then of the second.
    """

    mode: ParallelMode | None = None
    group: ProcessGroup | None = None
    size: int | None = None
    sequence_parallel: bool = False
    communicates: bool = True
    parts: int = 1


def rank_count(op: str, group: ProcessGroup | None, size: int | None) -> int:
    """T, of a group or as a number alone.

    Raises:
        ValueError: the group has another number of ranks, or the number is not positive; names the operation.
    """
    if size is None:
        return group_size(group)
    if size < 1:
        fail(op, "the number of tensor-parallel ranks must be positive", got=size)
    if group is not None and group_size(group) != size:
        fail(op, f"the tensor-parallel group must have {size} ranks", got=group_size(group))
    return size


def local_size(op: str, name: str, size: int, ranks: int) -> int:
    """`size / T`.

    Raises:
        ValueError: T doesn't divide it; names operation and argument.
    """
    if size % ranks:
        fail(op, f"{name} must be divisible by the {ranks} ranks of the tensor-parallel group", got=size)
    return size // ranks


def sp_out_leading(
    leading: tuple[int, ...], mode: ParallelMode | None, sequence_parallel: bool, ranks: int
) -> tuple[int, ...]:
    """The output's leading axes for an input with these: gathered under "column", scattered under "row"."""
    if not sequence_parallel or mode is None:
        return tuple(leading)
    first = leading[0] * ranks if mode == "column" else leading[0] // ranks
    return (first, *leading[1:])


def sp_inp_leading(
    leading: tuple[int, ...], mode: ParallelMode | None, sequence_parallel: bool, ranks: int
) -> tuple[int, ...]:
    """The input's leading axes for an output with these: the inverse of `sp_out_leading`."""
    if not sequence_parallel or mode is None:
        return tuple(leading)
    first = leading[0] // ranks if mode == "column" else leading[0] * ranks
    return (first, *leading[1:])


def check_divisible_sequence(op: str, leading: tuple[int, ...], ranks: int) -> None:
    """Raise unless the first axis can be scattered over the ranks.

    Raises:
        ValueError: there is no axis to split, or T doesn't divide it; names the axis and its size.
    """
    if not leading:
        fail(op, "sequence parallelism splits the first axis", got="an input without one")
    if leading[0] % ranks:
        fail(
            op,
            f"sequence parallelism needs dim 0 to be divisible by the {ranks} ranks of the tensor-parallel group",
            got=leading[0],
            hint="Pad the sequence.",
        )
