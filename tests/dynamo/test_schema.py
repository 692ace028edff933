"""Argument dataclasses as operator schemas: how every kind of field crosses, and what is refused."""

import dataclasses
import enum
import typing
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import Any, ClassVar, Literal, Optional, Union

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from lowp.dynamo.schema import ArgumentSchema, Mutable, Sizes
from lowp.formats import E4M3, ElementFormat
from lowp.quantization import Quantized
from lowp.quantizers import Float8CurrentScalingQuantizer, Quantizer
from lowp.values import Value, decode


class Activation(enum.Enum):
    GELU = 1
    SILU = 2


@dataclass
class Everything:
    GRAD_OUTPUT_FIELDS: ClassVar[tuple[str, ...]] = ("x",)

    x: Tensor
    maybe: Tensor | None
    mutable: Mutable
    quantized: Quantized
    maybe_quantized: Quantized | None
    either: Tensor | Quantized
    maybe_either: Tensor | Quantized | None
    sizes: Sizes
    maybe_sizes: Sizes | None
    group: ProcessGroup | None
    flag: bool
    count: int
    eps: float
    name: str
    dtype: torch.dtype
    activation: Activation
    fmt: ElementFormat | None
    quantizer: Quantizer | None
    side: Literal["left", "right"]
    pair: tuple[int, float]
    nested: tuple[tuple[str, int], ...]
    params: dict[str, float | None]
    deep: typing.Dict[str, typing.Tuple[Optional[int], bool]]  # noqa: UP006, UP045


def tensor() -> Tensor:
    return torch.zeros(2)


