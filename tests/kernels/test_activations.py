"""The table of activations against FP64 autograd of the formulas, and the Triton functions against the table."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.formats import HIGH_PRECISION
from lowp.kernels.activated import activated, activation_gradient
from lowp.kernels.activation_functions import IDENTITY, SIGMOID
from lowp.kernels.activations import ACTIVATIONS, complete_params, register_activation
from lowp.kernels.activations import activation_gradient_ref as gradient_of
from lowp.kernels.activations import activation_ref as value_of
from lowp.kernels.materialize import materialize
from tests.kernels import formulas
from tests.kernels.layouts import all_values

EPS = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float32).tiny
CLAMPS = [{}, {"limit": 1.5, "alpha": 0.5, "glu_linear_offset": -0.25}]
LARGE = [88.0, 104.0, 1e4, 1e18, 1e20, 1e30, 3e38]
"""Where exp, a^2 and a^3 leave the range of fp32, or a sigmoid's last bits are gone."""
EDGES = torch.tensor([0.0, 1e-45, 1e-38, 1e-20, 1e-6, 1.5, 7.0, 16.0, 32.0, *LARGE])


def numbers() -> Tensor:
    near = torch.cat([EDGES.nextafter(torch.tensor(0.0)), EDGES, EDGES.nextafter(torch.tensor(math.inf))])
    return torch.cat([near, -near, torch.linspace(-20, 20, 2001), torch.linspace(-110, -20, 181)])


def inputs(name: str, a: Tensor | None = None) -> Tensor:
    """`[n, 1]`, or `[n, 2]` of which the first column is `a`, and the second one moderate."""
    a = numbers() if a is None else a
    return torch.cat([a[:, None], 4 * moderate(len(a))], dim=1) if formulas.is_gated(name) else a[:, None]


def moderate(n: int) -> Tensor:
    """`[n, 1]`, of magnitudes from 1 to 2: no product with one fits fp32 if a factor does not."""
    x = torch.rand(n, 1) * 2 - 1
    return x + x.sign()


def params_of(name: str, given: dict[str, float] | None = None) -> tuple[float, ...]:
    return tuple(complete_params("test", name, given).values())


def activation_ref(x: Tensor, name: str, params: tuple[float, ...]) -> Tensor:
    return value_of(x, ACTIVATIONS[name], params)


def activation_gradient_ref(dy: Tensor, x: Tensor, name: str, params: tuple[float, ...]) -> Tensor:
    return gradient_of(dy, x, ACTIVATIONS[name], params)


def named(given: dict[str, float]) -> dict[str, float]:
    """As tests.kernels.formulas calls them."""
    return {key.removeprefix("glu_linear_"): value for key, value in given.items()}


def assert_near(actual: Tensor, exact: Tensor, bound: Tensor) -> None:
    """Within a bound where the exact number fits fp32 well, else as large."""
    exact = exact.double()
    fits = exact.abs() < torch.finfo(torch.float32).max / 2
    assert torch.equal(actual.isnan(), exact.isnan())
    assert ((actual.double() - exact).abs() <= bound)[fits].all()
    assert (actual.abs() >= torch.finfo(torch.float32).max / 4)[~fits & ~exact.isnan()].all()


def test_the_table_is_complete():
    assert sorted(ACTIVATIONS) == sorted(formulas.NAMES)
    for name, activation in ACTIVATIONS.items():
        assert (activation.gate is not None) == formulas.is_gated(name)


@pytest.mark.parametrize("name", formulas.NAMES)
def test_values(name):
    """An error of z is one of exp(z): eps |z|; every other step is off by half an eps."""
    x = inputs(name)
    exact = formulas.activation(x.double(), name)
    bound = EPS * (8 + 4 * formulas.exponent(x, name)) * exact.abs()
    bound += 1024 * TINY  # a sigmoid below `TINY` may be 0, times 128 and 8
    assert_near(activation_ref(x, name, params_of(name)), exact, bound)


@pytest.mark.parametrize("name", formulas.NAMES)
def test_gradients(name):
    """1 - s is off by an eps of 1, which counts as often as it is multiplied: by a z'(a), where s is not 1 anyway."""
    x = inputs(name)
    dy = moderate(len(x))
    exact = formulas.gradient(dy.double(), x.double(), name)
    a = x[:, :1].double().abs()
    factor = torch.maximum(a, torch.tensor(1.0)) if "srelu" in name or "sreglu" in name else a.clamp(1, 20) * 64
    bound = 8 * EPS * dy.double().abs() * factor * (x[:, 1:].double().abs() + 1 if formulas.is_gated(name) else 1)
    bound = bound + 8 * EPS * (1 + 16 * a.clamp(max=104)) * exact.abs()
    assert_near(activation_gradient_ref(dy, x, name, params_of(name)), exact, bound + 1024 * TINY)


