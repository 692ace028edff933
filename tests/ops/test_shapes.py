"""Any sizes and strides: found by hypothesis."""

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ops import oracle
from tests.ops.pipelines import linear_bias, same, step

sizes = st.integers(0, 80)

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: torch.stack([x, x + 1], -1).flatten(-2)[:, ::2],
    "every other row": lambda x: torch.stack([x, x + 1], 1).flatten(0, 1)[::2],
    "columns of a wider matrix": lambda x: torch.cat([x, x + 1], 1)[:, : x.shape[1]],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "unaligned columns": lambda x: torch.cat([x.new_zeros(x.shape[0], 1), x], 1)[:, 1:],
}


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    M=sizes,
    N=sizes,
    K=sizes,
    x_layout=st.sampled_from(sorted(LAYOUTS)),
    dy_layout=st.sampled_from(sorted(LAYOUTS)),
    setting=st.sampled_from(sorted(oracle.SETTINGS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_sizes_and_strides(device, M, N, K, x_layout, dy_layout, setting, dtype):
    recipe = oracle.SETTINGS[setting]
    module = linear_bias(K, N, device=device, dtype=dtype, recipe=recipe)
    plain_x, plain_dy = torch.randn(M, K, device=device).to(dtype), torch.randn(M, N, device=device).to(dtype)
    x, dy = LAYOUTS[x_layout](plain_x), LAYOUTS[dy_layout](plain_dy)
    assert torch.equal(x, plain_x)
    assert torch.equal(dy, plain_dy)
    results = step(module, module, x.requires_grad_(), dy)
    reference = oracle.linear(plain_x, module[0].weight, module[1].bias, plain_dy, recipe)
    for name, result in zip(("y", "dx", "dw", "db"), results, strict=True):
        getattr(reference, name).check(result, name)
    if recipe is not None and recipe.backward_override is None:
        assert same(results[:3], step(module, module, plain_x.requires_grad_(), plain_dy)[:3])


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    rows=sizes,
    copies=st.integers(1, 20),
    axis=st.integers(0, 1),
    recipe=st.sampled_from(sorted(oracle.RECIPES)),
)
def test_expanded_inputs_and_gradients(device, rows, copies, axis, recipe):
    """Axes of stride zero: what `sum().backward()` hands in."""
    shape = (rows, copies) if axis else (copies, rows)
    base = torch.randn(*((rows, 1) if axis else (1, rows)), device=device, dtype=torch.bfloat16)
    x = base.expand(shape)
    module = linear_bias(shape[1], 16, device=device, recipe=oracle.RECIPES[recipe])
    dy = torch.randn(shape[0], 1, device=device, dtype=torch.bfloat16).expand(-1, 16)
    results = step(module, module, x.detach().requires_grad_(), dy)
    reference = oracle.linear(x.contiguous(), module[0].weight, module[1].bias, dy.contiguous(), module.recipe)
    for name, result in zip(("y", "dx", "dw", "db"), results, strict=True):
        getattr(reference, name).check(result, name)
