"""Records the operators and kernel launches of a function as a straight-line program, to run it again for less.

Planning, packing and checking cost the host more than launching: run again on tensors of the same layout, they would
come to the same decisions. A tape notes what was launched with which arguments; its program does that and nothing else.

    tape = Tape(tensors)
    with tape:
        results = function()
    program = tape.program(results)      None: the function can't be replayed
    program(tensors)                     launches the same, on a list of other tensors of the same layouts, which
                                         it empties, to let go of each once it is read

A function can be replayed if it depends on nothing but its tensors' layouts (and not on their values), reads no tensor
but these and what it makes of them, and communicates with nobody. Who calls it says that it changes nothing else.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from lowp.registration import REGISTRY, unpacked
from lowp.torch_compat import current_cuda_stream, fast_empty_strided

Program = Callable[[list[Any]], Any]

_ACTIVE = threading.local()


def active_tape() -> Tape | None:
    """The tape that records this thread's launches."""
    return getattr(_ACTIVE, "tape", None)


class Tape(TorchDispatchMode):
    """Records what runs inside; see the module."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        """Start with the function's arguments, all of them different tensors while it is recorded."""
        super().__init__()
        self._names = WeakTensorKeyDictionary()  # recording keeps nothing alive
        for index, tensor in enumerate(tensors):
            if tensor is not None:
                self._names[tensor] = f"v{index}"
        self._inputs = len(tensors)
        self._lines: list[tuple[str, set[str]]] = []  # with the names that a line reads or makes
        self._globals: dict[str, Any] = {}
        self._home = next((tensor.device for tensor in tensors if tensor is not None), None)
        self._reads: Counter[str] = Counter()  # of a name as a tensor: kernels take addresses
        self._allocated: dict[str, int] = {}  # where a name was made as an allocation
        self._transposed: dict[str, tuple[str, int, str]] = {}  # name of a transpose -> of what, where, made directly
        self._count = self._inputs
        self._device: int | None = None
        self._refused = False
        self._depth = 0

    def __enter__(self) -> Any:
        self._depth += 1
        _ACTIVE.tape = self
        return super().__enter__()

    def __exit__(self, *exc: Any) -> Any:
        self._depth -= 1
        if not self._depth:
            _ACTIVE.tape = None
        return super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note one operator; of lowp's own, what their kernels run."""
        kwargs = kwargs or {}
        if func.namespace == "lowp":
            entry = REGISTRY[func._opname]
            device = next(arg.device for arg in unpacked(args) if isinstance(arg, Tensor))
            kernel = entry.launch if device.type == "cuda" else entry.ref
            with self:
                return kernel(*args, **kwargs)
        result = func(*args, **kwargs)
        if func is _ATEN.detach.default and self._is_made(args[0]):  # factories return what they make through it
            self._names[result] = self._names[args[0]]
            return result
        if func.namespace != "aten" or _DATA_DEPENDENT & set(func.tags):
            self._refused = True
        else:
            self._call(func, args, kwargs, result)
        return result

    def _is_made(self, tensor: Tensor) -> bool:
        name = self._names.get(tensor)
        return name is not None and int(name[1:]) >= self._inputs

    def _call(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func in _ALLOCATIONS and not kwargs.get("pin_memory"):
            made: set[str] = set()
            name = self._name(result, made)
            self._allocated[name] = len(self._lines)
            self._lines.append((f"{name} = {self._allocation(result)}", made))
            return
        used: set[str] = set()
        given = [self._text(arg, used) for arg in args]
        given += [f"{name}={self._text(arg, used)}" for name, arg in kwargs.items()]
        text = f"{self._constant(_FAST.get(func, func))}({', '.join(given)})"
        if isinstance(result, Tensor):
            if result not in self._names:
                name = self._name(result, used)
                source = self._names.get(args[0]) if func is _ATEN.t.default else None
                if source in self._allocated:
                    self._transposed[name] = source, len(self._lines), self._allocation(result)
                text = f"{name} = {text}"
            elif not func._schema.is_mutable:  # it gave its argument back: nothing was done
                return
        elif isinstance(result, (tuple, list)) and all(isinstance(item, Tensor) for item in result):
            text = f"{', '.join(self._name(item, used) for item in result)}, = {text}"
        elif result is not None:
            self._refused = self._refused or bool(used)
            return  # a fact of no tensor's value, such as what dtypes are promoted to
        self._lines.append((text, used))

    def _allocation(self, like: Tensor) -> str:
        """An allocation by shape and strides, with the function that costs the host the least."""
        at_home = like.device.type == "cpu" or like.device == self._home  # which is current when a program runs
        function = fast_empty_strided(like.device) if at_home else None
        options = [like.dtype] if function else [like.dtype, like.device]
        given = [repr(tuple(like.shape)), repr(like.stride()), *map(self._constant, options)]
        return f"{self._constant(function or _empty_strided)}({', '.join(given)})"

    def _allocate_transposed(self) -> None:
        """Where kernels alone use a matrix that was allocated, and its transpose is read, allocate that instead."""
        for turned, (straight, at, allocation) in self._transposed.items():
            if self._reads[straight] > 1:
                continue
            self._lines[self._allocated[straight]] = f"{turned} = {allocation}", {turned}
            self._lines[at] = "pass", {turned}
            address, turned_address = f"{straight}.data_ptr()", f"{turned}.data_ptr()"
            for index, (line, used) in enumerate(self._lines):
                if straight in used:
                    self._lines[index] = line.replace(address, turned_address), used - {straight} | {turned}

    def launched(
        self, function: Any, before: Sequence[Any], after: Sequence[Any], device: int, args: Sequence[Any]
    ) -> None:
        """Note a kernel launch: `function(*before, stream, *after, *args)`, with addresses in the place of tensors.

        Args:
            function: launches; it may leave out what watches launches, which is asked before a program runs.
            before: arguments before the device's current stream.
            after: arguments between the stream and the kernel's own.
            device: the current one.
            args: all of the kernel's.
        """
        used: set[str] = set()
        self._device = device
        given = [self._text(arg, used, address=True) for arg in (*before, *after, *args)]
        given.insert(len(before), "stream")
        self._lines.append((f"{self._constant(function)}({', '.join(given)})", used))

    def _name(self, tensor: Tensor, made: set[str]) -> str:
        name = self._names[tensor] = f"v{self._count}"
        made.add(name)
        self._count += 1
        return name

    def _constant(self, value: Any) -> str:
        name = f"k{len(self._globals)}"
        self._globals[name] = value
        return name

    def _text(self, value: Any, used: set[str], *, address: bool = False) -> str:
        """An argument or result as an expression; names that are used or read are noted."""
        if isinstance(value, Tensor):
            name = self._names.get(value)
            if name is None:
                self._refused = True
                return "None"
            used.add(name)
            self._reads[name] += not address
            return f"{name}.data_ptr()" if address else name
        if type(value) in (tuple, list):
            items = "".join(self._text(item, used, address=address) + ", " for item in value)
            return f"({items})" if type(value) is tuple else f"[{items}]"
        if value is None or type(value) in (bool, int):
            return repr(value)
        if isinstance(value, (tuple, list, dict)):  # might hold tensors
            self._refused = True
        return self._constant(value)

    def program(self, results: Any) -> Program | None:
        """The program that gives `results`, nested tuples and lists of tensors and None; None: it can't be replayed."""
        used: set[str] = set()
        text = self._text(results, used)
        if self._refused:
            return None
        self._allocate_transposed()
        body = [f"{', '.join(f'v{index}' for index in range(self._inputs))}, = tensors", "tensors.clear()"]
        if self._device is not None:
            body.append(f"stream = current_stream({self._device})")
        for (line, _), dying in zip(self._lines, _last_uses([names for _, names in self._lines], used), strict=True):
            body.append(line)
            if dying:
                body.append(f"del {', '.join(sorted(dying))}")
        source = "def program(tensors):\n" + "".join(f"    {line}\n" for line in [*body, f"return {text}"])
        scope = {**self._globals, "current_stream": current_cuda_stream}
        exec(compile(source, "<lowp program>", "exec"), scope)  # built of names and numbers only
        return scope["program"]


def _last_uses(used: list[set[str]], results: set[str]) -> list[set[str]]:
    """For each line, the names that nothing reads after it: their memory is free from there on."""
    later = set(results)
    dying = []
    for names in reversed(used):
        dying.append(names - later)
        later |= names
    return dying[::-1]


_DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

_ATEN = torch.ops.aten
_FAST: dict[Any, Any] = {
    _ATEN.t.default: Tensor.t,
    _ATEN.view.default: Tensor.view,
    _ATEN._scaled_mm.default: torch._scaled_mm,
}
"""Functions of torch that do what an operator does with less host work."""
_ALLOCATIONS = (_ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.new_empty.default)


def _empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
