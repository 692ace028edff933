"""Norms, activations and dropout hand quantized values to the layer that reads them, made from their source."""

import pytest
import torch

import lowp
from lowp import ops
from tests.ops import oracle
from tests.ops.graphs import CountOps, Graphs, lowp_ops, saved_tensors
from tests.ops.pipelines import BOUNDARIES, compiled, rules, same, same_or_absent, step, step_of

BF16 = torch.bfloat16
K = 32

PRODUCERS = {
    "layer": lambda d, dtype: ops.LayerNorm(K, device=d, dtype=dtype),
    "rms": lambda d, dtype: ops.RMSNorm(K, device=d, dtype=torch.float32, zero_centered_gamma=True),
    "rms without weight": lambda d, dtype: ops.RMSNorm(K, elementwise_affine=False),
    "l2": lambda d, dtype: ops.L2Normalization(),
    "gelu": lambda d, dtype: ops.GELU(),
    "dropout": lambda d, dtype: ops.Dropout(),
}
"""What is in front of a layer; gated activations are in test_activations.py."""


def build(producer, device, recipe, dtype=BF16, bias=True):
    steps = [PRODUCERS[producer](device, dtype), ops.BasicLinear(K, 48, device=device, dtype=dtype)]
    if bias:
        steps.append(ops.Bias(48, device=device, dtype=dtype))
    module = ops.Sequential(*steps, recipe=oracle.RECIPES[recipe])
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def one_by_one(module):
    return torch.nn.Sequential(*[ops.Sequential(op, recipe=module.recipe) for op in module])


