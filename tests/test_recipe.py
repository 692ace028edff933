"""Recipes: what they refuse, that every argument takes effect, and how `autocast` puts one in force."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import lowp
from lowp.ambient import current_amax_reduction_group
from lowp.formats import E4M3, E5M2
from lowp.quantizers import Float8CurrentScalingQuantizer
from lowp.recipe import GEMMS, ROLES, Float8CurrentScaling, Format, MMParams, QParams
from lowp.values import decode
from tests.ops.graphs import Graphs

POWER_2 = Float8CurrentScaling(use_power_2_scales=True)
DEFAULT = Float8CurrentScaling()


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.manual_seed(0)
    torch.compiler.reset()


def linear(**options: Any) -> lowp.ops.BasicLinear:
    return lowp.ops.BasicLinear(32, 16, **options)


def awkward(*shape: int) -> torch.Tensor:
    """Values whose amax is no power of two times 1.75: every change of the scale's rule changes their bytes."""
    return torch.randn(*shape) * 0.37


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"fp8_format": Format.E5M2},
            r"^Float8CurrentScaling: fp8_format must be Format\.HYBRID or Format\.E4M3, got Format\.E5M2\. E5M2 has",
        ),
        ({"fp8_format": "HYBRID"}, r"fp8_format must be Format\.HYBRID or Format\.E4M3, got HYBRID\."),
        (
            {"backward_override": "bf16"},
            r"^Float8CurrentScaling: backward_override must be one of \(None, .*, 'dequantized'\), got 'bf16'\.$",
        ),
        *[
            (arguments, r"amax_epsilon must be finite and >= 0, got (-1|inf|nan)")
            for epsilon in (-1.0, float("inf"), float("nan"))
            for arguments in (
                {"amax_epsilon": epsilon},
                {"fp8_quant_fwd_inp": QParams(amax_epsilon=epsilon)},
                {"fp8_quant_fwd_weight": QParams(amax_epsilon=epsilon)},
                {"fp8_quant_bwd_grad": QParams(amax_epsilon=epsilon)},
            )
        ],
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        Float8CurrentScaling(**arguments)


def test_arguments_are_named():
    with pytest.raises(TypeError):
        Float8CurrentScaling(Format.HYBRID)
    with pytest.raises(TypeError, match="margin"):
        Float8CurrentScaling(margin=0)


def test_unknown_roles_and_gemms():
    with pytest.raises(ValueError, match=r"^Float8CurrentScaling\.quantizer: role must be one of .*, got 'output'\.$"):
        DEFAULT.quantizer("output")
    with pytest.raises(ValueError, match=r"^Float8CurrentScaling\.gemm: name must be one of .*, got 'bprop'\.$"):
        DEFAULT.gemm("bprop")


def test_quantizer_specs_check_their_arguments():
    with pytest.raises(TypeError, match=r"^Float8CurrentScalingQuantizer: fmt must be .*, got e4m3\. Use"):
        Float8CurrentScalingQuantizer(fmt="e4m3")


def test_recipes_are_frozen_values():
    with pytest.raises(AttributeError):
        DEFAULT.amax_epsilon = 1.0
    assert Float8CurrentScaling() == DEFAULT
    assert hash(Float8CurrentScaling()) == hash(DEFAULT)
    assert POWER_2 != DEFAULT
    assert POWER_2.bundle != DEFAULT.bundle


def test_str_shows_what_differs_from_the_defaults():
    assert str(DEFAULT) == "Float8CurrentScaling()"
    recipe = Float8CurrentScaling(fp8_format=Format.E4M3, amax_epsilon=0.5, backward_override="dequantized")
    assert str(recipe) == (
        "Float8CurrentScaling(fp8_format=Format.E4M3, amax_epsilon=0.5, backward_override='dequantized')"
    )


# ---- every argument takes effect

PARAMS = QParams(power_2_scale=True, amax_epsilon=0.25)
ROLE_ARGUMENTS = {
    "input": "fp8_quant_fwd_inp",
    "weight": "fp8_quant_fwd_weight",
    "grad_output": "fp8_quant_bwd_grad",
}


