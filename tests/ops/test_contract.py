"""The contract that lets plans mix fusions: fused and unfused operations read and write each other's contexts."""

import pytest
import torch

from lowp import ops
from lowp.ops import plan as planning
from lowp.ops.basic.normalization import Normalization
from lowp.ops.pipeline import run_forward
from tests.ops import oracle
from tests.ops.exact import exact, exact_
from tests.ops.pipelines import rules, same, step_of

BF16 = torch.bfloat16

BUILD = {
    ops.BasicLinear: lambda device: ops.BasicLinear(16, 16, device=device, dtype=BF16),
    ops.Bias: lambda device: ops.Bias(16, device=device, dtype=BF16),
    ops.AddExtraInput: lambda device: ops.AddExtraInput(),
    ops.ConstantScale: lambda device: ops.ConstantScale(-2.0),
    ops.MakeExtraOutput: lambda device: ops.MakeExtraOutput(),
    ops.Activation: lambda device: ops.GELU(),
    Normalization: lambda device: ops.RMSNorm(16, device=device, dtype=BF16),
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
        call = group.prepare([x, *parameters, *extra_inputs], self.recipe, None)
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
