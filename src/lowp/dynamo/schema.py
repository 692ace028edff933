"""Argument dataclasses as operator schemas.

A field's annotation decides how it crosses into a registered operator:

    Tensor                      one slot                        Tensor x
    Tensor | None               one slot                        Tensor? x
    Mutable                     one slot, changed in place      Tensor(a!)? x
    Quantized, Quantized | None four slots                      Tensor? x_row_data, ...
    Tensor | Quantized          five slots, likewise with None  Tensor? x, Tensor? x_row_data, ...
    Sizes, Sizes | None         one slot                        SymInt[] x
    ProcessGroup, or None       one slot, its name              str? x
    anything simple             a place in the value bundle     str bundle
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lowp.quantization import Quantized
from lowp.torch_compat import process_group
from lowp.values import Value, decode, encode

_MUTABLE = "mutable"
Mutable = Annotated[Tensor | None, _MUTABLE]
"""A tensor, or None, that the operator changes in place."""

Sizes = tuple[int, ...]
"""Sizes that may be symbolic: they are never part of a constant."""

_SIMPLE_TYPES = (type(None), bool, int, float, str, torch.dtype)
_COMPONENTS = Quantized._fields
_TENSOR_KINDS = ("tensor", "quantized", "tensor_or_quantized")
_FLATTENED = {
    "tensor": "{0}",
    "quantized": "*flatten_value({0}, 'quantized')",
    "tensor_or_quantized": "*flatten_value({0}, 'tensor_or_quantized')",
    "sizes": "None if {0} is None else [*{0}]",
    "group": "None if {0} is None else {0}.group_name",
}
"""A field as arguments of the operator, by its kind."""


class Field(NamedTuple):
    """One field of an argument dataclass.

    Attributes:
        name: the field's name.
        kind: "tensor", "quantized", "tensor_or_quantized", "sizes", "group" or "simple".
        optional: None is a value of it.
        mutable: the operator changes it in place.
    """

    name: str
    kind: str
    optional: bool
    mutable: bool


class ArgumentSchema:
    """How instances of one argument dataclass cross into a registered operator."""

    def __init__(self, args_type: type, optional_fields: tuple[str, ...] = ()) -> None:
        """Read the annotations of `args_type`.

        Args:
            args_type: the dataclass.
            optional_fields: fields that may be None whatever their annotation says.

        Raises:
            TypeError: not a dataclass, or a field's type can't cross; names class and field.
        """
        if not dataclasses.is_dataclass(args_type):
            raise TypeError(f"{args_type.__name__}: the arguments of a registered operation must be a dataclass.")
        self.args_type = args_type
        hints = typing.get_type_hints(args_type, include_extras=True)
        fields = [_classify(args_type, f.name, hints[f.name]) for f in dataclasses.fields(args_type) if f.init]
        wrong = set(optional_fields) - {f.name for f in fields if f.kind in _TENSOR_KINDS}
        if wrong:
            raise TypeError(f"{args_type.__name__}: GRAD_OUTPUT_FIELDS names {sorted(wrong)}, not tensor fields of it.")
        fields = [f._replace(optional=f.optional or f.name in optional_fields) for f in fields]
        self.slots = tuple(f for f in fields if f.kind != "simple")
        self.simple = tuple(f for f in fields if f.kind == "simple")
        self.mutable = tuple(f.name for f in fields if f.mutable)
        self.groups = tuple(f.name for f in fields if f.kind == "group")
        names = [name for f in self.slots for name in _slot_names(f)] + ["bundle"]
        for field in self.slots:
            if any(names.count(name) > 1 for name in _slot_names(field)):
                raise TypeError(f"{args_type.__name__}.{field.name}: another argument of the operator has this name.")
        self.flatten = self._make_flatten()

    def declare(self, *, mutating: bool) -> str:
        """The operator's parameters, in schema language."""
        declared: list[str] = []
        aliases = iter("abcdefghijklmnopqrstuvwxyz")
        for field in self.slots:
            if field.kind == "sizes":
                declared.append(f"SymInt[]{'?' if field.optional else ''} {field.name}")
            elif field.kind == "group":
                declared.append(f"str? {field.name}")
            elif field.kind == "tensor":
                alias = f"({next(aliases)}!)" if field.mutable and mutating else ""
                declared.append(f"Tensor{alias}{'?' if field.optional else ''} {field.name}")
            else:
                declared.extend(f"Tensor? {name}" for name in _slot_names(field))
        return ", ".join([*declared, "str bundle"])

    def _make_flatten(self) -> Callable[[Any], list[Any]]:
        """The function `flatten(args)`: an instance as the operator's arguments. It runs in traced code.

        It is written out, without loops and branches: torch.compile traces it once for each call of an operator.
        """
        slots = [_FLATTENED[field.kind].format(f"args.{field.name}") for field in self.slots]
        entries = [f"'\"{f.name}\":' + encode(args.{f.name}, owner, '{f.name}')" for f in self.simple]
        bundle = "'{\"dict\":{' + " + (" + ',' + ".join(entries) or "''") + " + '}}'"
        scope: dict[str, Any] = {"encode": encode, "flatten_value": flatten_value, "owner": self.args_type}
        source = f"def flatten(args):\n    return [{', '.join([*slots, bundle])}]\n"
        exec(compile(source, f"<lowp {self.args_type.__name__}>", "exec"), scope)  # built of names only
        flatten: Callable[[Any], list[Any]] = scope["flatten"]
        return flatten

    def unflatten(self, flat: tuple[Any, ...]) -> Any:
        """The operator's arguments as an instance."""
        values = dict(decode(flat[-1]))
        at = 0
        for field in self.slots:
            if field.kind in ("quantized", "tensor_or_quantized"):
                count = slot_count(field.kind)
                values[field.name] = unflatten_value(flat[at : at + count], field.kind)
                at += count
                continue
            value = flat[at]
            at += 1
            if field.kind == "sizes":
                value = None if value is None else tuple(value)
            elif field.kind == "group":
                value = None if value is None else process_group(value)
            values[field.name] = value
        return self.args_type(**values)