@pytest.mark.parametrize(
    ("fp8_format", "formats"), [(Format.HYBRID, (E4M3, E4M3, E5M2)), (Format.E4M3, (E4M3, E4M3, E4M3))]
)
def test_the_format_of_each_role(fp8_format, formats):
    recipe = Float8CurrentScaling(fp8_format=fp8_format)
    assert tuple(recipe.quantizer(role).fmt for role in ROLES) == formats


def test_defaults_hold_for_all_roles():
    recipe = Float8CurrentScaling(use_power_2_scales=True, amax_epsilon=0.25)
    for role in ROLES:
        assert recipe.quantizer(role).power_2_scale
        assert recipe.quantizer(role).amax_epsilon == 0.25


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_its_own_parameters(role):
    recipe = Float8CurrentScaling(**{ROLE_ARGUMENTS[role]: PARAMS})
    for other in ROLES:
        spec = recipe.quantizer(other)
        assert (spec.power_2_scale, spec.amax_epsilon) == ((True, 0.25) if other == role else (False, 0.0))


def test_a_roles_parameters_replace_the_defaults():
    recipe = Float8CurrentScaling(use_power_2_scales=True, amax_epsilon=1.0, fp8_quant_fwd_inp=QParams())
    assert recipe.quantizer("input") == DEFAULT.quantizer("input")
    assert recipe.quantizer("weight") == Float8CurrentScalingQuantizer(power_2_scale=True, amax_epsilon=1.0)


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("split", [True, False])
def test_a_gemm_has_its_own_accumulation(gemm, split):
    recipe = Float8CurrentScaling(**{f"fp8_gemm_{gemm}": MMParams(use_split_accumulator=split)})
    for other in GEMMS:
        assert recipe.gemm(other).use_split_accumulator == (split if other == gemm else other != "fprop")


class Gemms(TorchDispatchMode):
    """The `fast` argument of each scaled GEMM, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.fast: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.lowp.scaled_gemm.default, torch.ops.lowp.scaled_gemm_into.default):
            names = [argument.name for argument in func._schema.arguments]
            self.fast.append(dict(zip(names, args, strict=False))["fast"])
        return func(*args, **(kwargs or {}))


ACCUMULATIONS = [(False, True, True), (True, False, True), (True, True, False)]


def accumulation(fprop: bool, dgrad: bool, wgrad: bool) -> Float8CurrentScaling:
    """A recipe whose GEMMs use, or don't use, the split accumulator."""
    return Float8CurrentScaling(
        fp8_gemm_fprop=MMParams(use_split_accumulator=fprop),
        fp8_gemm_dgrad=MMParams(use_split_accumulator=dgrad),
        fp8_gemm_wgrad=MMParams(use_split_accumulator=wgrad),
    )


@pytest.mark.parametrize("split", ACCUMULATIONS)
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_accumulation_reaches_the_gemms(split, main_grad, bias):
    module = linear(accumulate_into_main_grad=main_grad)
    if main_grad:
        module.weight.main_grad = torch.zeros_like(module.weight)
    sequential = lowp.ops.Sequential(module, *[lowp.ops.Bias(16)] * bias, recipe=accumulation(*split))
    with Gemms() as gemms:
        sequential(torch.randn(4, 32, requires_grad=True)).sum().backward()
    fprop, dgrad, wgrad = (not value for value in split)
    assert gemms.fast == [fprop, wgrad, dgrad]  # the order in which they run


@pytest.mark.parametrize("split", ACCUMULATIONS)
def test_accumulation_reaches_the_operators_of_the_graph(split):
    module = lowp.ops.Sequential(linear(), recipe=accumulation(*split))
    graphs = Graphs()
    graphs.compile(module)(torch.randn(4, 32, requires_grad=True)).sum().backward()
    (forward,) = (bundle(graph) for graph in graphs.forward)
    (backward,) = (bundle(graph) for graph in graphs.backward)
    assert forward["fast_accumulation"] != split[0]
    assert (backward["fast_dgrad"], backward["fast_wgrad"]) == (not split[1], not split[2])


