"""What users of torch.nn take for granted."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import lowp
from tests.modules.cases import CASES, batch, build, call_of, same, step
from tests.ops import oracle

DTYPE = torch.bfloat16
over_modules = pytest.mark.parametrize("name", CASES)


@over_modules
def test_default_dtype_and_device(name):
    with torch.device("meta"):
        module = CASES[name].build()
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    torch.set_default_dtype(torch.float64)
    try:
        assert {p.dtype for p in CASES[name].build().parameters()} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)


@over_modules
@pytest.mark.parametrize("leading", [(), (1,), (0,), (2, 0), (3,), (2, 1, 3)])
@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("call", ["eager", "aot_eager"])
def test_leading_axes(call, recipe, leading, name, device):
    module = build(name, device, recipe=oracle.RECIPES[recipe])
    x = batch(*leading, device=device)
    results = step(call_of(module, call), module, x)
    assert results["y0"].shape == (*leading, CASES[name].out_features)
    assert results["dx"].shape == x.shape
    for key, parameter in module.named_parameters():
        assert results[key].shape == parameter.shape
        assert results[key].dtype == parameter.dtype
        if 0 in leading:
            assert not results[key].count_nonzero()


@over_modules
def test_wrong_inputs_are_named(name, device):
    module = build(name, device)
    with pytest.raises(ValueError, match=r"must have 32 elements, got shape \(3, 31\)"):
        module(torch.randn(3, 31, device=device, dtype=DTYPE))
    with pytest.raises((TypeError, ValueError), match=r"floating-point|fp32, bf16 or fp16|bf16, fp16 or fp32"):
        module(torch.ones(3, 32, device=device, dtype=torch.int64))


@over_modules
@pytest.mark.parametrize("call", ["eager", "aot_eager"])
def test_torch_autocast(call, name, device):
    module = build(name, device, dtype=torch.float32, recipe=oracle.HYBRID)
    x = batch(8, device=device, dtype=torch.float32)
    results = step(call_of(module, call), module, x, within=torch.autocast(device, dtype=DTYPE))
    assert results["y0"].dtype == DTYPE
    assert results["dx"].dtype == torch.float32
    assert {results[key].dtype for key, _ in module.named_parameters()} == {torch.float32}


@over_modules
def test_conversion_after_a_step(name, device):
    module = build(name, device, dtype=torch.float32, recipe=oracle.HYBRID)
    step(module, module, batch(8, device=device, dtype=torch.float32))
    module.to(DTYPE)
    results = step(module, module, batch(8, device=device))
    assert {result.dtype for result in results.values()} == {DTYPE}


@over_modules
def test_it_can_be_initialised_again(name, device):
    module = build(name, device)
    torch.manual_seed(5)
    module.reset_parameters()
    torch.manual_seed(5)
    other = CASES[name].build(device=device, dtype=DTYPE)
    for key, parameter in module.named_parameters():
        assert torch.equal(parameter, other.get_parameter(key)), key


@over_modules
@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_case_60_copies_are_independent(how, after_a_step, name, device):
    module = build(name, device, recipe=oracle.HYBRID)
    x = batch(8, device=device)
    if after_a_step:
        step(module, module, x)
    if how == "deepcopy":
        other = copy.deepcopy(module)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(module))
    else:
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    expected = step(module, module, x)
    assert same(step(other, other, x), expected)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other(x).count_nonzero()
    assert same(step(module, module, x), expected)


@over_modules
def test_case_63_built_without_memory(name, device):
    with torch.device("meta"):
        module = CASES[name].build()
    assert {p.device.type for p in module.parameters()} == {"meta"}
    module.to_empty(device=device)
    torch.manual_seed(5)
    module.reset_parameters()
    torch.manual_seed(5)
    direct = CASES[name].build(device=device)
    for key, parameter in module.named_parameters():
        assert torch.equal(parameter, direct.get_parameter(key)), key
        if parameter.ndim == 2:
            bound = parameter.shape[1] ** -0.5
            reference = nn.Linear(parameter.shape[1], parameter.shape[0]).weight
            assert parameter.abs().max() <= bound
            assert (parameter.std() - reference.std()).abs() <= 0.1 * bound
    assert module(batch(3, device=device, dtype=torch.float32)).isfinite().all()


class Record:
    """Hooks that note what they saw."""

    def __init__(self, module):
        self.seen = []
        weight = next(p for p in module.parameters() if p.ndim == 2)
        module.register_forward_pre_hook(lambda m, args: self.seen.append(("pre", args[0].shape)))
        module.register_forward_hook(lambda m, args, y: self.seen.append(("forward", args[0].shape, y.shape)))
        module.register_full_backward_hook(
            lambda m, dx, dy: self.seen.append(("backward", dx[0].shape, dy[0].shape)),
        )
        weight.register_hook(lambda grad: self.seen.append(("weight", grad.shape)))
        weight.register_post_accumulate_grad_hook(lambda p: self.seen.append(("accumulated", p.grad.shape)))


@over_modules
@pytest.mark.parametrize("call", ["eager", "aot_eager"])
def test_case_88_hooks_fire_once(call, name, device):
    module = build(name, device, recipe=oracle.HYBRID)
    record = Record(module)
    x = batch(8, device=device)
    weight = next(p for p in module.parameters() if p.ndim == 2)
    run = call_of(module, call)
    for _ in range(4):
        record.seen.clear()
        run(x).sum().backward()
        out = torch.Size((8, CASES[name].out_features))
        assert sorted(record.seen, key=str) == sorted(
            [
                ("pre", x.shape),
                ("forward", x.shape, out),
                ("backward", x.shape, out),
                ("weight", weight.shape),
                ("accumulated", weight.shape),
            ],
            key=str,
        )


@over_modules
def test_parametrized_weights(name, device):
    module = build(name, device, dtype=torch.float32, recipe=oracle.HYBRID)
    key = next(key for key, p in module.named_parameters() if p.ndim == 2)
    scaled = copy.deepcopy(module)
    with torch.no_grad():
        scaled.get_parameter(key).mul_(2.0)

    class Double(nn.Module):
        def forward(self, weight):
            return weight * 2.0

    nn.utils.parametrize.register_parametrization(module, key, Double())
    x = batch(8, device=device, dtype=torch.float32)
    results, expected = step(module, module, x), step(scaled, scaled, x)
    assert torch.equal(results["y0"], expected["y0"])
    original = f"parametrizations.{key}.original"
    assert torch.equal(results[original], expected[key] * 2.0)


@over_modules
def test_in_a_transformer_of_torchs(name, device):
    """Inside containers of torch.nn, compiled together with what is around."""
    model = nn.Sequential(nn.Linear(16, 32, device=device, dtype=DTYPE), build(name, device, recipe=oracle.HYBRID))
    x = batch(2, 5, device=device, features=16)
    assert same(step(call_of(model, "aot_eager"), model, x), step(model, model, x))
    assert lowp.current_recipe() is None
