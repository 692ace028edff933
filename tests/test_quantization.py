"""The public face of the quantizers: `lowp.quantize`, and how a new quantizer is registered."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowp
from lowp import quantization
from lowp.formats import E4M3, E5M2
from lowp.kernels.activated import activated, activation_gradient
from lowp.kernels.materialize import materialize
from lowp.quantization import (
    Quantized,
    cast_operand,
    cast_operand_bias_grad,
    dequantize_rows,
    measure,
    quantize_operand,
    register_quantizer,
)
from lowp.quantizers import Float8CurrentScalingQuantizer, Quantizer
from lowp.recipe import ROLES, Float8CurrentScaling
from tests import oracle

SPEC = Float8CurrentScalingQuantizer()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def codes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def expected(x: Tensor, spec: Float8CurrentScalingQuantizer) -> tuple[Tensor, Tensor]:
    """The oracle's codes in the shape of `x`, and its scale."""
    table, amax = oracle.TABLES[spec.fmt.name], oracle.amax(x.double())
    rule = (table, spec.power_2_scale, spec.amax_epsilon)
    return oracle.cast(x.double(), amax, *rule), oracle.scale(amax, *rule)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Up to four axes, sizes from 0, values over the whole range, any memory layout."""
    shape = draw(st.lists(st.integers(0, 19), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    whole = torch.randn([size * step for size, step in zip(shape, steps, strict=True)], generator=generator)
    x = whole[tuple(slice(None, None, step) for step in steps)] * 2.0 ** draw(st.integers(-20, 14))
    order = draw(st.permutations(range(len(shape))))
    return (
        x.to(draw(st.sampled_from(DTYPES))).permute(order).contiguous().permute([order.index(i) for i in range(x.ndim)])
    )


@settings(deadline=None, max_examples=60)
@given(
    tensors(),
    st.sampled_from([(True, False), (False, True), (True, True)]),
    st.builds(
        Float8CurrentScalingQuantizer,
        fmt=st.sampled_from([E4M3, E5M2]),
        power_2_scale=st.booleans(),
        amax_epsilon=st.sampled_from([0.0, 1e-3]),
    ),
)
def test_quantize(x, copies, spec):
    row, column = copies
    result = lowp.quantize(x, spec, row=row, column=column)
    want, scale = expected(x, spec)
    K, M = x.shape[-1], math.prod(x.shape[:-1])
    if row:
        assert result.row_data.shape == x.shape
        assert result.row_data.dtype == spec.fmt.dtype
        assert torch.equal(codes(result.row_data), want)
        assert torch.equal(result.row_scale, scale)
    if column:
        assert result.column_data.shape == (K, M)
        assert result.column_data.dtype == spec.fmt.dtype
        assert torch.equal(codes(result.column_data), want.reshape(M, K).t())
        assert torch.equal(result.column_scale, scale)
    assert (result.row_data is None, result.row_scale is None) == (not row, not row)
    assert (result.column_data is None, result.column_scale is None) == (not column, not column)


def test_the_result_is_a_named_tuple():
    result = lowp.quantize(torch.ones(2, 3), SPEC, column=True)
    assert isinstance(result, lowp.Quantized)
    assert result._fields == ("row_data", "row_scale", "column_data", "column_scale")
    row_data, row_scale, column_data, column_scale = result
    assert result.row == (row_data, row_scale)
    assert result.column == (column_data, column_scale)
    assert row_scale.shape == column_scale.shape == ()


def test_only_the_row_copy_by_default():
    result = lowp.quantize(torch.ones(2, 3), SPEC)
    assert result.row_data is not None
    assert result.column_data is None


@pytest.mark.parametrize("role", ROLES)
def test_a_recipe_gives_the_spec_of_a_role(role):
    x = torch.randn(5, 7)
    recipe = Float8CurrentScaling()
    assert torch.equal(codes(lowp.quantize(x, recipe.quantizer(role)).row_data), expected(x, recipe.quantizer(role))[0])


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 5), (2, 3, 0)])
def test_no_elements(shape):
    result = lowp.quantize(torch.ones(shape), SPEC, column=True)
    assert result.row_data.shape == shape
    assert result.column_data.shape == (shape[-1], math.prod(shape[:-1]))
    assert result.row_scale == 1


def test_zeros_quantize_to_zeros():
    result = lowp.quantize(torch.zeros(3, 5), SPEC)
    assert not codes(result.row_data).any()
    assert result.row_scale == 1


def test_it_is_not_differentiable():
    x = torch.randn(3, 4, requires_grad=True)
    result = lowp.quantize(x, SPEC, column=True)
    assert not any(tensor.requires_grad for tensor in result)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_equals_eager(dynamic):
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: lowp.quantize(x, SPEC, column=True), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for rows in (3, 4, 17):
        x = torch.randn(2, rows, 21, dtype=torch.bfloat16)
        for actual, want in zip(compiled(x), lowp.quantize(x, SPEC, column=True), strict=True):
            assert actual.shape == want.shape
            assert torch.equal(
                actual.view(torch.uint8 if actual.ndim else torch.int32),
                want.view(torch.uint8 if want.ndim else torch.int32),
            )


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.ones(2, 3), None), TypeError, r"spec must be a registered quantizer spec, got NoneType\. recipe\."),
        ((torch.ones(2, 3), Float8CurrentScaling()), TypeError, "got Float8CurrentScaling"),
        ((torch.ones(()), SPEC), ValueError, r"x must have at least one axis, got \(\)"),
        (
            (torch.ones(2, 3, dtype=torch.float64), SPEC),
            ValueError,
            r"x must be fp32, bf16 or fp16, got torch\.float64",
        ),
        ((torch.ones(2, 3, dtype=torch.int32), SPEC), ValueError, r"got torch\.int32"),
        ((torch.ones(2, 3), SPEC, False, False), ValueError, r"row or column must be asked for, got \(False, False\)"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_wrong_arguments(arguments, error, text, compiled):
    call = lowp.quantize
    if compiled:
        call, error = torch.compile(call, fullgraph=True, backend="eager"), torch._dynamo.exc.Unsupported
    with pytest.raises(error, match=f"quantize: .*{text}" if not compiled else text):
        call(*arguments)


def test_dequantize_rows_drops_the_padding():
    x = torch.randint(-8, 8, (2, 5, 21)).float() * 0.5
    x[0, 0, 0] = 7.0  # 448 / 7 is a power of two: nothing is rounded
    padded = quantize_operand(x.flatten(0, 1), SPEC, row=True, column=False)
    assert padded.row_data.shape == (10, 32)
    for dtype in DTYPES:
        assert torch.equal(dequantize_rows(padded, 21, dtype), x.flatten(0, 1).to(dtype))


# ---- a new quantizer


@dataclass(frozen=True)
class ToySignQuantizer(Quantizer):
    """Keeps the sign, and one scale: the mean magnitude."""

    gain: float = 1.0


def _sign(x: Tensor, statistics: None, spec: ToySignQuantizer, row: bool, column: bool) -> Quantized:
    scale = x.abs().mean() * spec.gain
    data = x.sign()
    return Quantized(data if row else None, scale, data.t().contiguous() if column else None, scale)


@pytest.fixture
def sign_quantizer(monkeypatch: pytest.MonkeyPatch) -> ToySignQuantizer:
    monkeypatch.setattr(quantization, "_METHODS", dict(quantization._METHODS))
    register_quantizer(
        ToySignQuantizer,
        measure=lambda x: None,
        cast=_sign,
        cast_bias_grad=lambda x, statistics, spec, row, column, dtype: (
            _sign(x, statistics, spec, row, column),
            x.sum(0).to(dtype),
        ),
    )
    return ToySignQuantizer(gain=2.0)


def test_a_new_quantizer(sign_quantizer):
    x = torch.tensor([[-1.0, 3.0], [2.0, -2.0]])
    result = lowp.quantize(x, sign_quantizer, column=True)
    assert torch.equal(result.row_data, x.sign())
    assert torch.equal(result.column_data, x.sign().t())
    assert result.row_scale == 4.0


def test_a_quantizer_that_takes_tensors_only_gets_the_values_of_a_source(sign_quantizer):
    source = activated(torch.randn(3, 8), "swiglu")
    values = materialize(source)
    assert measure(source, sign_quantizer) is None
    expected = quantize_operand(values, sign_quantizer, row=True, column=True)
    for result in (
        quantize_operand(source, sign_quantizer, row=True, column=True),
        cast_operand(source, None, sign_quantizer, row=True, column=True),
    ):
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    _, sums = cast_operand_bias_grad(source, None, sign_quantizer, row=True, column=False, dtype=torch.float64)
    assert torch.equal(sums, values.sum(0).double())


@pytest.mark.parametrize("spec", [SPEC, Float8CurrentScalingQuantizer(fmt=E5M2, amax_epsilon=1.0)])
def test_a_source_is_quantized_as_its_values_are(spec):
    source = activation_gradient(torch.randn(40, 24), torch.randn(40, 48), "geglu", dtype=torch.bfloat16)
    values = materialize(source)
    statistics = measure(source, spec)
    assert torch.equal(statistics, measure(values, spec))
    copies = {"row": True, "column": True}
    expected = quantize_operand(values, spec, **copies)
    fused, sums = cast_operand_bias_grad(source, statistics, spec, **copies, dtype=torch.float32)
    cast = cast_operand(source, statistics, spec, **copies)
    for result in (cast, quantize_operand(source, spec, **copies), fused):
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(result, expected, strict=True))
    assert torch.equal(sums, values.float().sum(0))


def test_a_subclass_of_a_registered_spec_is_not_registered():
    @dataclass(frozen=True, kw_only=True)
    class Derived(Float8CurrentScalingQuantizer):
        pass

    with pytest.raises(TypeError, match="got Derived"):
        lowp.quantize(torch.ones(2), Derived())
