"""Replays passes that have run before on tensors of the same layouts: a pipeline's in eager mode, an operator's else.

The first run of a pass on some layouts is an ordinary one, the second is recorded, later ones replay what was recorded
(see `lowp.tape`): they launch the same kernels on the same arguments, without the host work that led to them.
Only operations whose class says `replays = True` are replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowp.tape import Program, Tape
from lowp.torch_compat import current_cuda_device, dispatch_is_interposed

_PLAIN = {Tensor, nn.Parameter}


class Replays:
    """What is known of one pass: by the layouts of its tensors, a program and whatever else the pass gave."""

    def __init__(self, most: int = 64) -> None:
        """Remember `most` layouts at most: where sizes keep changing, recording would never pay."""
        self._most = most
        self._known: dict[Any, tuple[Program | None, Any] | None] = {}

    def run(self, function: Callable[[], tuple[Any, Any]], tensors: list[Any], key: Any) -> tuple[Any, Any]:
        """The results of `function()`.

        Args:
            function: the pass; gives nested tuples of tensors, and the operations' contexts.
            tensors: all that it reads; a replay empties the list.
            key: all that results depend on besides the tensors' values: `layouts(tensors)`, for backward those of the
                forward pass too; None: the pass isn't replayed.
        """
        if key is None:
            return function()
        known = self._known.get(key, _NEW)
        if known is _NEW:
            if len(self._known) < self._most:
                self._known[key] = None
            return function()
        if known is None:
            return self._record(key, function, tensors)
        program, rest = known
        return function() if program is None else (program(tensors), rest)

    def _record(self, key: Any, function: Callable[[], tuple[Any, Any]], tensors: Sequence[Tensor | None]) -> Any:
        if not _can_be_named(tensors):
            return function()
        tape = Tape(tensors)
        with tape:
            results, rest = function()
        program = None if _holds_tensors(rest) else tape.program(results)
        self._known[key] = program, None if program is None else rest
        return results, rest


_NEW: Any = object()


def layouts(tensors: Sequence[Tensor | None]) -> Any:
    """All of these tensors that a program depends on; None: on these it can't be replayed."""
    if dispatch_is_interposed():
        return None
    first = tensors[0]
    if first is None:
        first = next(tensor for tensor in tensors if tensor is not None)
    device = first.device
    if device.type == "cuda" and device.index != current_cuda_device():
        return None
    facts = [None if t is None else (type(t), t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for t in tensors]
    return device, *facts


def _can_be_named(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a program can tell these tensors apart, and they are no subclasses with operators of their own."""
    present = [tensor for tensor in tensors if tensor is not None]
    return {*map(type, present)} <= _PLAIN and len({*map(id, present)}) == len(present)


def _holds_tensors(rest: Any) -> bool:
    """Whether contexts hold tensors, which a program would not replace."""
    return any(isinstance(leaf, Tensor) for ctx in rest for leaf in torch.utils._pytree.tree_leaves(vars(ctx)))
