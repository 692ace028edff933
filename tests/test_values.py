"""Simple values as strings: the inverse, equality, errors, and the same string in traced code."""

import dataclasses
import enum
import math
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import lowp
from lowp.formats import E4M3, E5M2
from lowp.recipe import Float8CurrentScaling, Format, MMParams, QParams
from lowp.values import Value, decode, encode


class Colour(enum.Enum):
    RED = "red"
    BLUE = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Kind(str, enum.Enum):
    PLAIN = "plain"


@dataclass(frozen=True)
class Leaf(Value):
    count: int = 0
    ratio: float = 1.0
    on: bool = False
    label: str | None = None


@dataclass(frozen=True)
class Tree(Value):
    leaf: Leaf
    children: tuple[Any, ...] = ()
    params: dict[str, Any] = dataclasses.field(default_factory=dict)


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    TEXT,
    st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]),
    st.sampled_from([*Colour, Level.LOW, Kind.PLAIN, E4M3, Format.HYBRID]),
    st.builds(Leaf, st.integers(), st.floats(allow_nan=False), st.booleans(), st.none() | TEXT),
    st.just(Float8CurrentScaling(amax_epsilon=1e-6)),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(TEXT, inner, max_size=3),
        st.builds(Tree, st.just(Leaf()), st.lists(inner, max_size=2).map(tuple), st.dictionaries(TEXT, inner)),
    ),
    max_leaves=12,
)
EXAMPLES = (
    None,
    True,
    0,
    -7,
    1.0,
    -0.0,
    1e-12,
    math.inf,
    -math.inf,
    'quotes " and \\',
    "line\nbreak\x00",
    torch.float8_e5m2,
    Colour.BLUE,
    Level.LOW,
    Kind.PLAIN,
    E5M2,
    (1, (2.5, None), ()),
    {"limit": 7.0, "alpha": 1.702, "nested": {"on": False}},
    Leaf(3, 0.5, True, "x"),
    Tree(Leaf(), (1, "a"), {"k": Leaf(1)}),
    Float8CurrentScaling(use_power_2_scales=True),
)


def typed(value: Any) -> Any:
    """`value` with the type of every part: tells 1, 1.0, True and `Level.LOW` apart, and the zeros' signs."""
    if isinstance(value, tuple):
        return tuple(typed(item) for item in value)
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, Value):
        return type(value), [typed(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return type(value), repr(value)


@settings(deadline=None)
@given(VALUES)
def test_decode_is_the_inverse_of_encode(value):
    again = decode(encode(value))
    assert again == value
    assert typed(again) == typed(value)


@settings(deadline=None)
@given(VALUES, VALUES)
def test_different_values_have_different_strings(a, b):
    assert (encode(a) == encode(b)) == (typed(a) == typed(b))


def test_nan_crosses():
    assert math.isnan(decode(encode(math.nan)))
    assert math.isnan(decode(encode({"limit": (math.nan,)}))["limit"][0])


def test_lists_come_back_as_tuples():
    assert decode(encode([1, [2, torch.Size([3])]])) == (1, (2, (3,)))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Leaf(ratio=1), Leaf(ratio=1.0)),
        (Leaf(on=1), Leaf(on=True)),
        (QParams(amax_epsilon=0), QParams(amax_epsilon=0.0)),
        (Float8CurrentScaling(amax_epsilon=0), Float8CurrentScaling(amax_epsilon=0.0)),
        (Tree(Leaf(), params={"a": 1, "b": 2}), Tree(Leaf(), params={"b": 2, "a": 1})),
    ],
)
def test_equal_values_have_equal_strings(a, b):
    assert a == b
    assert a.bundle == b.bundle


def test_values_can_be_copied_replaced_and_pickled():
    leaf = Leaf(3, 0.5)
    assert dataclasses.replace(leaf, count=4).bundle == Leaf(4, 0.5).bundle
    assert pickle.loads(pickle.dumps(leaf)).bundle == leaf.bundle
    assert hash(leaf) == hash(Leaf(3, 0.5))


class Local:
    class Nested(enum.Enum):
        A = 1


def test_nested_enums_cross_and_local_ones_are_refused():
    class Hidden(enum.IntEnum):
        A = 1

    assert decode(encode(Local.Nested.A)) is Local.Nested.A
    with pytest.raises(TypeError, match=r"^Leaf\.label: an enum must be importable .*Hidden"):
        Leaf(label=Hidden.A)


REFUSED = {
    "tensor": torch.ones(1),
    "dict of tensors": {"a": torch.ones(1)},
    "set": {1},
    "bytes": b"x",
    "complex": 1j,
    "callable": len,
    "object": object(),
    "class": Leaf,
    "device": torch.device("cpu"),
    "int keys": {1: 2},
    "deep": (1, {"a": (object(),)}),
    "plain dataclass": dataclasses.make_dataclass("Plain", ["a"])(1),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_cross_is_refused_by_class_and_field(value):
    with pytest.raises(TypeError, match=r"^Tree\.params: a value that crosses .* must be None, bool, .*, got <class"):
        Tree(Leaf(), params=value)
    with pytest.raises(TypeError, match=r"^encode: "):
        encode(value)


def test_the_error_names_the_field_when_traced():
    def function(x):
        return x + 1, encode({1}, Leaf, "label")

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Leaf\.label: a value that crosses"):
        torch.compile(function, fullgraph=True, backend="eager")(torch.ones(1))


@pytest.mark.parametrize("dynamic", [None, True])
def test_traced_strings_are_the_eager_ones(dynamic):
    torch.compiler.reset()

    def function(x):
        return x + 1, [encode(value) for value in EXAMPLES]

    texts = torch.compile(function, fullgraph=True, backend="eager", dynamic=dynamic)(torch.ones(2))[1]
    assert [decode(text) for text in texts] == list(EXAMPLES)
    if dynamic is None:  # torch's symbolic floats lose the sign of zero
        assert texts == [encode(value) for value in EXAMPLES]


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_symbolic_bool_is_a_truth(dynamic):
    torch.compiler.reset()
    traced = torch.compile(lambda x: (x + 1, encode(x.shape[0] > 4)), fullgraph=True, backend="eager", dynamic=dynamic)
    assert [traced(torch.ones(rows))[1] for rows in (7, 3, 8)] == ["true", "false", "true"]


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.value = None

    def forward(self, x):
        return x + 1, "" + encode(self.value)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "values",
    [
        (1e-5, 1e-6, 1e-7),
        (3, 4, 5),
        ({"limit": 7.0}, {"limit": 6.0}, {"limit": 5.5}),
        ((1, 2.0), (1, 3.0), (1, 4.0)),
        (Leaf(1), Leaf(2), Leaf(3)),
        (torch.float16, torch.bfloat16, torch.float32),
        (Colour.RED, Colour.BLUE, None),
    ],
    ids=["float", "int", "dict", "tuple", "Value", "dtype", "enum"],
)
def test_a_changed_value_recompiles_and_an_earlier_one_returns_to_its_graph(values, dynamic):
    torch.compiler.reset()
    module = Module()
    graphs = CompileCounter()
    compiled = torch.compile(module, fullgraph=True, backend=graphs, dynamic=dynamic)
    for value in (*values, *values[::-1]):
        module.value = value
        assert compiled(torch.ones(2))[1] == encode(value)
    assert graphs.frame_count == len(values)


def test_every_spec_of_the_library_crosses():
    recipe = Float8CurrentScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=True), backward_override="dequantized")
    for value in (recipe, recipe.quantizer("grad_output"), recipe.gemm("fprop"), lowp.recipe.QParams()):
        assert decode(value.bundle) == value
