"""Modules without data, in copies, in files, exported."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowp import ops
from tests.ops import oracle
from tests.ops.pipelines import linear_bias, same, step

DTYPE = torch.bfloat16


def batch(device, rows=30, requires_grad=True):
    return torch.randn(rows, 32, device=device, dtype=DTYPE, requires_grad=requires_grad)


@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_fake_tensors(recipe, device):
    with FakeTensorMode():
        module = linear_bias(device=device, recipe=oracle.RECIPES[recipe])
        x = torch.empty(3, 10, 32, device=device, dtype=DTYPE, requires_grad=True)
        y, dx, dw, db = step(module, module, x)
    assert [tuple(t.shape) for t in (y, dx, dw, db)] == [(3, 10, 48), (3, 10, 32), (48, 32), (48,)]
    assert {t.dtype for t in (y, dx, dw, db)} == {DTYPE}
    assert {t.device.type for t in (y, dx, dw, db)} == {device}


def test_meta_device(device):
    with torch.device("meta"):
        module = ops.Sequential(ops.BasicLinear(32, 48), ops.Bias(48), recipe=oracle.HYBRID)
    assert {p.device.type for p in module.parameters()} == {"meta"}
    module.to_empty(device=device)
    for op in module:
        op.reset_parameters()
    x = torch.randn(8, 32, device=device)
    assert module(x).isfinite().all()


def test_default_device_and_dtype():
    with torch.device("meta"):
        assert ops.BasicLinear(4, 4).weight.device.type == "meta"
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert ops.Bias(4).bias.dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_are_independent(how, after_a_step, device):
    module = linear_bias(device=device, recipe=oracle.HYBRID)
    x = batch(device)
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
    assert other.plan == module.plan
    with torch.no_grad():
        other[0].weight.zero_()
        other[1].bias.zero_()
    assert torch.equal(other(x), torch.zeros_like(expected[0]))
    assert same(step(module, module, x), expected)


def test_state_dict_round_trip(device):
    module, other = (linear_bias(device=device, recipe=oracle.HYBRID) for _ in range(2))
    assert list(module.state_dict()) == ["0.weight", "1.bias"]
    step(module, module, batch(device))
    assert list(module.state_dict()) == ["0.weight", "1.bias"], "the plan is no part of it"
    other.load_state_dict(module.state_dict(), strict=True)
    x = batch(device)
    assert same(step(module, module, x), step(other, other, x))
    module.load_state_dict(other.state_dict(), strict=True, assign=True)
    assert same(step(module, module, x), step(other, other, x))


def test_conversion_after_a_step(device):
    module = linear_bias(device=device, dtype=torch.float32, recipe=oracle.HYBRID)
    x = torch.randn(8, 32, device=device, requires_grad=True)
    step(module, module, x)
    module.to(torch.bfloat16)
    y, dx, dw, db = step(module, module, x.bfloat16().detach().requires_grad_())
    assert {t.dtype for t in (y, dx, dw, db)} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, when it loads a program
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("recipe", ["none", "hybrid"])
def test_export_with_a_dynamic_batch(recipe, strict, tmp_path, device):
    module = linear_bias(device=device, recipe=oracle.RECIPES[recipe]).eval()
    batch_size = torch.export.Dim("batch", min=2, max=512)
    with torch.no_grad():
        program = torch.export.export(
            module, (batch(device, requires_grad=False),), dynamic_shapes=({0: batch_size},), strict=strict
        )
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    for rows in (2, 30, 77):
        x = batch(device, rows, requires_grad=False)
        with torch.no_grad():
            assert torch.equal(loaded(x), module(x))


def test_collected_modules_leave_nothing(device):
    module = linear_bias(device=device, recipe=oracle.HYBRID)
    step(module, module, batch(device))
    weight = weakref.ref(module[0].weight)
    del module
    gc.collect()
    assert weight() is None
