"""Plans, printed: what runs fused, what is handed over quantized, and why a rule doesn't apply."""

import inspect

import pytest
import torch

import lowp
from lowp import ops
from lowp.ops import plan as planning
from tests.ops import oracle

BF16 = torch.bfloat16


def linear(in_features=8, out_features=8, dtype=torch.float32):
    return ops.BasicLinear(in_features, out_features, dtype=dtype)


def bias(size=8, dtype=torch.float32):
    return ops.Bias(size, dtype=dtype)


PROMOTED = "the sum of torch.bfloat16 and a bias of torch.float32 has another dtype than the product"
PLANS = {
    "linear and bias": (
        lambda: [linear(), bias()],
        """
        recipe   high precision
        forward  ForwardLinearBias[0..1]
        backward Bias[1] -> BasicLinear[0]
        """,
    ),
    "two layers": (
        lambda: [linear(), bias(), linear(), bias()],
        """
        recipe   high precision
        forward  ForwardLinearBias[0..1] -> ForwardLinearBias[2..3]
        backward Bias[3] -> BasicLinear[2] -> Bias[1] -> BasicLinear[0]
        """,
    ),
    "one operation": (
        lambda: [bias()],
        """
        recipe   high precision
        forward  Bias[0]
        backward Bias[0]
        """,
    ),
    "bias first": (
        lambda: [bias(), linear()],
        """
        recipe   high precision
        forward  Bias[0] -> BasicLinear[1]
        backward BasicLinear[1] -> Bias[0]
        """,
    ),
    "fp32 bias on a bf16 product": (
        lambda: [linear(dtype=BF16), bias()],
        f"""
        recipe   high precision
        forward  BasicLinear[0] -> Bias[1]
        backward Bias[1] -> BasicLinear[0]
        forward  without ForwardLinearBias[0]: {PROMOTED}
        """,
    ),
    "bf16 bias on a fp32 product": (
        lambda: [linear(), bias(dtype=BF16)],
        """
        recipe   high precision
        forward  ForwardLinearBias[0..1]
        backward Bias[1] -> BasicLinear[0]
        """,
    ),
    "a bias of another size": (
        lambda: [linear(), bias(1)],
        """
        recipe   high precision
        forward  BasicLinear[0] -> Bias[1]
        backward Bias[1] -> BasicLinear[0]
        forward  without ForwardLinearBias[0]: the bias has 1 elements for 8 features
        """,
    ),
    "identity between": (
        lambda: [linear(), ops.Identity(), bias()],
        """
        recipe   high precision
        forward  BasicLinear[0] -> Bias[2]
        backward Bias[2] -> BasicLinear[0]
        """,
    ),
    "identities around": (
        lambda: [ops.Identity(), linear(), bias(), ops.Identity()],
        """
        recipe   high precision
        module   Identity
        forward  ForwardLinearBias[0..1]
        backward Bias[1] -> BasicLinear[0]
        module   Identity
        """,
    ),
    "reshape between": (
        lambda: [linear(), ops.Reshape((-1, 8)), bias()],
        """
        recipe   high precision
        forward  BasicLinear[0] -> Reshape[1] -> Bias[2]
        backward Bias[2] -> Reshape[1] -> BasicLinear[0]
        """,
    ),
    "quantize between": (
        lambda: [linear(), ops.Quantize(), bias()],
        """
        recipe   high precision
        forward  BasicLinear[0] -> Bias[2]
        backward Bias[2] -> BasicLinear[0]
        """,
    ),
    "quantize before": (
        lambda: [ops.Quantize(), linear(), bias()],
        """
        recipe   high precision
        forward  ForwardLinearBias[1..2]
        backward Bias[2] -> BasicLinear[1]
        """,
    ),
    "a plain module between": (
        lambda: [linear(), torch.nn.ReLU(), bias(), linear(), bias()],
        """
        recipe   high precision
        forward  BasicLinear[0]
        backward BasicLinear[0]
        module   ReLU
        forward  Bias[0] -> ForwardLinearBias[1..2]
        backward Bias[2] -> BasicLinear[1] -> Bias[0]
        """,
    ),
    "linear, bias and add": (
        lambda: [linear(), bias(), ops.AddExtraInput()],
        """
        recipe   high precision
        forward  ForwardLinearBiasAdd[0..2]
        backward AddExtraInput[2] -> Bias[1] -> BasicLinear[0]
        """,
    ),
    "linear, scale and add": (
        lambda: [linear(), ops.ConstantScale(0.5), ops.AddExtraInput()],
        """
        recipe   high precision
        forward  ForwardLinearScaleAdd[0..2]
        backward AddExtraInput[2] -> ConstantScale[1] -> BasicLinear[0]
        """,
    ),
    "linear, bias, scale and add": (
        lambda: [linear(), bias(), ops.ConstantScale(0.5), ops.AddExtraInput()],
        """
        recipe   high precision
        forward  ForwardLinearBias[0..1] -> ConstantScale[2] -> AddExtraInput[3]
        backward AddExtraInput[3] -> ConstantScale[2] -> Bias[1] -> BasicLinear[0]
        """,
    ),
    "a bias that doesn't fit before an add": (
        lambda: [linear(), bias(1), ops.AddExtraInput()],
        """
        recipe   high precision
        forward  BasicLinear[0] -> Bias[1] -> AddExtraInput[2]
        backward AddExtraInput[2] -> Bias[1] -> BasicLinear[0]
        forward  without ForwardLinearBiasAdd[0]: the bias has 1 elements for 8 features
        forward  without ForwardLinearBias[0]: the bias has 1 elements for 8 features
        """,
    ),
    "a residual branch": (
        lambda: [ops.MakeExtraOutput(), linear(), bias(), linear(), ops.AddExtraInput()],
        """
        recipe   high precision
        forward  MakeExtraOutput[0] -> ForwardLinearBias[1..2] -> ForwardLinearAdd[3..4]
        backward AddExtraInput[4] -> BasicLinear[3] -> Bias[2] -> BackwardLinearAdd[0..1]
        """,
    ),
    "scale before and after": (
        lambda: [ops.ConstantScale(0.5), linear(), ops.ConstantScale(0.5), linear()],
        """
        recipe   high precision
        forward  ConstantScale[0] -> BasicLinear[1] -> ConstantScale[2] -> BasicLinear[3]
        backward BackwardLinearScale[2..3] -> BackwardLinearScale[0..1]
        """,
    ),
    "nothing": (list, "recipe   high precision"),
}


