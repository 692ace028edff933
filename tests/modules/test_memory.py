"""What a module keeps from forward to backward: no more than backward reads, and nothing for a frozen parameter."""

import gc
import weakref
from collections import Counter

import pytest
import torch

import lowp
from lowp.cli.bench.cases import gelu_mlp, norm_linear, swiglu_mlp
from tests.modules.cases import CASES, FFN, K, batch, build, call_of
from tests.ops import oracle
from tests.ops.graphs import CountOps, PeakMemory, saved_tensors

DTYPE = torch.bfloat16
M = 30


def kept(module, x, call="eager"):
    """Dtypes and shapes of the tensors that autograd saves, scales and statistics aside; parameters by name."""
    names = {p.data_ptr(): name for name, p in module.named_parameters()}
    run = call_of(module, call)
    run(x)  # compiled by now
    with saved_tensors() as saved:
        run(x)
    found = Counter()
    for tensor in saved:
        if tensor.data_ptr() in names:
            found[names[tensor.data_ptr()]] += 1
        elif tensor.data_ptr() == x.data_ptr():
            found["input"] += 1
        elif tensor.numel() > max(x.shape[0], 512):  # partial maxima, scales, and a norm's statistics are smaller
            found[(str(tensor.dtype).removeprefix("torch."), *tensor.shape)] += 1
    return dict(found)


LINEAR = {
    "none": {"input": 1, "weight": 1},
    "hybrid": {("float8_e4m3fn", K, 32): 1, "weight": 1},
    "high_precision": {"input": 1, "weight": 1},
    "dequantized": {("float8_e4m3fn", M, K): 1, "weight": 1},
}


@pytest.mark.parametrize("call", ["eager", "aot_eager"])
@pytest.mark.parametrize("recipe", LINEAR)
@pytest.mark.parametrize("frozen", ["nothing", "weight", "input"])
def test_linear(frozen, recipe, call, device):
    module = build("linear", device, recipe=oracle.RECIPES[recipe])
    module.weight.requires_grad_(frozen != "weight")
    x = batch(M, device=device, requires_grad=frozen != "input")
    expected = dict(LINEAR[recipe])
    if frozen == "input":
        expected.pop("weight")
    if frozen == "weight":
        expected = {"weight": 1}
    assert kept(module, x, call) == expected


def column(features):
    """A transposed E4M3 copy of `[M, features]`, whose rows are padded to 32 tokens."""
    return ("float8_e4m3fn", features, 32)


NORM_LINEAR = {
    "none": {("bfloat16", M, K): 1},
    "hybrid": {column(K): 1},
    "high_precision": {("bfloat16", M, K): 1},
    "dequantized": {("float8_e4m3fn", M, K): 1},
}
"""What is kept of the norm's output. Besides, the norm keeps its input and its weight, a linear layer its weight."""

MLP = {
    "none": {("bfloat16", M, FFN): 1},
    "hybrid": {column(FFN): 1},
    "high_precision": {("bfloat16", M, FFN): 1},
    "dequantized": {("float8_e4m3fn", M, FFN): 1},
}
"""What is kept of the activated values. Besides, the activation keeps its input."""


def summed(*parts):
    return dict(sum((Counter(part) for part in parts), Counter()))


@pytest.mark.parametrize("call", ["eager", "aot_eager"])
@pytest.mark.parametrize("recipe", NORM_LINEAR)
@pytest.mark.parametrize("name", ["norm_linear", "rms_linear"])
def test_layernorm_linear(name, recipe, call, device):
    module = build(name, device, recipe=oracle.RECIPES[recipe])
    expected = summed({"input": 1, "layer_norm_weight": 1, "weight": 1}, NORM_LINEAR[recipe])
    assert kept(module, batch(M, device=device), call) == expected


@pytest.mark.parametrize("call", ["eager", "aot_eager"])
@pytest.mark.parametrize("recipe", MLP)
@pytest.mark.parametrize("name", ["mlp", "gated_mlp"])
def test_layernorm_mlp(name, recipe, call, device):
    module = build(name, device, recipe=oracle.RECIPES[recipe])
    activation_input = {("bfloat16", M, FFN if name == "mlp" else 2 * FFN): 1}
    parameters = {"input": 1, "layer_norm_weight": 1, "fc1_weight": 1, "fc2_weight": 1}
    expected = summed(parameters, NORM_LINEAR[recipe], activation_input, MLP[recipe])
    assert kept(module, batch(M, device=device), call) == expected


@pytest.mark.parametrize("call", ["eager", "aot_eager"])
def test_frozen_weights_of_an_mlp(call, device):
    """No operand of theirs is kept."""
    module = build("mlp", device, recipe=oracle.HYBRID)
    module.fc1_weight.requires_grad_(False)
    module.fc2_weight.requires_grad_(False)
    expected = {"input": 1, "layer_norm_weight": 1, "fc1_weight": 1, "fc2_weight": 1, ("bfloat16", M, FFN): 1}
    assert kept(module, batch(M, device=device), call) == expected


