"""The registered operators of an operation: its structured results as an operator's flat ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lowp.dynamo.custom_op import Results, register_custom_op

if TYPE_CHECKING:
    from lowp.ops.op import FusibleOperation


class _Layout:
    """One value, then groups of tensors, one group for each basic operation, then perhaps a list of tensors."""

    def __init__(self, first: str, *groups: Sequence[int], rest: bool = False) -> None:
        self.groups = groups
        self.rest = rest
        count = sum(sum(counts) for counts in groups)
        self.results: Results = (first, *["tensor"] * count, *["list"] * rest)

    def flatten(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        """The operator's results."""
        first, *groups = value
        rest = (tuple(groups.pop()),) if self.rest else ()
        return (first, *[tensor for group in groups for tensors in group for tensor in tensors], *rest)

    def restore(self, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inverse of `flatten`. Runs in traced code."""
        value = [flat[0]]
        at = 1
        for counts in self.groups:
            count = sum(counts)
            value.append(split_groups(flat[at : at + count], counts))
            at += count
        return (*value, *flat[at:])


_LAYOUT_ATTRIBUTES = (
    "fuses", "num_extra_inputs", "num_extra_outputs", "parameter_names", "quantizes_grad_input", "quantizes_output"
)  # fmt: skip
"""The class attributes that an operator's results depend on."""


def register_direction(
    cls: type[FusibleOperation], direction: str, *, replays: bool
) -> dict[str, Callable[[Any], Any] | None]:
    """Register one direction of `cls` where the class declares something of its own.

    Returns:
        By direction, the function that calls the operator, or None: traced inline. Empty: as the class derived from.

    Raises:
        TypeError: the compute method lacks `in_custom_op`, a field can't cross, or `GRAD_OUTPUT_FIELDS` is wrong; names
            the class.
    """
    prefix = {"forward": "fwd", "backward": "bwd"}[direction]
    args_type = getattr(cls, f"{prefix}_args_type")
    own = {f"{prefix}_args_type", f"{direction}_compute", f"{direction}_compute_fake", *_LAYOUT_ATTRIBUTES} & set(
        vars(cls)
    )
    if not own:
        return {}
    if args_type is None:
        return {direction: None}
    compute, fake = getattr(cls, f"{direction}_compute"), getattr(cls, f"{direction}_compute_fake")
    parameter = inspect.signature(compute).parameters.get("in_custom_op")
    if parameter is None or parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
        raise TypeError(f"{cls.__name__}.{direction}_compute: must take the keyword-only argument in_custom_op=False.")
    grads = getattr(args_type, "GRAD_OUTPUT_FIELDS", ())
    outputs = [basic.num_extra_outputs for basic in cls.basic_types()]
    if grads and len(grads) != 1 + sum(outputs):
        raise TypeError(
            f"{args_type.__name__}: GRAD_OUTPUT_FIELDS must name one field for each output of {cls.__name__}"
            f" ({1 + sum(outputs)}), got {grads}."
        )
    layout = _layout_of(cls, direction, outputs)
    call = register_custom_op(
        f"{cls.__name__}_{direction}",
        args_type,
        _flattened(functools.partial(compute, in_custom_op=True), layout),
        _flattened(fake, layout),
        layout.results,
        grads,
        replays=replays,
    )
    return {direction: lambda args: layout.restore(call(args))}


def _layout_of(cls: type[FusibleOperation], direction: str, outputs: list[int]) -> _Layout:
    quantizes = cls.quantizes_output if direction == "forward" else cls.quantizes_grad_input
    first = "tensor_or_quantized" if quantizes else "tensor"
    if direction == "forward":
        return _Layout(first, outputs, rest=True)
    parameters = [len(basic.parameter_names) for basic in cls.basic_types()]
    return _Layout(first, parameters, [basic.num_extra_inputs for basic in cls.basic_types()])


def _flattened(compute: Callable[[Any], Any], layout: _Layout) -> Callable[[Any], tuple[Any, ...]]:
    return lambda args: layout.flatten(compute(args))


def split_groups(flat: Sequence[Any], counts: Sequence[int]) -> list[tuple[Any, ...]]:
    """Consecutive groups of `flat`, of the sizes `counts`."""
    groups: list[tuple[Any, ...]] = []
    at = 0
    for count in counts:
        groups.append(tuple(flat[at : at + count]))
        at += count
    return groups