@pytest.mark.parametrize("name", ["gelu", "qgelu", "silu", "glu"])
def test_tails_keep_their_relative_accuracy(name):
    slope = {"gelu": 0.14, "qgelu": 1.702, "silu": 1.0, "glu": 1.0}[name]
    a = -torch.linspace(0, 5.5 if name == "gelu" else 80 / slope, 500)
    x = inputs(name, a) if name != "glu" else torch.stack([a, torch.ones_like(a)], dim=1)
    exact = formulas.activation(x.double(), name)
    error = (activation_ref(x, name, ()) - exact).abs()
    assert (error <= EPS * (8 + 88 * 4) * exact.abs()).all()


@pytest.mark.parametrize("name", formulas.NAMES)
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite(name, number):
    x = torch.full((1, 2 if formulas.is_gated(name) else 1), 0.5)
    for column in range(x.shape[1]):
        given = x.clone()
        given[:, column] = number
        exact = formulas.activation(given.double(), name)
        torch.testing.assert_close(activation_ref(given, name, params_of(name)).double(), exact, equal_nan=True)
        exact = formulas.gradient(torch.ones(1, 1).double(), given.double(), name)
        actual = activation_gradient_ref(torch.ones(1, 1), given, name, params_of(name))
        torch.testing.assert_close(actual.double(), exact, equal_nan=True)