def batch(device, dtype=BF16):
    return torch.randn(3, 7, K, device=device, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("producer", PRODUCERS)
def test_bit_for_bit_the_operations_one_by_one(producer, recipe, dtype, device):
    module = build(producer, device, recipe, dtype, bias=False)
    x = batch(device, dtype)
    for _ in range(3):
        assert same(step_of(module, module, [x]), step_of(one_by_one(module), module, [x]))


@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("recipe", oracle.SETTINGS)
def test_every_setting_of_the_recipe(recipe, producer, device):
    module = build(producer, device, "none", bias=False)
    module.recipe = oracle.SETTINGS[recipe]
    x = batch(device)
    assert same(step_of(module, module, [x]), step_of(one_by_one(module), module, [x]))


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_gradients_on_and_off(recipe, wanted, device):
    """Of the input and of the layer's weight: without wgrad nothing is kept, and any override is handed codes."""
    module = build("rms", device, recipe, bias=False)
    x = batch(device)
    x.requires_grad_(wanted[0])
    module[1].weight.requires_grad_(wanted[1])
    assert same(step_of(module, module, [x]), step_of(one_by_one(module), module, [x]))
    if recipe == "high_precision":
        with CountOps() as counted:
            module(x)
        assert counted.computed["cast"] == (not wanted[1]), "wgrad reads the values as they are"


def test_inference(device):
    module = build("layer", device, "hybrid")
    x = batch(device)
    expected = step(module, module, x)[0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(module(x.detach()), expected)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize(("producer", "recipe"), [("layer", "hybrid"), ("rms", "dequantized"), ("gelu", "hybrid")])
def test_compiled(producer, recipe, boundary, device):
    module = build(producer, device, recipe)
    x = batch(device)
    assert same_or_absent(step(compiled(module, boundary=boundary), module, x), step(module, module, x))


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_inductor(boundary, device):
    module = ops.Sequential(
        *build("layer", device, "none"), ops.GLU(), ops.BasicLinear(24, 16, device=device, dtype=BF16)
    )
    module.recipe = oracle.HYBRID
    x = batch(device)
    assert same_or_absent(step(compiled(module, "inductor", boundary), module, x), step(module, module, x))


def test_nodes(device):
    module, graphs = build("rms", device, "hybrid"), Graphs()
    step(graphs.compile(module), module, batch(device))
    assert lowp_ops(graphs.forward[0]) == ["Normalization_forward", "ForwardLinearBias_forward"]
    assert lowp_ops(graphs.backward[0]) == ["Bias_backward", "BasicLinear_backward", "Normalization_backward"]


def test_what_runs(device):
    """One pass over the input for statistics and amax, one for the codes; the normalized values are never written."""
    module = build("rms", device, "hybrid")
    with CountOps() as counted:
        module(batch(device))
    assert dict(counted.counts) == {"norm_forward": 1, "cast": 2, "scaled_gemm": 1}
    assert counted.computed["cast"] == 1


def test_what_does_nothing_is_looked_through(device):
    """Forward and backward: nothing is written in high precision on the way."""
    layers = [ops.BasicLinear(K, K, device=device, dtype=BF16) for _ in range(2)]
    module = ops.Sequential(
        layers[0], ops.Identity(), ops.Dropout().eval(), ops.GELU(), ops.Dropout(0.0), ops.Identity(), layers[1],
        recipe=oracle.HYBRID,
    )  # fmt: skip
    with CountOps() as counted:
        step(module, module, batch(device))
    assert counted.counts["materialize"] == 0
    assert counted.counts["cast"] == 2 * 4, "in each direction, two operands of each layer"


@pytest.mark.parametrize(
    ("recipe", "normalized"), [("hybrid", 0), ("dequantized", 0), ("high_precision", 1), ("none", 1)]
)
def test_what_is_saved(recipe, normalized, device):
    """The layer keeps codes of the normalized values, or, where the recipe says so, the values themselves."""
    module = build("rms", device, recipe)
    x = batch(device)
    with saved_tensors() as saved:
        module(x)
    wide = [t for t in saved if t.dtype == BF16 and t.shape[-1] == K and t.ndim == 3 and t.data_ptr() != x.data_ptr()]
    assert len(wide) == normalized
    codes = [t for t in saved if t.dtype == torch.float8_e4m3fn]
    assert len(codes) == (recipe in ("hybrid", "dequantized"))


@pytest.mark.parametrize("producer", ["layer", "gelu", "dropout"])
@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_a_size_that_does_not_fit_is_the_layers_error(recipe, producer, device):
    module = ops.Sequential(
        PRODUCERS[producer](device, BF16), ops.BasicLinear(K + 16, 8, device=device, dtype=BF16),
        recipe=oracle.RECIPES[recipe],
    )  # fmt: skip
    with pytest.raises(ValueError, match="BasicLinear: the last axis of the input must have 48 elements"):
        module(batch(device))


def test_under_torch_autocast_the_handed_values_are_those_of_its_dtype(device):
    module = build("layer", device, "hybrid", torch.float32)
    x = batch(device, torch.float32)
    with torch.autocast(device, dtype=BF16):
        results = step(module, module, x)
        assert same(results, step(one_by_one(module), module, x)) or results[0].dtype == BF16
        alone = one_by_one(ops.Sequential(*module[:2], recipe=module.recipe))
        assert torch.equal(ops.Sequential(*module[:2], recipe=module.recipe)(x), alone(x))


def test_several_normalized_axes_are_handed_over_in_high_precision(device):
    module = ops.Sequential(
        ops.LayerNorm((7, K), device=device, dtype=BF16), ops.BasicLinear(K, 16, device=device, dtype=BF16),
        recipe=oracle.HYBRID,
    )  # fmt: skip
    x = batch(device)
    assert same(step(module, module, x), step(one_by_one(module), module, x))


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_a_bias_that_promotes_rounds_its_gradient_before_it_is_quantized(recipe, device):
    """A bf16 product, an fp32 bias: the sum's gradient is fp32, the product's bf16."""
    module = ops.Sequential(
        ops.BasicLinear(K, 48, device=device, dtype=BF16), ops.Bias(48, device=device), recipe=oracle.RECIPES[recipe]
    )
    x, dy = batch(device), torch.randn(3, 7, 48, device=device)
    assert same(step(module, module, x, dy), step(one_by_one(module), module, x, dy))


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
@pytest.mark.parametrize("call", ["eager", "operation"])
@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_a_residual_branch_with_a_norm(used, call, kind, recipe, device):
    """MakeExtraOutput and a norm are one operation in backward, which leaves both gradients alone."""
    if call != "eager" and (recipe != "hybrid" or kind != "rms"):
        return
    with rules(lambda rule: "Linear" not in rule.fused.__name__):
        module = ops.Sequential(
            ops.MakeExtraOutput(), *build(kind, device, recipe, bias=False), recipe=oracle.RECIPES[recipe]
        )
    assert "BackwardNormAdd[0..1]" in module.plan
    with rules(lambda rule: False):
        unfused = ops.Sequential(*module, recipe=module.recipe)
    x = batch(device)
    grads = [
        torch.randn(3, 7, size, device=device, dtype=BF16) if use else None
        for size, use in zip((48, K), used, strict=True)
    ]
    kept = [None if dy is None else dy.clone() for dy in grads]
    run = module if call == "eager" else compiled(module)
    for _ in range(3):
        assert same_or_absent(step_of(run, module, [x], grads), step_of(unfused, unfused, [x], grads))
    assert same(grads, kept)


def test_a_user_class_that_changes_a_pass_is_not_fused(device):
    class Doubled(ops.GELU):
        @classmethod
        def forward_compute(cls, args, *, in_custom_op=False):
            output, extra, aux = super().forward_compute(args, in_custom_op=in_custom_op)
            return 2 * output, extra, aux

    class Renamed(ops.GELU):
        def __init__(self):
            super().__init__()

    pipelines = [ops.Sequential(ops.Bias(8, device=device), op()) for op in (Doubled, Renamed)]
    assert ["BackwardBiasActivation" in pipeline.plan for pipeline in pipelines] == [False, True]
    x = torch.randn(4, 8, device=device)
    assert torch.equal(pipelines[0](x), 2 * pipelines[1](x))
    assert lowp.current_recipe() is None
