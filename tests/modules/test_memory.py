"""What a module keeps from forward to backward: no more than backward reads, and nothing for a frozen parameter."""

import gc
import weakref
from collections import Counter

import pytest
import torch

import lowp
from tests.modules.cases import CASES, K, batch, build, call_of
from tests.ops import oracle
from tests.ops.graphs import CountOps, saved_tensors

DTYPE = torch.bfloat16
FP8 = torch.float8_e4m3fn
M = 30
STATISTICS = 1


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
        held = [weakref.ref(tensor) for tensor in saved if not isinstance(tensor, torch.nn.Parameter)]
        y.sum().backward()
        del y, saved[:]
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