@pytest.mark.parametrize("name", PLANS)
def test_printed_plans(name):
    build, expected = PLANS[name]
    assert ops.Sequential(*build()).plan == inspect.cleandoc(expected)


QUANTIZED_PLANS = {
    "norm, linear, gated activation, linear": (
        lambda: [ops.RMSNorm(8), linear(), bias(), ops.SwiGLU(), linear(4)],
        """
        forward  RMSNorm[0] =E4M3=> ForwardLinearBias[1..2] -> SwiGLU[3] =E4M3=> BasicLinear[4]
        backward BasicLinear[4] -> BackwardBiasActivation[2..3] =E5M2=> BasicLinear[1] -> RMSNorm[0]
        """,
    ),
    "no bias": (
        lambda: [linear(), ops.GELU(), linear()],
        """
        forward  BasicLinear[0] -> GELU[1] =E4M3=> BasicLinear[2]
        backward BasicLinear[2] -> GELU[1] =E5M2=> BasicLinear[0]
        """,
    ),
    "a residual branch": (
        lambda: [ops.MakeExtraOutput(), ops.LayerNorm(8), linear(), bias(), ops.Dropout(), ops.AddExtraInput()],
        """
        forward  MakeExtraOutput[0] -> LayerNorm[1] =E4M3=> ForwardLinearBias[2..3] -> Dropout[4] -> AddExtraInput[5]
        backward AddExtraInput[5] -> Dropout[4] -> Bias[3] =E5M2=> BasicLinear[2] -> BackwardNormAdd[0..1]
        """,
    ),
    "dropout next to layers": (
        lambda: [linear(), ops.Dropout(), linear()],
        """
        forward  BasicLinear[0] -> Dropout[1] =E4M3=> BasicLinear[2]
        backward BasicLinear[2] -> Dropout[1] =E5M2=> BasicLinear[0]
        """,
    ),
    "what does nothing is looked through": (
        lambda: [linear(), ops.GELU(), ops.Identity(), ops.Dropout().eval(), linear()],
        """
        forward  BasicLinear[0] -> GELU[1] =E4M3=> BasicLinear[4]
        backward BasicLinear[4] -> GELU[1] =E5M2=> BasicLinear[0]
        """,
    ),
    "nobody asks": (
        lambda: [ops.GELU(), ops.RMSNorm(8), ops.ConstantScale(2.0), linear()],
        """
        forward  GELU[0] -> RMSNorm[1] -> ConstantScale[2] -> BasicLinear[3]
        backward BackwardLinearScale[2..3] -> RMSNorm[1] -> GELU[0]
        """,
    ),
    "several normalized axes": (
        lambda: [ops.LayerNorm((2, 8)), linear()],
        """
        forward  LayerNorm[0] -> BasicLinear[1]
        backward BasicLinear[1] -> LayerNorm[0]
        """,
    ),
    "quantize": (
        lambda: [linear(), ops.Quantize(backward=True), bias()],
        """
        forward  BasicLinear[0] -> Quantize[1] -> Bias[2]
        backward Bias[2] -> Quantize[1] =E5M2=> BasicLinear[0]
        """,
    ),
    "a bias that promotes": (
        lambda: [linear(dtype=BF16), bias(), ops.GELU()],
        f"""
        forward  BasicLinear[0] -> Bias[1] -> GELU[2]
        backward GELU[2] -> Bias[1] -> BasicLinear[0]
        forward  without ForwardLinearBias[0]: {PROMOTED}
        backward without BackwardBiasActivation[1]: the bias promotes torch.bfloat16 to torch.float32
        """,
    ),
}


