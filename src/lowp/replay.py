"""Replays what ran before on tensors of the same layouts: a pass of a pipeline, or an operator in compiled code.

The first run on some layouts is an ordinary one, the second is recorded, later ones replay what was recorded (see
`lowp.tape`): they launch the same kernels on the same arguments, without the host work that led to them.
Only operations whose class says `replays = True` are replayed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowp.tape import Program, Tape
from lowp.torch_compat import current_cuda_device, dispatch_is_interposed
from lowp.triton_compat import launches_are_hooked

_PLAIN = (Tensor, nn.Parameter)


class Replays:
    """What is known of one function: by the layouts of its tensors, a program and whatever else the function gave."""

    def __init__(self, most: int = 64) -> None:
        """Start empty.

        Args:
            most: layouts that are remembered; the one that was seen first makes room for another.
        """
        self._most = most
        self._known: dict[Any, tuple[Program | None, Any] | None] = {}
        _ALL.add(self)

    def run(self, function: Callable[[], tuple[Any, Any]], tensors: list[Any], key: Any) -> tuple[Any, Any]:
        """The results of `function()`.

        Args:
            function: gives nested tuples of tensors; and the operations' contexts, without tensors.
            tensors: all that it reads; a replay empties the list.
            key: all that results depend on besides the tensors' values and what all calls have in common: mostly
                `layouts(tensors)`, and what other arguments there are; None: this call isn't replayed.
        """
        if key is None:
            return function()
        known = self._known.get(key, _NEW)
        if known is _NEW:
            make_room(self._known, self._most)
            self._known[key] = None
            return function()
        if known is None:
            return self._record(key, function, tensors)
        program, rest = known
        return function() if program is None else (program(tensors), rest)

    def _record(self, key: Any, function: Callable[[], tuple[Any, Any]], tensors: Sequence[Tensor | None]) -> Any:
        present = [tensor for tensor in tensors if tensor is not None]
        if len({*map(id, present)}) < len(present) or _is_capturing(present):
            return function()  # another call may be recorded
        tape = Tape(tensors)
        del present
        with tape:
            results, rest = function()
        program = None if _holds_tensors(rest) else tape.program(results)
        self._known[key] = program, None if program is None else rest
        return results, rest

    def forget(self) -> None:
        """Start anew."""
        self._known.clear()


def make_room(known: dict[Any, Any], most: int) -> None:
    """Drop the entry that was made first, if there are so many; other threads may be at it too."""
    for oldest in list(known)[:1] if len(known) >= most else ():
        known.pop(oldest, None)


_NEW: Any = object()
_ALL: weakref.WeakSet[Replays] = weakref.WeakSet()


def forget_all() -> None:
    """Forget all programs: something has changed that is part of no key, a table that operations look things up in."""
    for replays in list(_ALL):
        replays.forget()


def layouts(tensors: Sequence[Tensor | None]) -> Any:
    """What a program depends on of the tensors that it is given.

    Not whether one of them is given twice: a program does in order what the function did, on whatever it is given.

    Args:
        tensors: all of them, None where one is missing.

    Returns:
        For each, device, shape, strides, dtype and alignment, to be compared; or None: on these nothing is replayed,
        since there are none, or subclasses, or some without storage, or the first isn't on the current device, or
        modes or hooks want to see all.
    """
    if dispatch_is_interposed() or launches_are_hooked():
        return None
    device = None
    facts: list[Any] = []
    try:
        for tensor in tensors:
            if tensor is None:
                facts.append(None)
            elif type(tensor) in _PLAIN:
                device = device or tensor.device
                facts.append((tensor.device, tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16))
            else:
                return None
    except RuntimeError:  # without strides, or without storage
        return None
    if device is None or (device.type == "cuda" and device.index != current_cuda_device()):
        return None
    return tuple(facts)


def _is_capturing(tensors: list[Tensor]) -> bool:
    """Whether a CUDA graph is being captured, whose memory a recording would add to for good."""
    return any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing()


def _holds_tensors(rest: Any) -> bool:
    """Whether contexts hold tensors, which a program would not replace."""
    return any(isinstance(leaf, Tensor) for ctx in rest for leaf in torch.utils._pytree.tree_leaves(vars(ctx)))
