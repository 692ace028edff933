"""lowp.Linear: an nn.Linear, with Transformer Engine's arguments."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import lowp
from lowp.errors import Unsupported
from tests.modules.cases import K, N, batch, build, call_of, check, expected, same, step
from tests.modules.cases import bound as bound_of
from tests.modules.pairwise import label, pairwise, product
from tests.ops import oracle

DTYPE = torch.bfloat16
CALLS = ["eager", "aot_eager", "kernel"]

FULL = {"dtype": [torch.bfloat16], "call": ["aot_eager"]}
"""What stands still in the full product, since tests of operations cross it with everything."""

AXES = {
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "recipe": list(oracle.RECIPES),
    "bias": ["bias", "return_bias", "none"],
    "leading": [(), (7,), (0,), (2, 3, 5)],
    "frozen": ["nothing", "weight", "input"],
    "call": CALLS,
}


def run(combination, device):
    """One combination against the oracle, and compiled against eager."""
    recipe, leading = oracle.RECIPES[combination["recipe"]], combination["leading"]
    bias = combination["bias"]
    module = build(
        "linear", device, combination["dtype"], recipe=recipe, bias=bias != "none", return_bias=bias == "return_bias"
    )
    module.weight.requires_grad_(combination["frozen"] != "weight")
    x = batch(*leading, device=device, dtype=combination["dtype"], requires_grad=combination["frozen"] != "input")
    dy = torch.randn(*leading, N).to(device, combination["dtype"])
    results = step(module, module, x, dy)
    without_bias = copy.deepcopy(module)
    if bias == "return_bias":
        assert torch.equal(module(x)[1], module.bias)
        without_bias.__dict__["_parameters"]["bias"] = None
        results["bias"] = None  # nobody used it
    check(results, expected("linear", without_bias, x, dy, recipe), bound_of(x, recipe))
    assert (results["weight"] is None) == (combination["frozen"] == "weight")
    assert (results["dx"] is None) == (combination["frozen"] == "input")
    assert results["y0"].dtype == combination["dtype"]
    if combination["call"] != "eager":
        again = step(call_of(module, combination["call"]), module, x, dy)
        again["bias"] = None if bias == "return_bias" else again.get("bias")
        results.setdefault("bias", None)
        assert same(again, results)


@pytest.mark.parametrize("combination", pairwise(AXES), ids=label)
def test_pairs_of_options(combination, device):
    run(combination, device)


@pytest.mark.full
@pytest.mark.parametrize("combination", product(AXES | FULL), ids=label)
def test_every_combination_of_options(combination, device):
    run(combination, device)


# ---- an nn.Linear


def test_it_is_an_nn_linear(device):
    torch.manual_seed(1)
    module = lowp.Linear(K, N, device=device)
    torch.manual_seed(1)
    reference = nn.Linear(K, N, device=device)
    assert isinstance(module, nn.Linear)
    assert (module.in_features, module.out_features) == (K, N)
    assert torch.equal(module.weight, reference.weight)
    assert torch.equal(module.bias, reference.bias)
    module.reset_parameters()
    torch.manual_seed(1)
    module.reset_parameters()
    assert torch.equal(module.weight, reference.weight)
    assert torch.equal(module.bias, reference.bias)


@pytest.mark.parametrize("bias", [False, True])
def test_state_dicts_are_those_of_nn_linear(bias, device):
    module, reference = lowp.Linear(K, N, bias, device=device), nn.Linear(K, N, bias, device=device)
    assert list(module.state_dict()) == list(reference.state_dict())
    module.load_state_dict(reference.state_dict(), strict=True)
    x = batch(7, device=device, dtype=torch.float32)
    assert torch.equal(module(x), reference(x))
    other = nn.Linear(K, N, bias, device=device)
    other.load_state_dict(module.state_dict(), strict=True)
    assert torch.equal(other(x), reference(x))


def test_positional_arguments_are_those_of_nn_linear(device):
    module = lowp.Linear(K, N, False, device, torch.bfloat16)
    assert module.bias is None
    assert module.weight.dtype == torch.bfloat16
    assert module.weight.device.type == device
    assert "in_features=32, out_features=48, bias=False" in repr(module)


# ---- arguments


def test_params_dtype_is_dtype():
    assert lowp.Linear(K, N, params_dtype=torch.float16).weight.dtype == torch.float16
    assert lowp.Linear(K, N, dtype=DTYPE, params_dtype=DTYPE).weight.dtype == DTYPE
    with pytest.raises(ValueError, match="params_dtype is another name of dtype"):
        lowp.Linear(K, N, dtype=DTYPE, params_dtype=torch.float32)


def test_the_argument_recipe_precedes_the_context(device):
    module = build("linear", device)
    own = copy.deepcopy(module)
    own.recipe = oracle.E4M3
    x = batch(7, device=device)
    with lowp.autocast(recipe=oracle.E4M3):
        expected_results = step(module, module, x)
    assert same(step(own, own, x, within=lowp.autocast(recipe=oracle.HYBRID)), expected_results)
    with pytest.raises(TypeError, match=r"recipe must be a lowp.recipe.Recipe, got str"):
        lowp.Linear(K, N, recipe="fp8")


def test_return_bias(device):
    module = build("linear", device, return_bias=True)
    x = batch(7, device=device)
    y, bias = module(x)
    (y + bias).sum().backward()
    assert torch.equal(module.bias.grad, torch.full_like(module.bias, 7))
    assert lowp.Linear(K, N, bias=False, return_bias=True)(torch.randn(2, K))[1] is None
    with torch.autocast(device, dtype=DTYPE):
        y, bias = lowp.Linear(K, N, return_bias=True, device=device)(torch.randn(2, K, device=device))
    assert y.dtype == bias.dtype == DTYPE


@pytest.mark.parametrize("call", ["eager", "aot_eager"])
@pytest.mark.parametrize("split", [("query", "key_", "value"), {"q": 16, "kv": 32}], ids=str)
def test_parameters_split(split, call, device):
    module = build("linear", device, parameters_split=split, recipe=oracle.HYBRID)
    stems = [stem.rstrip("_") for stem in split]
    assert list(module.state_dict()) == [f"{stem}_{p}" for p in ("weight", "bias") for stem in stems]
    whole = lowp.Linear(K, N, device=device, dtype=DTYPE, recipe=oracle.HYBRID)
    with torch.no_grad():
        for p in ("weight", "bias"):
            whole.get_parameter(p).copy_(torch.cat([module.get_parameter(f"{stem}_{p}") for stem in stems]))
    x, dy = batch(7, device=device), torch.randn(7, N, device=device, dtype=DTYPE)
    results, reference = step(call_of(module, call), module, x, dy), step(whole, whole, x, dy)
    assert torch.equal(results["y0"], reference["y0"])
    assert torch.equal(results["dx"], reference["dx"])
    for p in ("weight", "bias"):
        assert torch.equal(torch.cat([results[f"{stem}_{p}"] for stem in stems]), reference[p])


def test_wrong_parameter_splits():
    with pytest.raises(ValueError, match="divisible by the 5 names of parameters_split, got 48"):
        lowp.Linear(K, N, parameters_split=tuple("abcde"))
    with pytest.raises(ValueError, match="must add up to out_features, 48"):
        lowp.Linear(K, N, parameters_split={"q": 16, "k": 16})
    with pytest.raises(ValueError, match="parameters_split must name a parameter"):
        lowp.Linear(K, N, parameters_split=())
    with pytest.raises(ValueError, match="exclude each other"):
        lowp.Linear(K, N, parameters_split=("q", "k"), fuse_wgrad_accumulation=True)


def test_init_method_fills_the_weight_and_the_bias_starts_at_zero():
    module = lowp.Linear(K, N, init_method=lambda weight: nn.init.constant_(weight, 0.5))
    assert torch.equal(module.weight, torch.full((N, K), 0.5))
    assert not module.bias.count_nonzero()
    with torch.no_grad():
        module.weight.zero_()
    module.reset_parameters()
    assert torch.equal(module.weight, torch.full((N, K), 0.5))
    parts = lowp.Linear(K, N, init_method=lambda weight: nn.init.constant_(weight, 0.5), parameters_split=("a", "b"))
    assert torch.equal(parts.a_weight, torch.full((N // 2, K), 0.5))


class Tracker:
    """Megatron's tracker of random states, for one state."""

    def __init__(self):
        self.forks = 0

    @contextmanager
    def fork(self):
        self.forks += 1
        with torch.random.fork_rng():
            torch.manual_seed(1234)
            yield


