"""The planner: which operations run, fused or not, in each direction.

Fusion rules are data under one matcher. A plan is a pure function of the operations, the dtypes, the recipe and whether
a graph is being traced; sizes play no part in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowp.ops.op import DIRECTIONS, Direction, FusibleOperation
from lowp.recipe import Recipe

if TYPE_CHECKING:
    from lowp.ops.basic_op import BasicOperation


class FusedOperation(FusibleOperation):
    """An operation that stands for consecutive basic ones and reads their parameters; it owns none.

    Class attributes:
        fuses: the types of the basic operations, in forward order, for a backward fusion too.
    """

    fuses: tuple[type[BasicOperation], ...] = ()

    def __init__(self, basic_ops: tuple[BasicOperation, ...]) -> None:
        super().__init__()
        self.basic_ops: tuple[Any, ...] = basic_ops

    @classmethod
    def basic_types(cls) -> tuple[type[FusibleOperation], ...]:
        """The pattern."""
        return cls.fuses


class Window(NamedTuple):
    """Where a rule might apply.

    Attributes:
        ops: the basic operations that match the pattern.
        dtype: of the first one's input.
        autocast_dtype: the dtype that torch.autocast asks for; None: it is off.
        recipe: the recipe in force; None: high precision.
        extra_dtypes: for each operation, the dtypes of its extra inputs.
    """

    ops: tuple[Any, ...]
    dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    recipe: Recipe | None
    extra_dtypes: tuple[tuple[torch.dtype, ...], ...]


def _always(_: Window) -> str | None:
    """Rules without a condition apply wherever their pattern occurs."""
    return None


@dataclass(frozen=True)
class FusionRule:
    """Run `fused` instead of the basic operations that it stands for.

    Attributes:
        direction: "forward" or "backward".
        fused: the fused operation; its `fuses` is the pattern.
        condition: `window -> reason`: why the rule doesn't apply here; None: it does.
    """

    direction: Direction
    fused: type[FusedOperation]
    condition: Callable[[Window], str | None] = _always


_RULES: list[FusionRule] = []


def register_fusion(rule: FusionRule) -> None:
    """Add a rule. Pipelines built from now on use it; of rules that fit, the longest wins, then the latest.

    Raises:
        ValueError: the direction is unknown or the pattern is shorter than two operations.
    """
    if rule.direction not in DIRECTIONS:
        raise ValueError(f"register_fusion: direction must be one of {DIRECTIONS}, got {rule.direction!r}.")
    if len(rule.fused.fuses) < 2:
        raise ValueError(f"register_fusion: {rule.fused.__name__}.fuses must name two operations or more.")
    _RULES.append(rule)


class Candidate(NamedTuple):
    """A rule whose pattern matches at `start`, with its fused operation built."""

    rule: FusionRule
    start: int
    op: FusedOperation


class Step(NamedTuple):
    """One operation of a plan and the basic operations `[start, stop)` that it stands for."""

    op: FusibleOperation
    start: int
    stop: int


class Plan(NamedTuple):
    """The steps of both directions, in the order in which they run, and the rules that didn't apply."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    declined: tuple[str, ...]


def candidates(basic_ops: tuple[BasicOperation, ...]) -> tuple[Candidate, ...]:
    """All rules whose patterns occur, the longest first."""
    found = [
        Candidate(rule, start, rule.fused(basic_ops[start : start + len(rule.fused.fuses)]))
        for rule in reversed(_RULES)
        for start in range(len(basic_ops) - len(rule.fused.fuses) + 1)
        if all(op.is_kind(kind) for op, kind in zip(basic_ops[start:], rule.fused.fuses, strict=False))
    ]
    return tuple(sorted(found, key=lambda candidate: -len(candidate.rule.fused.fuses)))


def make_plan(
    basic_ops: tuple[BasicOperation, ...],
    fusions: tuple[Candidate, ...],
    dtypes: tuple[torch.dtype, ...],
    extra_dtypes: tuple[tuple[torch.dtype, ...], ...],
    autocast_dtype: torch.dtype | None,
    recipe: Recipe | None,
    compiling: bool,
) -> Plan:
    """Choose the operations of both directions.

    Args:
        basic_ops: the pipeline.
        fusions: `candidates(basic_ops)`.
        dtypes: each basic operation's input dtype.
        extra_dtypes: those of its extra inputs.
        autocast_dtype: as in `Window`.
        recipe: as in `Window`.
        compiling: leave out fusions that can't be compiled.
    """
    declined: list[str] = []
    chosen: dict[Direction, list[Step]] = {"forward": [], "backward": []}
    for direction in DIRECTIONS:
        steps = chosen[direction]
        start = 0
        while start < len(basic_ops):
            if basic_ops[start].bypassed(recipe):
                start += 1
                continue
            step = Step(basic_ops[start], start, start + 1)
            for fusion in fusions:
                if fusion.rule.direction != direction or fusion.start != start:
                    continue
                stop = start + len(fusion.op.basic_ops)
                window = Window(fusion.op.basic_ops, dtypes[start], autocast_dtype, recipe, extra_dtypes[start:stop])
                reason = fusion.rule.condition(window)
                if reason is None and compiling:
                    reason = fusion.op.compile_unsupported_reason(direction)
                if reason is None:
                    step = Step(fusion.op, start, stop)
                    break
                declined.append(f"{direction:9}without {type(fusion.op).__name__}[{start}]: {reason}")
            steps.append(step)
            start = step.stop
    return Plan(tuple(chosen["forward"]), tuple(chosen["backward"][::-1]), tuple(declined))
