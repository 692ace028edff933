"""Simple values that cross into registered operators as one string, the value bundle.

A frozen dataclass that derives from `Value` works its string out once, when it is built, so that traced code only
reads and joins strings: a new value recompiles, an old one returns to its graph, and no private API is needed.

    encode(value) -> str        traced; JSON, with one-key objects for what JSON lacks
    decode(text) -> value       in the real kernel, through a cache
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import sys
from typing import Any

import torch

from lowp.torch_compat import constant

_SIMPLE = "None, bool, int, float, str, torch.dtype, enum, lowp Value, and tuples or Dict[str, simple] of them"
_DTYPE_NAMES = {d: str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}
_NUMBERS: dict[Any, type] = {float: float, "float": float, bool: bool, "bool": bool}
"""Annotations whose values are brought to one type, so that 0, False and 0.0 have one string where they are equal."""
_JSON_FLOATS = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
_CLASSES: dict[str, type] = {}


def _class_key(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class Value:
    """Base of frozen dataclasses made of simple values only.

    Raises:
        TypeError: a field holds something that can't cross into a registered operator; names class and field.
    """

    bundle: str
    """The value as a string: equal values have equal strings."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _CLASSES[_class_key(cls)] = cls

    def __post_init__(self) -> None:
        cls = type(self)
        entries = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            kind = _NUMBERS.get(field.type)
            if kind is not None and isinstance(value, (int, kind)):
                value = kind(value)
                object.__setattr__(self, field.name, value)
            if field.init:
                entries.append(f'"{field.name}":{encode(value, cls, field.name)}')
        body = ",".join(entries)
        object.__setattr__(self, "bundle", f'{{"{_class_key(cls)}":{{{body}}}}}')


def encode(value: Any, owner: type | None = None, name: str = "") -> str:
    """Write one simple value as a string. Runs in traced code.

    Args:
        value: the simple value.
        owner: the class that declares the field, for the error.
        name: the field's name, for the error.

    Returns:
        JSON; `decode` is its inverse (lists come back as tuples).

    Raises:
        TypeError: the value is not simple; names class and field.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):  # where it is symbolic, the graph is then of this truth
        return "true" if value else "false"
    if isinstance(value, torch.dtype):
        return '{"dtype":"' + _DTYPE_NAMES[value] + '"}'
    if isinstance(value, enum.Enum):
        cls = type(value)
        if "<locals>" in cls.__qualname__:
            raise TypeError(
                f"{_where(owner, name)}: an enum must be importable to cross into a registered operator, got {cls}."
            )
        return f'{{"enum":["{cls.__module__}","{cls.__qualname__}","{value.name}"]}}'
    if isinstance(value, int):
        return repr(constant(value))
    if isinstance(value, float):
        text = repr(constant(value))
        return _JSON_FLOATS.get(text, text)
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Value):
        return value.bundle
    if isinstance(value, (tuple, list)):
        return "[" + ",".join([encode(v, owner, name) for v in value]) + "]"
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return '{"dict":{' + ",".join([encode(k) + ":" + encode(value[k], owner, name) for k in sorted(value)]) + "}}"
    raise TypeError(
        f"{_where(owner, name)}: a value that crosses into a registered operator must be {_SIMPLE}, got {type(value)}."
    )


def _where(owner: type | None, name: str) -> str:
    return "encode" if owner is None else f"{owner.__name__}.{name}"


@functools.lru_cache(maxsize=4096)
def decode(text: str) -> Any:
    """Read a value bundle back; the inverse of `encode`."""
    return _revive(json.loads(text, strict=False))  # strings hold control characters as they are


def _revive(node: Any) -> Any:
    if isinstance(node, list):
        return tuple([_revive(item) for item in node])
    if not isinstance(node, dict):
        return node
    ((key, body),) = node.items()
    if key == "dtype":
        return getattr(torch, body)
    if key == "enum":
        module, qualname, member = body
        cls: Any = functools.reduce(getattr, qualname.split("."), sys.modules[module])
        return cls[member]
    fields = {name: _revive(item) for name, item in body.items()}
    return fields if key == "dict" else _CLASSES[key](**fields)