def bundle(graph: torch.fx.GraphModule) -> dict[str, Any]:
    """The value bundle of the one operator in `graph`."""
    (node,) = (node for node in graph.graph.nodes if "lowp" in str(node.target))
    return decode(node.args[-1])


@pytest.mark.parametrize(
    "changed",
    [
        {"fp8_format": Format.E4M3},
        {"use_power_2_scales": True},
        {"amax_epsilon": 100.0},
        {"fp8_quant_fwd_inp": PARAMS},
        {"fp8_quant_fwd_weight": PARAMS},
        {"fp8_quant_bwd_grad": QParams(amax_epsilon=100.0)},
        {"backward_override": "high_precision"},
        {"backward_override": "dequantized"},
    ],
    ids=lambda changed: "-".join(f"{key}={value}" for key, value in changed.items())[:40],
)
def test_an_argument_changes_the_numbers(changed):
    results = []
    for recipe in (DEFAULT, Float8CurrentScaling(**changed)):
        torch.manual_seed(1)
        module, x = linear(), awkward(8, 32).requires_grad_()
        y = lowp.ops.Sequential(module, recipe=recipe)(x)
        y.backward(awkward(8, 16))
        results.append((y.detach(), x.grad, module.weight.grad))
    assert any(not torch.equal(a, b) for a, b in zip(*results, strict=True))
    forward_only = next(iter(changed)) in ("fp8_quant_bwd_grad", "backward_override", "fp8_format")
    assert torch.equal(results[0][0], results[1][0]) == forward_only


# ---- autocast


def test_no_recipe_is_in_force_at_first():
    assert lowp.current_recipe() is None


def test_autocast_without_a_recipe_means_current_scaling():
    with lowp.autocast():
        assert lowp.current_recipe() == DEFAULT
    with lowp.autocast(True, POWER_2):
        assert lowp.current_recipe() is POWER_2
    assert lowp.current_recipe() is None


def test_autocast_nests():
    with lowp.autocast(recipe=POWER_2):
        with lowp.autocast(enabled=False):
            assert lowp.current_recipe() is None
            with lowp.autocast():
                assert lowp.current_recipe() == DEFAULT
            assert lowp.current_recipe() is None
        assert lowp.current_recipe() is POWER_2
    assert lowp.current_recipe() is None


def test_disabled_autocast_ignores_its_recipe():
    with lowp.autocast(enabled=False, recipe=POWER_2):
        assert lowp.current_recipe() is None


def test_one_autocast_object_can_be_entered_again():
    context = lowp.autocast(recipe=POWER_2)
    with context, lowp.autocast(enabled=False), context:
        assert lowp.current_recipe() is POWER_2
    assert lowp.current_recipe() is None
    with context:
        assert lowp.current_recipe() is POWER_2


def test_an_exception_restores_the_recipe():
    with lowp.autocast(recipe=POWER_2):
        with pytest.raises(RuntimeError, match="inside"), lowp.autocast():
            raise RuntimeError("inside")
        assert lowp.current_recipe() is POWER_2
    assert lowp.current_recipe() is None


def test_autocast_carries_the_group():
    group = object()
    with lowp.autocast(amax_reduction_group=group):
        assert current_amax_reduction_group() is group
        with lowp.autocast():
            assert current_amax_reduction_group() is None
        assert current_amax_reduction_group() is group
    assert current_amax_reduction_group() is None


@pytest.mark.parametrize("recipe", ["fp8", Float8CurrentScaling, {}, DEFAULT.quantizer("input")])
def test_autocast_takes_recipes_only(recipe):
    with pytest.raises(TypeError, match=r"^autocast: recipe must be a lowp\.recipe\.Recipe, got "):
        lowp.autocast(recipe=recipe)


