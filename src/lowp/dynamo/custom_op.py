"""Registered operators made of an argument dataclass, a real compute function and a fake one.

    call = register_custom_op(name, args_type, compute, fake, results)
    call(args) -> results       one node of a compiled graph

`compute` and `fake` take the dataclass and return a flat tuple laid out as `results` says. Where a field is `Mutable`,
two operators are registered: `name`, which changes nothing and is called when all mutable fields are None, and
`name_inplace`. The second may return only plain tensors (functionalization refuses optional ones): there, an empty
bool tensor stands for None.

Where a field is a process group, a call with a group of more than one rank goes to a third operator,
`name_collective`, which compilers keep even if nobody reads its results: other ranks wait for it.

With `replays=True` an operator replays what it launched for arguments that differ in values only (see `lowp.replay`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowp.dynamo.schema import ArgumentSchema, flatten_value, slot_count, unflatten_value
from lowp.registration import REGISTRY, register
from lowp.replay import Replays, layouts

Results = tuple[str, ...]
"""The layout of an operator's results: "tensor" and "tensor_or_quantized", each of which may be None; last, "list",
any number of tensors."""

_RESULT_KINDS = ("tensor", "tensor_or_quantized")
_MOST_LAYOUTS = 1024
"""Layouts of one operator's arguments that are replayed: those of all modules of a model, and of some batch sizes."""


def register_custom_op(
    name: str,
    args_type: type,
    compute: Callable[[Any], tuple[Any, ...]],
    fake: Callable[[Any], tuple[Any, ...]],
    results: Results,
    optional_fields: tuple[str, ...] = (),
    *,
    replays: bool = False,
) -> Callable[[Any], tuple[Any, ...]]:
    """Register `compute` as an operator of `lowp::` and return the function that calls it.

    Args:
        name: the operator's name.
        args_type: dataclass of its arguments; see `lowp.dynamo.schema`.
        compute: the real kernel, on every device.
        fake: gives results of the right shape, dtype, strides and device.
        results: layout of what both return.
        optional_fields: tensor fields that may be None whatever their annotation says.
        replays: `compute` depends on its tensors' layouts and on its other arguments only, and changes nothing but
            what it is given: what it launched before may be launched again (see `lowp.replay`).

    Raises:
        TypeError: a field or the layout can't cross; names class and field.
    """
    schema = ArgumentSchema(args_type, optional_fields)
    _check_results(name, results, mutable=bool(schema.mutable))
    variant = functools.partial(_register_variant, schema=schema, compute=compute, fake=fake, results=results)
    plain = variant(name, replays=replays)
    inplace = plain
    if schema.mutable:
        inplace = variant(f"{name}_inplace", replays=replays, mutating=True)
    collective = plain
    if schema.groups:
        collective = variant(f"{name}_collective")
        torch.fx.node.has_side_effect(REGISTRY[f"{name}_collective"].overload)
    mutable, groups = schema.mutable, schema.groups
    count = _result_slots(results)

    def call(args: Any) -> tuple[Any, ...]:
        flat = schema.flatten(args)
        for field in mutable:
            if getattr(args, field) is not None:
                slots = [_absent_if_marker(slot) for slot in _as_slots(inplace(*flat), count)]
                return _unflatten_results(slots, results)
        for field in groups:
            group = getattr(args, field)
            if group is not None and group.size() > 1:
                return _unflatten_results(_as_slots(collective(*flat), count), results)
        return _unflatten_results(_as_slots(plain(*flat), count), results)

    return call


def _result_slots(results: Results) -> int:
    return sum(1 if kind == "list" else slot_count(kind) for kind in results)


def _as_slots(returned: Any, count: int) -> list[Any]:
    """What an operator returned as a list: torch returns a single result bare, and no result as None."""
    return list(returned) if count > 1 else [returned][:count]


def _check_results(name: str, results: Results, *, mutable: bool) -> None:
    for position, kind in enumerate(results):
        last = position == len(results) - 1
        if kind in _RESULT_KINDS or (kind == "list" and last and not mutable):
            continue
        raise TypeError(
            f"{name}: result {position} can't be {kind!r}. Results are {_RESULT_KINDS}, and 'list' as the last one"
            " where no field is Mutable."
        )


