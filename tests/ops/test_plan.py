"""Plans, printed: what runs fused, and why a rule doesn't apply; and the contract that lets plans mix fusions."""

import inspect

import pytest
import torch

import lowp
from lowp import ops
from lowp.ops import plan as planning
from tests.ops import oracle
from tests.ops.exact import exact, exact_
from tests.ops.pipelines import same, step

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
    "nothing": (list, "recipe   high precision"),
}


@pytest.mark.parametrize("name", PLANS)
def test_printed_plans(name):
    build, expected = PLANS[name]
    assert ops.Sequential(*build()).plan == inspect.cleandoc(expected)


def test_quantize_is_in_the_plan_under_a_recipe():
    pipeline = ops.Sequential(linear(), ops.Quantize(backward=True), bias(), recipe=oracle.E4M3)
    assert pipeline.plan == inspect.cleandoc("""
        recipe   Float8CurrentScaling(fp8_format=Format.E4M3)
        forward  BasicLinear[0] -> Quantize[1] -> Bias[2]
        backward Bias[2] -> Quantize[1] -> BasicLinear[0]
    """)


def test_the_plan_is_that_of_the_recipe_in_force():
    pipeline = ops.Sequential(ops.Quantize(), linear())
    assert "Quantize" not in pipeline.plan
    with lowp.autocast():
        assert "forward  Quantize[0] -> BasicLinear[1]" in pipeline.plan


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
        return group.prepare(torch.zeros(2, 8, dtype=dtype), list(pipeline.parameters()), (), recipe, None)

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
def rules(monkeypatch):
    """The list of rules, to change inside a test."""
    changed = list(planning._RULES)
    monkeypatch.setattr(planning, "_RULES", changed)
    return changed


def test_the_longest_rule_wins_then_the_latest(rules):
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


def test_a_rule_that_does_not_apply_leaves_room_for_the_next(rules):
    triple = type("Triple", (ops.FusedOperation,), {"fuses": (ops.BasicLinear, ops.Bias, ops.Bias)})
    ops.register_fusion(ops.FusionRule("forward", triple, lambda window: "not today"))
    assert ops.Sequential(linear(), bias(), bias()).plan == inspect.cleandoc("""
        recipe   high precision
        forward  ForwardLinearBias[0..1] -> Bias[2]
        backward Bias[2] -> Bias[1] -> BasicLinear[0]
        forward  without Triple[0]: not today
    """)


# ---- the contract of fused operations

BUILD = {
    ops.BasicLinear: lambda device: ops.BasicLinear(16, 16, device=device, dtype=BF16),
    ops.Bias: lambda device: ops.Bias(16, device=device, dtype=BF16),
}
"""How to build a basic operation of each type that a rule names: a new rule needs its types here."""


def with_rules(monkeypatch, rules, basic_ops, recipe):
    monkeypatch.setattr(planning, "_RULES", rules)
    return ops.Sequential(*basic_ops, recipe=recipe)


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("index", range(len(planning._RULES)), ids=lambda i: planning._RULES[i].fused.__name__)
def test_fused_and_unfused_operations_read_each_others_contexts(index, recipe, monkeypatch, device):
    """A rule used in its direction alone, the other direction unfused, gives what no fusion at all gives."""
    rule, recipe = planning._RULES[index], oracle.RECIPES[recipe]
    basic_ops = [BUILD[kind](device) for kind in rule.fused.fuses]
    for op in basic_ops:
        for parameter in op.parameters():
            exact_(parameter)
    x = exact(8, 16, device=device, requires_grad=True)
    unfused = with_rules(monkeypatch, [], basic_ops, recipe)
    fused = with_rules(monkeypatch, [rule], basic_ops, recipe)
    (step_of_rule,) = getattr(fused._groups[0].plan(BF16, None, recipe)[1], rule.direction)
    assert type(step_of_rule.op) is rule.fused
    assert rule.fused.__name__ not in unfused.plan
    dy = exact(*unfused(x).shape, device=device)
    assert same(step(fused, fused, x, dy), step(unfused, unfused, x, dy))


@pytest.mark.parametrize("index", range(len(planning._RULES)), ids=lambda i: planning._RULES[i].fused.__name__)
def test_fused_operations_write_the_same_contexts(index, monkeypatch, device):
    """Attribute for attribute and tensor for tensor, whoever writes them."""
    from lowp.ops.pipeline import run_forward

    rule = planning._RULES[index]
    if rule.direction != "forward":
        return
    basic_ops = [BUILD[kind](device) for kind in rule.fused.fuses]
    for op in basic_ops:
        for parameter in op.parameters():
            exact_(parameter)
    x = exact(8, 16, device=device, requires_grad=True)
    written = []
    for rules in ([rule], []):
        (group,) = with_rules(monkeypatch, rules, basic_ops, oracle.HYBRID)._groups
        parameters = [parameter for op in basic_ops for parameter in op.own_parameters()]
        call = group.prepare(x, parameters, (), oracle.HYBRID, None)
        _, _, ctxs = run_forward(call, x, parameters)
        written.append(ctxs)
    for fused, unfused in zip(*written, strict=True):
        contents, others = vars(fused), vars(unfused)
        assert contents.keys() == others.keys()
        assert same(list(contents.pop("to_save")), list(others.pop("to_save")))
        assert contents == others