def test_the_recipe_in_force_holds_in_every_thread():
    """Backward, and what it recomputes, runs in threads of its own for CUDA."""
    seen: list[Any] = []
    with lowp.autocast(recipe=POWER_2):
        thread = threading.Thread(target=lambda: seen.append(lowp.current_recipe()))
        thread.start()
        thread.join()
    assert seen == [POWER_2]


def test_a_modules_recipe_goes_before_the_one_in_force():
    x = awkward(4, 32)
    module = linear()
    own = lowp.ops.Sequential(module, recipe=POWER_2)
    expected = own(x)
    for context in (lowp.autocast(), lowp.autocast(enabled=False)):
        with context:
            assert torch.equal(own(x), expected)


@pytest.mark.parametrize(
    ("where", "recipe", "grad"),
    [
        ("outside", POWER_2, True),
        ("outside", None, True),
        ("outside", POWER_2, False),
        ("inside", POWER_2, True),
        ("inside", None, False),
        ("inside a module", DEFAULT, True),
    ],
)
def test_autocast_outside_and_inside_of_a_compiled_function(where, recipe, grad):
    module = linear()
    x = awkward(4, 32).requires_grad_(grad)

    def call(x: torch.Tensor) -> torch.Tensor:
        with lowp.autocast(enabled=recipe is not None, recipe=recipe):
            return module(x)

    class Inside(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return call(x) + 0.0

    with torch.set_grad_enabled(grad):
        expected = call(x)
        if where == "outside":
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            with lowp.autocast(enabled=recipe is not None, recipe=recipe):
                actual = compiled(x)
        else:
            compiled = torch.compile(Inside() if "module" in where else call, fullgraph=True, backend="aot_eager")
            actual = compiled(x)
    assert torch.equal(actual, expected)
    assert lowp.current_recipe() is None
    if grad:
        gradients = [torch.autograd.grad(y.sum(), [x, module.weight]) for y in (actual, expected)]
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_nested_autocast_inside_of_a_compiled_function():
    module = linear()
    x = awkward(4, 32)

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with lowp.autocast(recipe=POWER_2):
            a = module(x)
            with lowp.autocast(enabled=False):
                b = module(x)
            c = module(x)
        return a, b, c, module(x)

    expected = call(x)
    actual = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert torch.equal(expected[0], expected[2])
    assert not torch.equal(expected[0], expected[1])
    assert torch.equal(expected[1], expected[3])


def test_backward_uses_the_recipe_of_its_forward():
    module, x = linear(), awkward(4, 32).requires_grad_()
    with lowp.autocast(recipe=POWER_2):
        y = module(x)
        (expected,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    with lowp.autocast(recipe=Float8CurrentScaling(amax_epsilon=100.0)):
        (actual,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(actual, expected)


FIELDS = [
    DEFAULT,
    POWER_2,
    Float8CurrentScaling(amax_epsilon=0.5),
    Float8CurrentScaling(amax_epsilon=0.25),
    Float8CurrentScaling(fp8_gemm_dgrad=MMParams(use_split_accumulator=False)),
    Float8CurrentScaling(backward_override="dequantized"),
    None,
]


@pytest.mark.parametrize("where", ["context", "module"])
def test_a_changed_recipe_is_noticed_and_an_earlier_one_returns_to_its_graph(where):
    module = lowp.ops.Sequential(linear())
    graphs = CompileCounter()
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    x = awkward(4, 32).requires_grad_()

    def step(call: Any, recipe: Float8CurrentScaling | None) -> list[torch.Tensor]:
        module.recipe = recipe if where == "module" else None
        with lowp.autocast(enabled=recipe is not None and where == "context", recipe=recipe):
            y = call(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]

    for count, recipe in enumerate(FIELDS, start=1):
        actual, expected = step(compiled, recipe), step(module, recipe)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        assert graphs.frame_count == count
    for recipe in FIELDS[::-1]:
        again = None if recipe is None else eval(repr(recipe), vars(lowp.recipe))  # an equal recipe, not the same
        actual, expected = step(compiled, again), step(module, recipe)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert graphs.frame_count == len(FIELDS)
