"""BasicLinear over the shapes, dtypes, recipes and main_grad settings that users combine."""

import pytest
import torch

import lowp
from lowp import ops
from tests.ops import oracle
from tests.ops.exact import exact, exact_
from tests.ops.graphs import CountOps, saved_tensors
from tests.ops.pipelines import BOUNDARIES, compiled, linear_bias, same, step

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WEIGHTS = [(64, 32), (3, 5), (128, 128)]
INPUTS = [(-1,), (5, 1, -1), (4, 2, 4, -1), (128, -1)]


def input_of(shape, features, dtype, device):
    return torch.randn(*shape[:-1], features, device=device).to(dtype).requires_grad_()


def check_linear(weight, shape, dtype, recipe, main_grad, device, call=None):
    """One step of a BasicLinear alone, against the oracle."""
    N, K = weight
    module = ops.BasicLinear(K, N, device=device, dtype=dtype, accumulate_into_main_grad=main_grad)
    if main_grad:
        module.weight.main_grad = torch.full((N, K), 0.5, device=device)
    x = input_of(shape, K, dtype, device)
    dy = torch.randn(*shape[:-1], N, device=device).to(dtype)
    with lowp.autocast(enabled=recipe is not None, recipe=recipe):
        y, dx, dw = step(module if call is None else call(module), module, x, dy)
    reference = oracle.linear(x, module.weight, None, dy, recipe)
    reference.y.check(y, "y")
    reference.dx.check(dx, "dx")
    if main_grad:
        assert dw is None
        reference = oracle.linear(x.float(), module.weight.float(), None, dy.float(), recipe)
        if recipe is not None and recipe.backward_override == "dequantized":
            return  # its operands are rounded to `dtype`
        moved = oracle.Near(reference.dw.value + 0.5, reference.dw.bound + 2.0**-20)
        moved.check(module.weight.main_grad, "main_grad")
    else:
        reference.dw.check(dw, "dw")


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", INPUTS, ids=str)
@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_shapes(weight, shape, dtype, recipe, main_grad, device):
    check_linear(weight, shape, dtype, oracle.RECIPES[recipe], main_grad, device)


@pytest.mark.full
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", INPUTS, ids=str)
@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_shapes_compiled(weight, shape, dtype, recipe, main_grad, boundary):
    recipe = oracle.RECIPES[recipe]
    check_linear(weight, shape, dtype, recipe, main_grad, "cpu", lambda m: compiled(m, boundary=boundary))


OVERRIDDEN = [(3, 10, 32), (5, 3, 2, 32), (1, 1, 3, 32), (3, 32), (30, 32), (1, 30, 32)]


@pytest.mark.usefixtures("either_amax")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", OVERRIDDEN, ids=str)
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_override_is_bitwise_its_saved_operands(override, shape, dtype, with_bias, device):
    recipe = oracle.RECIPES[override]
    module = linear_bias(device=device, dtype=dtype, recipe=recipe)
    if not with_bias:
        del module[1]
    x, dy = input_of(shape, 32, dtype, device), torch.randn(*shape[:-1], 48, device=device).to(dtype)
    y, dx, dw, *db = step(module, module, x, dy)
    assert torch.equal(y, step(module, ops.Sequential(*module, recipe=oracle.HYBRID), x, dy)[0])
    dx_reference, dw_reference = oracle.override_gradients(x, module[0].weight, dy, recipe)
    assert torch.equal(dx, dx_reference)
    assert torch.equal(dw, dw_reference)
    for bias_grad in db:
        oracle.linear(x, module[0].weight, None, dy, recipe).db.check(bias_grad, "db")