def _register_variant(
    name: str,
    schema: ArgumentSchema,
    compute: Any,
    fake: Any,
    results: Results,
    *,
    mutating: bool = False,
    replays: bool = False,
) -> Callable[..., Any]:
    def kernel_of(function: Callable[[Any], tuple[Any, ...]], known: Replays | None = None) -> Callable[..., Any]:
        def run(flat: tuple[Any, ...]) -> tuple[Any, ...]:
            values = _fresh(name, _flatten_results(name, function(schema.unflatten(flat)), results), flat)
            if mutating:
                values = _with_markers(name, values, next(arg.device for arg in flat if isinstance(arg, Tensor)))
            return tuple(values)

        def kernel(*flat: Any) -> Any:
            values = run(flat) if known is None else _replayed(known, run, flat)
            return values if len(values) > 1 else (values or (None,))[0]

        return kernel

    tensor = "Tensor" if mutating else "Tensor?"
    declared = [tensor] * _result_slots(tuple(kind for kind in results if kind != "list"))
    declared += ["Tensor[]"] * ("list" in results)
    real = kernel_of(compute, Replays(_MOST_LAYOUTS) if replays else None)
    return register(
        f"{name}({schema.declare(mutating=mutating)}) -> ({', '.join(declared)})",
        ref=real,
        launch=real,
        allocate=kernel_of(fake),
    )


def _replayed(known: Replays, run: Callable[[Any], tuple[Any, ...]], flat: tuple[Any, ...]) -> tuple[Any, ...]:
    """`run(flat)`, or what it launched before for arguments that differ in the tensors' values only."""
    tensors: list[Any] = []
    facts: list[Any] = []  # of tensors only the place counts
    for arg in flat:
        kind = type(arg)
        if kind is Tensor or isinstance(arg, Tensor):
            tensors.append(arg)
            facts.append(Tensor)
        else:
            facts.append(tuple(arg) if kind is list else arg)
    layout = layouts(tensors)
    values, _ = known.run(lambda: (run(flat), ()), tensors, None if layout is None else (layout, *facts))
    return values


def _flatten_results(name: str, values: tuple[Any, ...], results: Results) -> list[Any]:
    if len(values) != len(results):
        raise RuntimeError(f"{name}: returned {len(values)} results where {len(results)} were declared.")
    flat: list[Any] = []
    for value, kind in zip(values, results, strict=True):
        flat.extend([list(value)] if kind == "list" else flatten_value(value, kind))
    return flat


def _fresh(name: str, values: list[Any], arguments: tuple[Any, ...]) -> list[Any]:
    """Results that alias neither an argument nor each other: a clone stands in for a tensor that comes twice."""
    given = {id(argument) for argument in arguments if isinstance(argument, Tensor)}
    seen: set[int] = set()

    def fresh(value: Any) -> Any:
        if isinstance(value, list):
            return [fresh(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        if id(value) in given:
            raise RuntimeError(f"{name}: a result can't be one of the arguments. Return None for it, or a copy.")
        if id(value) in seen:
            return value.clone()
        seen.add(id(value))
        return value

    return [fresh(value) for value in values]


def _unflatten_results(flat: list[Any], results: Results) -> tuple[Any, ...]:
    values: list[Any] = []
    at = 0
    for kind in results:
        if kind == "list":
            values.append(tuple(flat[at]))
            at += 1
        else:
            count = slot_count(kind)
            values.append(unflatten_value(flat[at : at + count], kind))
            at += count
    return tuple(values)


def _with_markers(name: str, values: list[Any], device: torch.device) -> list[Tensor]:
    if any(value is not None and value.dtype is torch.bool for value in values):
        raise RuntimeError(f"{name}: an operator that changes its arguments can't return bool tensors.")
    return [torch.empty(0, dtype=torch.bool, device=device) if value is None else value for value in values]


def _absent_if_marker(value: Tensor) -> Tensor | None:
    return None if value.dtype is torch.bool else value
