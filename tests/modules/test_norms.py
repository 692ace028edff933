"""lowp.LayerNorm and lowp.RMSNorm: torch.nn's."""

import pytest
import torch
from torch import nn

import lowp
from tests.modules.cases import call_of, randomize, same, step
from tests.ops import oracle

PAIRS = {"layer": (lowp.LayerNorm, nn.LayerNorm), "rms": (lowp.RMSNorm, nn.RMSNorm)}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("shape", [(32,), (19,), (7, 2)], ids=str)
def test_they_are_torchs(shape, kind, device):
    ours, torchs = PAIRS[kind]
    module, reference = ours(shape, device=device), torchs(shape, eps=1e-5, device=device)
    assert isinstance(module, torchs)
    assert (module.normalized_shape, module.eps, module.elementwise_affine) == (shape, 1e-5, True)
    assert list(module.state_dict()) == list(reference.state_dict())
    randomize(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.25)
    reference.load_state_dict(module.state_dict(), strict=True)
    module.load_state_dict(reference.state_dict(), strict=True)
    x = torch.randn(4, 3, *shape, device=device, requires_grad=True)
    results, expected = step(module, module, x), step(reference, reference, x)
    for key, result in results.items():
        torch.testing.assert_close(result, expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", PAIRS)
def test_without_parameters(kind, device):
    module = PAIRS[kind][0](16, elementwise_affine=False, device=device)
    assert list(module.parameters()) == []
    assert module.weight is None
    assert module(torch.randn(3, 16, device=device)).shape == (3, 16)
    module.reset_parameters()


def test_zero_centered_gamma(device):
    plain, centered = lowp.LayerNorm(16, device=device), lowp.LayerNorm(16, zero_centered_gamma=True, device=device)
    assert not centered.weight.count_nonzero()
    x = torch.randn(3, 16, device=device)
    assert torch.equal(plain(x), centered(x))


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("call", ["aot_eager", "kernel"])
def test_compiled(call, kind, device):
    module = PAIRS[kind][0](16, device=device, params_dtype=torch.bfloat16)
    randomize(module)
    x = torch.randn(3, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    assert same(step(call_of(module, call), module, x), step(module, module, x))


def test_inside_a_pipeline_they_are_planned_with_it(device):
    """The norm's output is quantized where it is made."""
    pipeline = lowp.ops.Sequential(
        lowp.LayerNorm(32, device=device), lowp.ops.BasicLinear(32, 48, device=device), recipe=oracle.HYBRID
    )
    assert "LayerNorm[0] =E4M3=> BasicLinear[1]" in pipeline.plan
    assert list(pipeline.state_dict()) == ["0.weight", "0.bias", "1.weight"]


def test_partial_gradients_are_marked():
    module = lowp.LayerNorm(16, sequence_parallel=True)
    assert module.weight.sequence_parallel is module.bias.sequence_parallel is True
    linear = lowp.LayerNormLinear(16, 16, sequence_parallel=True, parallel_mode="column")
    assert linear.layer_norm_weight.sequence_parallel is True
    assert not hasattr(linear.weight, "sequence_parallel")


def test_params_dtype_is_dtype():
    with pytest.raises(ValueError, match="params_dtype is another name of dtype"):
        lowp.RMSNorm(16, dtype=torch.float16, params_dtype=torch.float32)