@pytest.mark.parametrize("call", ["eager", "aot_eager"])
def test_a_frozen_norm_under_an_input_without_gradient(call, device):
    """Nothing is kept for gradients that end before it."""
    module = build("mlp", device, recipe=oracle.HYBRID)
    module.layer_norm_weight.requires_grad_(False)
    module.layer_norm_bias.requires_grad_(False)
    expected = {column(K): 1, ("bfloat16", M, FFN): 1, column(FFN): 1, "fc2_weight": 1}
    assert kept(module, batch(M, device=device, requires_grad=False), call) == expected


def test_a_frozen_layer_keeps_nothing(device):
    module = build("linear", device, recipe=oracle.HYBRID).requires_grad_(False)
    assert kept(module, batch(M, device=device, requires_grad=False)) == {}


def test_an_original_input_is_kept_instead_of_a_copy(device):
    module = build("linear", device, recipe=oracle.HYBRID, save_original_input=True)
    assert kept(module, batch(M, device=device)) == {"input": 1, "weight": 1}


@pytest.mark.parametrize("name", CASES)
def test_a_frozen_weight_costs_no_wgrad(name, device):
    module = build(name, device, recipe=oracle.HYBRID)
    x = batch(M, device=device)
    counts = []
    for frozen in (False, True):
        for parameter in module.parameters():
            parameter.requires_grad_(not frozen)
        y = module(x)
        with CountOps() as ops:
            y.sum().backward()
        counts.append(ops.counts["scaled_gemm"])
    assert counts[1] * 2 == counts[0]


@pytest.mark.parametrize("name", CASES)
def test_nothing_outlives_the_step(name, device):
    module = build(name, device, recipe=oracle.HYBRID)
    x = batch(M, device=device)
    for _ in range(3):  # the third step is replayed
        y = module(x)
        with saved_tensors() as saved:
            y = module(x)
        own = [t for t in saved if not isinstance(t, torch.nn.Parameter) and t.data_ptr() != x.data_ptr()]
        held = [weakref.ref(tensor) for tensor in own]
        y.sum().backward()
        del y, saved[:], own
    gc.collect()
    assert [ref() for ref in held if ref() is not None] == []


@pytest.mark.parametrize("keep_graph", [False, True])
def test_saved_tensors_are_let_go_one_by_one(keep_graph, monkeypatch, device):
    """When the first layer's backward runs, what the second one saved is free already, unless the graph is kept."""
    from lowp.ops import linear_gemms

    pipeline = lowp.ops.Sequential(
        *(lowp.ops.BasicLinear(K, K, device=device, dtype=DTYPE) for _ in range(2)), recipe=oracle.HYBRID
    )
    saved, alive = [], []
    cast, wgrad = linear_gemms.cast_operand, linear_gemms.wgrad

    def watched_cast(*args, **kwargs):
        result = cast(*args, **kwargs)
        if result.column_data is not None and result.row_data is not None:
            saved.append(weakref.ref(result.column_data))
        return result

    def watched_wgrad(*args, **kwargs):
        alive.append([ref() is not None for ref in saved[:2]])
        return wgrad(*args, **kwargs)

    monkeypatch.setattr(linear_gemms, "cast_operand", watched_cast)
    monkeypatch.setattr(linear_gemms, "wgrad", watched_wgrad)
    y = pipeline(batch(M, device=device))
    y.backward(torch.ones_like(y), retain_graph=keep_graph)
    assert alive == [[True, True], [True, keep_graph]]


LARGE = [norm_linear(128, 192, (512,)), swiglu_mlp(128, 448, (512,)), gelu_mlp(128, 512, (512,))]
"""The modules that `lowp bench` measures, at a 32nd of their sizes and tokens."""


def peak_of_a_step(case, recipe, device):
    """Bytes that forward and backward hold beside the input, the output's gradient and the parameters."""
    module = case.lowp().to(device, DTYPE)
    x = torch.randn(*case.tokens, case.layers[0].k, device=device, dtype=DTYPE, requires_grad=True)
    dy = torch.randn(*case.tokens, case.layers[-1].n, device=device, dtype=DTYPE)
    memory = PeakMemory()
    memory.ignore(x, dy, *module.parameters())
    with memory, lowp.autocast(enabled=recipe is not None, recipe=recipe):
        module(x).backward(dy)
    return memory.peak


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_a_step_holds_no_more_than_in_bf16(case, device):
    in_bf16, quantized = (peak_of_a_step(case, recipe, device) for recipe in (None, oracle.HYBRID))
    assert quantized <= in_bf16