def _slot_names(field: Field) -> list[str]:
    """The operator's parameters that a field takes."""
    components = [f"{field.name}_{component}" for component in _COMPONENTS]
    return {"quantized": components, "tensor_or_quantized": [field.name, *components]}.get(field.kind, [field.name])


def slot_count(kind: str) -> int:
    """How many tensors a value of this kind has."""
    return {"tensor": 1, "quantized": len(_COMPONENTS), "tensor_or_quantized": 1 + len(_COMPONENTS)}[kind]


def flatten_value(value: Tensor | Quantized | None, kind: str) -> list[Tensor | None]:
    """A tensor or quantized matrix as its slots. Runs in traced code."""
    plain: list[Tensor | None] = [None]
    components: list[Tensor | None] = [None] * len(_COMPONENTS)
    if isinstance(value, Quantized):
        components = [*value]
    else:
        plain = [value]
    return plain if kind == "tensor" else components if kind == "quantized" else plain + components


def unflatten_value(slots: typing.Sequence[Tensor | None], kind: str) -> Tensor | Quantized | None:
    """The inverse of `flatten_value`. Runs in traced code."""
    if kind == "tensor":
        return slots[0]
    if kind == "tensor_or_quantized":
        if slots[0] is not None:
            return slots[0]
        slots = slots[1:]
    absent = [component is None for component in slots]
    return None if all(absent) else Quantized(*slots)


def _classify(owner: type, name: str, hint: Any) -> Field:
    mutable = False
    if typing.get_origin(hint) is Annotated:
        hint, *notes = typing.get_args(hint)
        mutable = _MUTABLE in notes
    members = set(typing.get_args(hint)) if _is_union(hint) else {hint}
    members = {Sizes if typing.get_args(member) == (int, ...) else member for member in members}
    optional = type(None) in members
    members -= {type(None)}
    kinds = {frozenset({Tensor}): "tensor", frozenset({Quantized}): "quantized", frozenset({ProcessGroup}): "group"}
    kinds |= {frozenset({Tensor, Quantized}): "tensor_or_quantized", frozenset({Sizes}): "sizes"}
    kind = kinds.get(frozenset(members))
    if kind is not None:
        return Field(name, kind, optional, mutable)
    if all(_is_simple(member) for member in members):
        return Field(name, "simple", optional, False)
    raise TypeError(
        f"{owner.__name__}.{name}: {hint} can't cross into a registered operator. Use Tensor, Quantized, Mutable,"
        " Sizes, ProcessGroup, None, bool, int, float, str, torch.dtype, an enum, a frozen lowp Value, or tuples or"
        " Dict[str, ...] of these."
    )


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _is_simple(hint: Any) -> bool:
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if _is_union(hint):
        return all(_is_simple(member) for member in members)
    if origin is typing.Literal:
        return all(isinstance(member, _SIMPLE_TYPES) for member in members)
    if origin is dict:
        return members[0] is str and _is_simple(members[1])
    if origin is tuple:
        return all(member is Ellipsis or _is_simple(member) for member in members)
    return hint in _SIMPLE_TYPES or (isinstance(hint, type) and issubclass(hint, (enum.Enum, Value)))