@pytest.mark.parametrize("name", QUANTIZED_PLANS)
def test_printed_plans_under_a_recipe(name):
    build, expected = QUANTIZED_PLANS[name]
    pipeline = ops.Sequential(*build(), recipe=oracle.HYBRID)
    assert pipeline.plan == inspect.cleandoc(f"recipe   Float8CurrentScaling()\n{inspect.cleandoc(expected)}")


def test_who_needs_high_precision_too_is_handed_it():
    """An override that keeps the operands of fprop is handed quantized values; one that keeps the originals is not."""
    pipeline = ops.Sequential(ops.RMSNorm(8), linear(), recipe=oracle.DEQUANTIZED_BACKWARD)
    assert "RMSNorm[0] =E4M3=> BasicLinear[1]" in pipeline.plan
    pipeline.recipe = oracle.HIGH_PRECISION_BACKWARD
    assert "RMSNorm[0] -> BasicLinear[1]" in pipeline.plan


def test_the_plan_is_that_of_the_recipe_in_force():
    pipeline = ops.Sequential(ops.Quantize(), linear())
    assert "Quantize" not in pipeline.plan
    with lowp.autocast():
        assert "forward  Quantize[0] =E4M3=> BasicLinear[1]" in pipeline.plan


def test_autocast_changes_the_plan(device):
    """Under torch.autocast(bf16) the product is bf16, and its sum with a bias of fp32 is not."""
    pipeline = ops.Sequential(linear().to(device), bias().to(device))
    (group,) = pipeline._groups
    _, outside = group.plan(torch.float32, None, None)
    _, inside = group.plan(torch.float32, BF16, None)
    assert [len(plan.forward) for plan in (outside, inside)] == [1, 2]


def test_calls_are_remembered_by_dtype_recipe_and_gradients():
    pipeline = ops.Sequential(linear(), bias())
    (group,) = pipeline._groups

    def prepare(dtype=torch.float32, recipe=None):
        return group.prepare([torch.zeros(2, 8, dtype=dtype), *pipeline.parameters()], recipe, None)

    first = prepare()
    assert prepare() is first
    assert prepare(BF16) is not first
    assert prepare(recipe=oracle.HYBRID) is not first
    pipeline[0].weight.requires_grad_(False)
    assert prepare() is not first
    pipeline[0].weight.requires_grad_(True)
    pipeline[1].bias = torch.nn.Parameter(torch.zeros(8, dtype=BF16))
    assert prepare() is not first


@pytest.mark.parametrize(
    ("direction", "fuses", "message"),
    [
        ("sideways", (ops.BasicLinear, ops.Bias), "direction must be"),
        ("forward", (ops.Bias,), "two operations or more"),
    ],
)
def test_rules_are_checked(direction, fuses, message):
    fused = type("Fused", (ops.FusedOperation,), {"fuses": fuses})
    with pytest.raises(ValueError, match=message):
        ops.register_fusion(ops.FusionRule(direction, fused))


@pytest.fixture
def _forgotten_rules(monkeypatch):
    """Forgets, after the test, the rules that it registers."""
    monkeypatch.setattr(planning, "_RULES", list(planning._RULES))


@pytest.mark.usefixtures("_forgotten_rules")
def test_the_longest_rule_wins_then_the_latest():
    pair = type("Pair", (ops.FusedOperation,), {"fuses": (ops.BasicLinear, ops.Bias)})
    triple = type("Triple", (ops.FusedOperation,), {"fuses": (ops.BasicLinear, ops.Bias, ops.Bias)})
    ops.register_fusion(ops.FusionRule("forward", triple))
    ops.register_fusion(ops.FusionRule("forward", pair))
    ops.register_fusion(ops.FusionRule("backward", pair))
    assert ops.Sequential(linear(), bias(), bias()).plan == inspect.cleandoc("""
        recipe   high precision
        forward  Triple[0..2]
        backward Bias[2] -> Pair[0..1]
    """)
    assert "forward  Pair[0..1]" in ops.Sequential(linear(), bias()).plan


@pytest.mark.usefixtures("_forgotten_rules")
def test_a_rule_that_does_not_apply_leaves_room_for_the_next():
    triple = type("Triple", (ops.FusedOperation,), {"fuses": (ops.BasicLinear, ops.Bias, ops.Bias)})
    ops.register_fusion(ops.FusionRule("forward", triple, lambda window: "not today"))
    assert ops.Sequential(linear(), bias(), bias()).plan == inspect.cleandoc("""
        recipe   high precision
        forward  ForwardLinearBias[0..1] -> Bias[2]
        backward Bias[2] -> Bias[1] -> BasicLinear[0]
        forward  without Triple[0]: not today
    """)