QUANTIZED = st.sampled_from([(True, True), (True, False), (False, True)]).map(
    lambda copies: Quantized(*[tensor() if copies[index // 2] else None for index in range(4)])
)
SIZES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
EVERYTHING = st.builds(
    Everything,
    x=st.builds(tensor),
    maybe=st.none() | st.builds(tensor),
    mutable=st.none() | st.builds(tensor),
    quantized=QUANTIZED,
    maybe_quantized=st.none() | QUANTIZED,
    either=st.builds(tensor) | QUANTIZED,
    maybe_either=st.none() | st.builds(tensor) | QUANTIZED,
    sizes=SIZES,
    maybe_sizes=st.none() | SIZES,
    group=st.none(),
    flag=st.booleans(),
    count=st.integers(),
    eps=st.floats(allow_nan=False),
    name=st.text(st.characters(exclude_categories=["Cs"])),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    activation=st.sampled_from(Activation),
    fmt=st.none() | st.sampled_from(ElementFormat),
    quantizer=st.none() | st.builds(Float8CurrentScalingQuantizer, fmt=st.sampled_from(ElementFormat)),
    side=st.sampled_from(["left", "right"]),
    pair=st.tuples(st.integers(), st.floats(allow_nan=False)),
    nested=st.lists(st.tuples(st.text("ab"), st.integers())).map(tuple),
    params=st.dictionaries(st.text("abc"), st.none() | st.floats(allow_nan=False)),
    deep=st.dictionaries(st.text("abc"), st.tuples(st.none() | st.integers(), st.booleans())),
)


def same(a: Any, b: Any) -> bool:
    """Equal, with tensors the very same ones."""
    if isinstance(a, Quantized):
        return isinstance(b, Quantized) and all(x is y for x, y in zip(a, b, strict=True))
    return a is b if isinstance(a, Tensor) else type(a) is type(b) and a == b


@settings(deadline=None)
@given(EVERYTHING)
def test_unflatten_is_the_inverse_of_flatten(args):
    schema = ArgumentSchema(Everything)
    flat = schema.flatten(args)
    again = schema.unflatten(tuple(flat))
    assert type(again) is Everything
    for name, value in vars(args).items():
        assert same(value, getattr(again, name)), name


@settings(deadline=None)
@given(EVERYTHING)
def test_sizes_and_tensors_are_slots_and_the_rest_is_the_bundle(args):
    *slots, bundle = ArgumentSchema(Everything).flatten(args)
    assert all(slot is None or isinstance(slot, (Tensor, list)) for slot in slots)
    assert [slot for slot in slots if isinstance(slot, list)] == [
        list(sizes) for sizes in (args.sizes, args.maybe_sizes) if sizes is not None
    ]
    assert [field.name for field in dataclasses.fields(Everything)][10:] == list(decode(bundle))


def test_the_schema_is_declared_as_documented():
    declared = ArgumentSchema(Everything, ("x",)).declare(mutating=True).split(", ")
    components = ("row_data", "row_scale", "column_data", "column_scale")
    assert declared == [
        "Tensor? x",
        "Tensor? maybe",
        "Tensor(a!)? mutable",
        *[f"Tensor? quantized_{component}" for component in components],
        *[f"Tensor? maybe_quantized_{component}" for component in components],
        "Tensor? either",
        *[f"Tensor? either_{component}" for component in components],
        "Tensor? maybe_either",
        *[f"Tensor? maybe_either_{component}" for component in components],
        "SymInt[] sizes",
        "SymInt[]? maybe_sizes",
        "str? group",
        "str bundle",
    ]
    assert "!" not in ArgumentSchema(Everything).declare(mutating=False)
    assert ArgumentSchema(Everything).declare(mutating=False).startswith("Tensor x, ")


@dataclass
class WithGroup:
    x: Tensor
    group: ProcessGroup
    other: ProcessGroup | None


def test_a_process_group_crosses_by_name(group):
    schema = ArgumentSchema(WithGroup)
    flat = schema.flatten(WithGroup(tensor(), group, None))
    assert flat[1:3] == [group.group_name, None]
    again = schema.unflatten(tuple(flat))
    assert again.group is group
    assert again.other is None


def test_fields_with_defaults_cross_and_computed_ones_are_left_out():
    @dataclass
    class Args:
        x: Tensor
        scale: float = 2.0

        def __post_init__(self) -> None:
            self.doubled = 2 * self.scale

    schema = ArgumentSchema(Args)
    again = schema.unflatten(tuple(schema.flatten(Args(tensor()))))
    assert (again.scale, again.doubled) == (2.0, 4.0)


@pytest.mark.parametrize("spelling", [tuple[int, ...], typing.Tuple[int, ...], Sizes])  # noqa: UP006
def test_every_spelling_of_sizes_is_a_slot(spelling):
    schema = ArgumentSchema(make_dataclass("Spelt", [("sizes", spelling)]))
    assert schema.declare(mutating=False) == "SymInt[] sizes, str bundle"


class Plain:
    pass


@pytest.mark.parametrize(
    "hint",
    [
        typing.Dict[str, Tensor],  # noqa: UP006
        dict[str, Plain],
        dict[int, float],
        dict,
        typing.List[int],  # noqa: UP006
        list[Tensor],
        tuple,
        tuple[Tensor, ...],
        tuple[int, Plain],
        Callable[[int], int],
        Union[Tensor, int],  # noqa: UP007
        Tensor | Quantized | float,
        Quantized | str,
        ProcessGroup | str,
        set[int],
        object,
        Any,
        Plain,
        torch.device,
        torch.Size,
        torch.Generator,
        bytes,
        complex,
        Literal["a", b"b"],
        Value | Plain,
        torch.nn.Parameter,
    ],
    ids=str,
)
def test_what_cannot_cross_is_refused_by_class_and_field(hint):
    args_type = make_dataclass("ToyArgs", [("x", Tensor), ("wrong", hint)])
    with pytest.raises(TypeError, match=r"^ToyArgs\.wrong: .* can't cross into a registered operator\. Use Tensor, "):
        ArgumentSchema(args_type)


def test_the_arguments_must_be_a_dataclass():
    with pytest.raises(TypeError, match=r"^Plain: the arguments of a registered operation must be a dataclass\.$"):
        ArgumentSchema(Plain)


@pytest.mark.parametrize(
    "fields",
    [
        [("bundle", Tensor)],
        [("x", Quantized), ("x_row_data", Tensor)],
        [("x_column_scale", Tensor | None), ("x", Tensor | Quantized)],
    ],
)
def test_names_that_clash_are_refused(fields):
    with pytest.raises(TypeError, match=r"^ToyClash\.\w+: another argument of the operator has this name\.$"):
        ArgumentSchema(make_dataclass("ToyClash", fields))


def test_simple_fields_may_have_any_name():
    schema = ArgumentSchema(make_dataclass("ToyNames", [("bundle", int), ("mode", str), ("x", Tensor)]))
    again = schema.unflatten(tuple(schema.flatten(schema.args_type(3, "fast", tensor()))))
    assert (again.bundle, again.mode) == (3, "fast")
    names = ["args", "owner", "encode", "flatten_value"]
    schema = ArgumentSchema(make_dataclass("ToyOwner", [(name, int) for name in names]))
    again = schema.unflatten(tuple(schema.flatten(schema.args_type(1, 2, 3, 4))))
    assert [getattr(again, name) for name in names] == [1, 2, 3, 4]


@pytest.mark.parametrize("named", ["missing", "eps", "sizes", "group"])
def test_gradient_fields_must_be_tensor_fields(named):
    with pytest.raises(
        TypeError, match=rf"^Everything: GRAD_OUTPUT_FIELDS names \['{named}'\], not tensor fields of it"
    ):
        ArgumentSchema(Everything, ("x", named))


@dataclass
class Numbers:
    x: Tensor
    params: dict[str, float]
    fmt: ElementFormat


@pytest.mark.parametrize("value", [tensor(), {1}, len, {"a": tensor()}, (object(),)])
def test_a_value_that_is_not_what_its_annotation_says_is_refused_by_class_and_field(value):
    with pytest.raises(TypeError, match=r"^Numbers\.params: a value that crosses into a registered operator must be "):
        ArgumentSchema(Numbers).flatten(Numbers(tensor(), value, E4M3))