@pytest.mark.parametrize("call", ["eager", "compiled"])
def test_recipes_change_between_steps(call, device):
    """Each step is what a fresh module gives under its recipe, in any order of recipes."""
    module = linear_bias(device=device, dtype=torch.bfloat16)
    run = compiled(module) if call == "compiled" else module
    x = input_of((30, 32), 32, torch.bfloat16, device)
    dy = torch.randn(30, 48, device=device).to(x.dtype)
    expected = {}
    for name, recipe in oracle.RECIPES.items():
        fresh = ops.Sequential(*module, recipe=recipe)
        expected[name] = step(fresh, module, x, dy)
    for name in ("none", "hybrid", "dequantized", "hybrid", "high_precision", "none", "e4m3", "dequantized"):
        recipe = oracle.RECIPES[name]
        within = lowp.autocast(enabled=recipe is not None, recipe=recipe)
        assert same(step(run, module, x, dy, within=within), expected[name]), name


@pytest.mark.parametrize("call", ["eager", "compiled"])
@pytest.mark.parametrize("order", ["train first", "inference first"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_and_inference_stages(mode, order, call, device):
    module = linear_bias(device=device, dtype=torch.bfloat16, recipe=oracle.HYBRID)
    run = compiled(module) if call == "compiled" else module
    x = input_of((30, 32), 32, torch.bfloat16, device)
    dy = torch.randn(30, 48, device=device).to(x.dtype)
    expected = step(module, module, x, dy)
    stages = ["train", "inference"] * 2
    for stage in stages if order == "train first" else reversed(stages):
        if stage == "train":
            assert same(step(run, module, x, dy), expected)
        else:
            with mode():
                y = run(x.detach())
            assert not y.requires_grad
            assert torch.equal(y, expected[0])


GEMMS = {"none": ("gemm", "gemm"), "hybrid": ("scaled_gemm", "scaled_gemm"), "high_precision": ("scaled_gemm", "gemm")}
GEMMS["dequantized"] = GEMMS["high_precision"]
"""The operators of fprop, and of dgrad and wgrad."""


@pytest.mark.parametrize("recipe", GEMMS)
@pytest.mark.parametrize("wanted", [(i, w, b) for i in (0, 1) for w in (0, 1) for b in (0, 1)], ids=str)
def test_only_wanted_gradients_cost_a_gemm(wanted, recipe, device):
    wanted_x, wanted_w, wanted_b = map(bool, wanted)
    module = linear_bias(device=device, dtype=torch.bfloat16, recipe=oracle.RECIPES[recipe])
    module[0].weight.requires_grad_(wanted_w)
    module[1].bias.requires_grad_(wanted_b)
    x = torch.randn(16, 32, device=device, dtype=torch.bfloat16).requires_grad_(wanted_x)
    fprop, backward = GEMMS[recipe]
    with CountOps() as forward:
        y = module(x)
    assert forward.counts[fprop] == 1
    assert forward.counts["gemm"] + forward.counts["scaled_gemm"] == 1
    assert y.requires_grad == any(wanted)
    if not any(wanted):
        return
    with CountOps() as counted:
        y.backward(torch.ones_like(y))
    assert counted.counts[backward] == wanted_x + wanted_w
    assert counted.counts["gemm"] + counted.counts["scaled_gemm"] == wanted_x + wanted_w
    grads = counted.counts["cast_bias_grad"] + counted.counts["bias_grad"]
    assert grads == wanted_b
    if recipe == "hybrid":
        casts = counted.counts["cast"] + counted.counts["cast_bias_grad"]
        assert casts == (wanted_x or wanted_w) + wanted_x, "the gradient once, and the weight for dgrad"
    for tensor, wish in ((x, wanted_x), (module[0].weight, wanted_w), (module[1].bias, wanted_b)):
        assert (tensor.grad is not None) == wish


def saved_by(recipe, wanted_x=True, wanted_w=True, device="cpu"):
    """The matrices that a Linear + Bias saves, its own weight left out; and the input, for comparison."""
    module = linear_bias(device=device, dtype=torch.bfloat16, recipe=oracle.RECIPES[recipe])
    module[0].weight.requires_grad_(wanted_w)
    x = torch.randn(20, 32, device=device, dtype=torch.bfloat16).requires_grad_(wanted_x)
    with saved_tensors() as saved:
        module(x)
    weight = module[0].weight.data_ptr()
    return [tensor for tensor in saved if tensor.ndim == 2 and tensor.data_ptr() != weight], x


@pytest.mark.parametrize("wanted_x", [False, True])
def test_saved_for_a_quantized_wgrad(wanted_x, device):
    (saved,), _ = saved_by("hybrid", wanted_x=wanted_x, device=device)
    assert saved.dtype == torch.float8_e4m3fn
    assert saved.shape == (32, 32), "transposed, its 20 tokens padded to 32"


def test_saved_for_a_dequantized_wgrad(device):
    (saved,), _ = saved_by("dequantized", device=device)
    assert saved.dtype == torch.float8_e4m3fn
    assert saved.shape == (20, 32)


@pytest.mark.parametrize("recipe", ["none", "high_precision"])
def test_saved_for_an_unquantized_wgrad(recipe, device):
    (saved,), x = saved_by(recipe, device=device)
    assert saved.data_ptr() == x.data_ptr(), "the input itself, no copy"


@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_nothing_of_the_input_is_saved_for_a_frozen_weight(recipe, device):
    saved, _ = saved_by(recipe, wanted_w=False, device=device)
    assert saved == []


def test_sizes_that_do_not_fit(device):
    module = ops.BasicLinear(32, 48, device=device)
    with pytest.raises(ValueError, match=r"BasicLinear: the last axis of the input must have 32 elements, got shape"):
        module(torch.zeros(4, 33, device=device))
    with pytest.raises(ValueError, match="32 elements"):
        module(torch.zeros((), device=device))
    with pytest.raises(ValueError, match=r"BasicLinear: in_features and out_features must not be negative"):
        ops.BasicLinear(-1, 4)


def test_the_error_names_the_size_when_compiled(device):
    module = ops.BasicLinear(32, 48, device=device)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="must have 32 elements"):
        compiled(module)(torch.zeros(4, 33, device=device))


def test_initialization_is_that_of_torch():
    torch.manual_seed(3)
    ours = ops.BasicLinear(32, 48).weight
    torch.manual_seed(3)
    assert torch.equal(ours, torch.nn.Linear(32, 48, bias=False).weight)


@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_zero_rows(recipe, device):
    module = linear_bias(device=device, dtype=torch.bfloat16, recipe=oracle.RECIPES[recipe])
    for shape in ((0, 32), (2, 0, 32), (0, 3, 32)):
        x = torch.empty(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        y, dx, dw, db = step(module, module, x)
        assert y.shape == (*shape[:-1], 48)
        assert dx.shape == shape
        assert torch.equal(dw, torch.zeros_like(dw))
        assert torch.equal(db, torch.zeros_like(db))


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize(("K", "N"), [(0, 8), (8, 0), (0, 0)])
def test_zero_features(K, N, recipe, device):
    module = linear_bias(K, N, device=device, dtype=torch.bfloat16, recipe=oracle.RECIPES[recipe])
    x = torch.randn(4, K, device=device).to(torch.bfloat16).requires_grad_()
    y, dx, dw, db = step(module, module, x)
    assert torch.equal(y, module[1].bias.detach().expand(4, N))
    assert torch.equal(dx, torch.zeros_like(x))
    assert dw.shape == (N, K)
    assert db.shape == (N,)


@pytest.mark.parametrize("recipe", ["none", "hybrid"])
@pytest.mark.parametrize("shape", [(16, 32), (2, 8, 32)], ids=str)
def test_the_output_can_be_changed_in_place(shape, recipe, device):
    module = linear_bias(device=device, dtype=torch.bfloat16, recipe=oracle.RECIPES[recipe])
    exact_(module[0].weight)
    exact_(module[1].bias)
    x = exact(*shape, device=device, requires_grad=True)

    def changed(x):
        y = module(x)
        y += 1
        return y

    expected = step(lambda x: module(x) + 1, module, x)
    assert same(step(changed, module, x), expected)
    assert same(step(compiled(changed), module, x), expected)