@pytest.mark.parametrize("mode", ["column", "row", None])
def test_split_parameters_are_drawn_inside_the_tracker(mode):
    tracker = Tracker()
    module = lowp.Linear(
        K, N, bias=False, parallel_mode=mode, tp_size=2 if mode else 1, get_rng_state_tracker=lambda: tracker
    )
    assert tracker.forks == (0 if mode is None else 1)
    with Tracker().fork():
        reference = nn.Linear(K, N, bias=False)
    shape = {"column": (N // 2, K), "row": (N, K // 2), None: (N, K)}[mode]
    assert module.weight.shape == shape
    assert torch.equal(module.weight, reference.weight[: shape[0], : shape[1]]) == (mode is not None)


def test_the_number_of_ranks_may_be_known_before_the_ranks():
    module = lowp.Linear(K, N, parallel_mode="column", tp_size=2)
    assert (tuple(module.weight.shape), tuple(module.bias.shape)) == ((N // 2, K), (N // 2,))
    with pytest.raises(ValueError, match="a layer that is split over 2 ranks needs their group"):
        module(torch.randn(2, K))
    with pytest.raises(ValueError, match="out_features must be divisible by the 5 ranks"):
        lowp.Linear(K, N, parallel_mode="column", tp_size=5)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        lowp.Linear(K, N, parallel_mode="column", tp_size=0)


@pytest.mark.parametrize("argument", ["ub_overlap_ag", "ub_bulk_wgrad", "ub_name", "symmetric_ar_type", "name"])
def test_arguments_without_use_are_refused(argument):
    lowp.Linear(K, N, **{argument: None})
    with pytest.raises(Unsupported, match=rf"Linear: {argument} is not supported: .* got 'x'\. Leave it out\."):
        lowp.Linear(K, N, **{argument: "x"})


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match=r"Linear: no such argument, got retrun_bias"):
        lowp.Linear(K, N, retrun_bias=True)
    with pytest.raises(Unsupported, match="quantized weights are not kept over microbatches"):
        lowp.Linear(K, N)(torch.randn(2, K), is_first_microbatch=True)
    with pytest.raises(TypeError, match="fp8_grad"):
        lowp.Linear(K, N)(torch.randn(2, K), fp8_grad=True)


def test_a_bias_can_be_neither_added_nor_removed():
    module = lowp.Linear(K, N)
    with pytest.raises(ValueError, match="bias can be neither added nor removed"):
        module.bias = None
    with pytest.raises(ValueError, match="bias can be neither added nor removed"):
        lowp.Linear(K, N, bias=False).bias = nn.Parameter(torch.zeros(N))


def test_assigned_parameters_are_used(device):
    module = build("linear", device)
    module.weight = nn.Parameter(torch.zeros_like(module.weight))
    assert torch.equal(module(batch(3, device=device)), module.bias.expand(3, N))


def test_inside_a_pipeline_of_operations(device):
    """It runs as a module, and plans nothing with its neighbours."""
    module = build("linear", device, recipe=oracle.HYBRID)
    pipeline = lowp.ops.Sequential(module, lowp.ops.BasicLinear(N, K, device=device, dtype=DTYPE))
    x = batch(7, device=device)
    assert torch.equal(pipeline(x), pipeline[1](module(x)))


# ---- the original input


@pytest.mark.usefixtures("either_amax")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_save_original_input_changes_no_bit(recipe, call, device):
    module = build("linear", device, recipe=oracle.RECIPES[recipe])
    keeping = build("linear", device, recipe=oracle.RECIPES[recipe], save_original_input=True)
    keeping.load_state_dict(module.state_dict())
    x, dy = batch(2, 15, device=device), torch.randn(2, 15, N, device=device, dtype=DTYPE)
    assert same(step(call_of(keeping, call), keeping, x, dy), step(module, module, x, dy))