@pytest.mark.parametrize("given", CLAMPS, ids=str)
def test_clamped_swiglu_has_the_slopes_of_finite_differences(given):
    limit = given.get("limit", 7.0)
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(4000, 2, generator=generator, dtype=torch.float64) * 2 - 1) * 2 * limit
    step = 1e-6
    x = x[((x.abs() - limit).abs() > 2 * step).all(dim=1)]
    params = params_of("clamped_swiglu", given)
    slopes = activation_gradient_ref(torch.ones(len(x), 1, dtype=x.dtype), x, "clamped_swiglu", params)
    for column in range(2):
        shift = torch.zeros(2, dtype=x.dtype)
        shift[column] = step
        ahead, behind = (activation_ref(moved, "clamped_swiglu", params) for moved in (x + shift, x - shift))
        torch.testing.assert_close(slopes[:, column], (ahead - behind)[:, 0] / (2 * step), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("given", CLAMPS, ids=str)
def test_clamped_swiglu_clamps_as_torch_does(given):
    limit = given.get("limit", 7.0)
    around = torch.tensor([limit, -limit, limit / 2, limit * 2, -limit * 2], dtype=torch.float64)
    edges = torch.cat([around, around.nextafter(torch.tensor(0.0).double()), around.nextafter(around * 2)])
    x = torch.cartesian_prod(edges, edges)
    dy, params = torch.ones(len(x), 1, dtype=x.dtype), params_of("clamped_swiglu", given)
    exact = formulas.activation(x, "clamped_swiglu", **named(given))
    torch.testing.assert_close(activation_ref(x, "clamped_swiglu", params), exact)
    exact = formulas.gradient(dy, x, "clamped_swiglu", **named(given))
    torch.testing.assert_close(activation_gradient_ref(dy, x, "clamped_swiglu", params), exact)


@pytest.mark.parametrize(
    ("name", "native"),
    [
        ("gelu", lambda x: F.gelu(x, approximate="tanh")),
        ("silu", F.silu),
        ("relu", F.relu),
        ("glu", lambda x: F.glu(x.roll(x.shape[-1] // 2, dims=-1))),
        ("swiglu", lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
    ],
)
def test_torch_has_the_same_functions(name, native):
    x = torch.randn(100, 64, dtype=torch.float64)
    torch.testing.assert_close(activation_ref(x, name, ()), native(x))


@pytest.mark.parametrize(
    ("name", "params", "error", "text"),
    [
        ("swish", None, ValueError, r"op: activation must be one of gelu, .*clamped_swiglu, got 'swish'"),
        ("gelu", {"limit": 7.0}, ValueError, r"op: gelu has no parameters, got 'limit'\. Check activation_params\."),
        (
            "clamped_swiglu",
            {"offset": 1.0},
            ValueError,
            r"op: clamped_swiglu has limit, alpha, glu_linear_offset, got 'offset'",
        ),
        ("clamped_swiglu", {"limit": "7"}, TypeError, r"op: limit must be a number, got str"),
        ("clamped_swiglu", {"alpha": True}, TypeError, r"op: alpha must be a number, got bool"),
        ("clamped_swiglu", {"alpha": math.nan}, ValueError, r"op: alpha must be finite, got nan"),
        ("clamped_swiglu", {"limit": 0}, ValueError, r"op: limit must be > 0, got 0"),
    ],
)
def test_parameters_are_checked_by_name(name, params, error, text):
    with pytest.raises(error, match=text):
        complete_params("op", name, params)


def test_parameters_are_completed():
    assert complete_params("op", "gelu", None) == {}
    expected = {"limit": 5.0, "alpha": 1.702, "glu_linear_offset": 1.0}
    assert complete_params("op", "clamped_swiglu", {"limit": 5}) == expected


def test_a_new_activation_is_checked():
    with pytest.raises(ValueError, match=r"^register_activation: each activation has its own name, got 'glu'"):
        register_activation("glu", SIGMOID, gate=IDENTITY)
    with pytest.raises(ValueError, match=r"^register_activation: the activation of 0 must be 0, got 0\.5"):
        register_activation("sigmoid", SIGMOID)
    assert "sigmoid" not in ACTIVATIONS


# ---- Triton against the table


def ordinal(x: Tensor) -> Tensor:
    """Where a value stands among all values of its dtype."""
    bits = x.view({2: torch.int16, 4: torch.int32}[x.element_size()]).to(torch.int64)
    return torch.where(bits < 0, -(bits & (2 ** (8 * x.element_size() - 1) - 1)), bits)


def assert_one_step(actual: Tensor, expected: Tensor, name: str, sizes: Tensor | float = 0.0) -> None:
    """Equal; or with a transcendental one step apart, or near next to `sizes`, of which the results are differences."""
    actual = actual.cpu()
    assert torch.equal(actual.isnan(), expected.isnan())
    steps = (ordinal(actual) - ordinal(expected)).abs()
    if name in formulas.EXACT:
        assert (steps == 0)[~expected.isnan()].all()
        return
    near = (actual.float() - expected.float()).abs() <= torch.as_tensor(sizes) * 64 * EPS + 256 * TINY
    assert ((steps <= 1) | near)[~expected.isnan()].all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", formulas.NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_is_within_a_step_for_every_value(name, dtype):
    a = all_values(dtype)
    dy, b = (moderate(a.numel()).reshape(a.shape).to(dtype) for _ in range(2))
    x = torch.cat([a, b], dim=1) if formulas.is_gated(name) else a
    for params in CLAMPS if name == "clamped_swiglu" else [None]:
        actual, expected = (materialize(activated(x.to(device), name, params)) for device in ("cuda", "cpu"))
        assert_one_step(actual, expected, name)
        actual, expected = (
            materialize(activation_gradient(dy.to(device), x.to(device), name, params)) for device in ("cuda", "cpu")
        )
        assert_one_step(actual, expected, name, sizes=8.0)  # s + a s (1 - s) z', times dy and b or b + offset


@pytest.mark.gpu
@pytest.mark.parametrize("name", formulas.NAMES)
def test_triton_treats_what_is_not_finite_as_torch_does(name):
    numbers = torch.tensor([0.0, -0.0, 0.5, -3.0, 30.0, math.inf, -math.inf, math.nan])
    x = torch.cartesian_prod(numbers, numbers) if formulas.is_gated(name) else numbers[:, None]
    for dy in numbers:
        dy_MK = dy.expand(len(x), 1)
        for source in (activated, lambda x, name, dy_MK=dy_MK: activation_gradient(dy_MK.to(x.device), x, name)):
            actual, expected = (materialize(source(x.to(device), name)).cpu() for device in ("cuda", "cpu"))
            torch.testing.assert_close(actual, expected, rtol=64 * EPS, atol=64 * EPS, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", formulas.NAMES)
def test_triton_in_fp32(name):
    """exp(z) is off by eps |z|, everything else by a few eps."""
    x = inputs(name)
    actual = materialize(activated(x.cuda(), name)).cpu()
    expected = materialize(activated(x, name))
    bound = EPS * (16 + 8 * formulas.exponent(x, name)) * expected.double().abs() + 1024 * TINY
    assert torch.equal(actual.isnan(), expected.isnan())
    finite = expected.isfinite()
    assert ((actual.double() - expected.double()).abs() <= bound)[finite].all()


@pytest.mark.parametrize("name", formulas.NAMES)
@pytest.mark.parametrize("dtype", HIGH_PRECISION)
def test_values_are_rounded_once(name, dtype):
    x = torch.randn(33, 34).to(dtype)
    for out in HIGH_PRECISION:
        expected = activation_ref(x.float(), name, params_of(name)).to(out)
        assert torch.equal(materialize(activated(x, name, dtype=out)), expected)
