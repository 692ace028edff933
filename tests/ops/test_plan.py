"""Plans, printed: what runs fused, and why a rule doesn't apply; and the contract that lets plans mix fusions."""

import inspect

import pytest
import torch

import lowp
from lowp import ops
from lowp.ops import plan as planning
from lowp.ops.pipeline import run_forward
from tests.ops import oracle
from tests.ops.exact import exact, exact_
from tests.ops.pipelines import rules, same, step_of

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


# ---- the contract of fused operations

BUILD = {
    ops.BasicLinear: lambda device: ops.BasicLinear(16, 16, device=device, dtype=BF16),
    ops.Bias: lambda device: ops.Bias(16, device=device, dtype=BF16),
    ops.AddExtraInput: lambda device: ops.AddExtraInput(),
    ops.ConstantScale: lambda device: ops.ConstantScale(-2.0),
    ops.MakeExtraOutput: lambda device: ops.MakeExtraOutput(),
}
"""How to build a basic operation of each type that a rule names: a new rule needs its types here."""


NAMES = {"argvalues": range(len(planning._RULES)), "ids": lambda i: planning._RULES[i].fused.__name__}


class Contract:
    """The operations of a rule's pattern, fused by this rule alone and not fused, and exact tensors for a step."""

    def __init__(self, index, recipe, device):
        self.rule, self.recipe = planning._RULES[index], recipe
        self.ops = [BUILD[kind](device) for kind in self.rule.fused.fuses]
        for op in self.ops:
            for parameter in op.parameters():
                exact_(parameter)
        with rules(lambda rule: False):
            self.unfused = ops.Sequential(*self.ops, recipe=recipe)
        with rules(lambda rule: rule is self.rule):
            self.fused = ops.Sequential(*self.ops, recipe=recipe)
        count = 1 + sum(op.num_extra_inputs for op in self.ops)
        self.tensors = [exact(8, 16, device=device, requires_grad=True) for _ in range(count)]
        outputs = self.unfused(*self.tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self.grads = [exact(*y.shape, device=device) for y in outputs]

    def step(self, pipeline, grads=None):
        return step_of(pipeline, pipeline, self.tensors, grads or self.grads)

    def contexts(self, pipeline):
        """What a forward leaves for its backward."""
        (group,) = pipeline._groups
        x, *extra_inputs = self.tensors
        parameters = [parameter for op in self.ops for parameter in op.own_parameters()]
        call = group.prepare(x, parameters, tuple(extra_inputs), self.recipe, None)
        return run_forward(call, x, [*parameters, *extra_inputs])[2]


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("index", **NAMES)
def test_fused_and_unfused_operations_read_each_others_contexts(index, recipe, device):
    """A rule used in its direction alone, the other direction unfused, gives what no fusion at all gives."""
    contract = Contract(index, oracle.RECIPES[recipe], device)
    name = contract.rule.fused.__name__
    (step_of_rule,) = getattr(contract.fused._groups[0].plan(BF16, None, contract.recipe)[1], contract.rule.direction)
    assert type(step_of_rule.op) is contract.rule.fused
    assert name not in contract.unfused.plan
    assert same(contract.step(contract.fused), contract.step(contract.unfused))
    for index in range(len(contract.grads)):
        used = [dy if index == at else None for at, dy in enumerate(contract.grads)]
        assert same(contract.step(contract.fused, used), contract.step(contract.unfused, used))


@pytest.mark.parametrize("frozen", range(3))
@pytest.mark.parametrize("index", **NAMES)
def test_the_contract_holds_for_any_gradients(index, frozen, device):
    contract = Contract(index, oracle.HYBRID, device)
    leaves = [*contract.tensors, *contract.fused.parameters()]
    for at, leaf in enumerate(leaves):
        leaf.requires_grad_(at % 3 != frozen)
    assert same(contract.step(contract.fused), contract.step(contract.unfused))


@pytest.mark.parametrize("recipe", ["none", "hybrid", "dequantized"])
@pytest.mark.parametrize("index", **NAMES)
def test_fused_operations_write_the_same_contexts(index, recipe, device):
    """Attribute for attribute and tensor for tensor, whoever writes them."""
    contract = Contract(index, oracle.RECIPES[recipe], device)
    written = [contract.contexts(pipeline) for pipeline in (contract.fused, contract.unfused)]
    for fused, unfused in zip(*written, strict=True):
        contents, others = vars(fused), vars(unfused)
        assert contents.keys() == others.keys()
        assert same(list(contents.pop("to_save")), list(others.pop("to_save")))
        assert contents == others
