"""Fused equals unfused: whatever takes a source gives the bits that it gives for the values as a tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowp.formats import E4M3, E5M2, HIGH_PRECISION
from lowp.kernels import amax as amax_kernel
from lowp.kernels import bias_grad as bias_grad_kernel
from lowp.kernels import cast as cast_module
from lowp.kernels import cast_kernel
from lowp.kernels.activated import ActivationGradient, activated, activation_gradient
from lowp.kernels.activations import ACTIVATIONS
from lowp.kernels.amax import amax
from lowp.kernels.bias_grad import GROUP, bias_grad
from lowp.kernels.cast import cast, cast_bias_grad
from lowp.kernels.materialize import materialize
from lowp.kernels.normalized import Normalized, normalized
from lowp.kernels.sources import PLAIN, Plain, Source, as_source, produce_ref
from lowp.quantizers import Float8CurrentScalingQuantizer
from lowp.values import decode
from tests.kernels.layouts import all_values, bits
from tests.kernels.sources import LAYOUTS, SOURCES, relayout

COPIES = {"row": (True, False), "column": (False, True), "both": (True, True)}
SHAPES = [(1, 1), (3, 40), (70, 33), (130, 272), (20, 600), (257, 1040)]
QUANTIZERS = [Float8CurrentScalingQuantizer(), Float8CurrentScalingQuantizer(fmt=E5M2, power_2_scale=True)]


def assert_fused_is_unfused(source: Source, values: Tensor) -> None:
    """`values` are those of the source, as a tensor."""
    assert torch.equal(amax(source).max(), amax(values).max())
    assert torch.equal(bits(bias_grad(source)), bits(bias_grad(values)))
    largest = amax(values)
    for quantizer in QUANTIZERS:
        for row, column in COPIES.values():
            fused = cast_bias_grad(source, largest, quantizer, row=row, column=column, dtype=torch.float32)
            unfused = cast_bias_grad(values, largest, quantizer, row=row, column=column, dtype=torch.float32)
            assert_same(fused, unfused)
            assert_same(cast(source, largest, quantizer, row=row, column=column), unfused[:3])
            assert_same(cast(source, None, quantizer, row=row, column=column), unfused[:3])


def assert_same(actual: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
            assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_is_unfused(device, name, shape):
    source = SOURCES[name](*shape, device, torch.bfloat16)
    values = materialize(source)
    assert values.shape == source.shape
    assert_fused_is_unfused(source, values)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("dtype", HIGH_PRECISION)
def test_dtypes(device, name, dtype):
    for inner in (dtype, torch.float32):
        source = SOURCES[name](70, 48, device, inner)
        if name != "tensor":
            fields = {f: getattr(source.spec, f) for f in source.spec.__dataclass_fields__}
            source = source._replace(spec=type(source.spec)(**{**fields, "dtype": dtype}))
        values = materialize(source)
        assert values.dtype == source.dtype
        assert_fused_is_unfused(source, values)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("shape", [(70, 33), (64, 128)], ids=str)
def test_case_22_layouts(device, name, layout, shape):
    source = SOURCES[name](*shape, device, torch.bfloat16)
    values, moved = materialize(source), relayout(source, LAYOUTS[layout])
    assert torch.equal(bits(materialize(moved)), bits(values))
    assert_fused_is_unfused(moved, values)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0)], ids=str)
def test_empty(device, name, shape):
    source = SOURCES[name](*shape, device, torch.bfloat16)
    assert materialize(source).shape == source.shape
    assert amax(source).max() == 0
    assert not bias_grad(source).any()
    *copies, scale, sums = cast_bias_grad(source, amax(source), QUANTIZERS[0], row=True, column=True)
    assert scale == 1
    assert not any(copy.view(torch.uint8).any() for copy in copies)
    assert not sums.any()


@pytest.mark.parametrize("name", SOURCES)
def test_case_14_what_is_not_finite_stays_visible(device, name):
    source = SOURCES[name](66, 48, device, torch.bfloat16)
    source.tensors[0][5, 7], source.tensors[0][6, 8] = torch.inf, torch.nan
    values = materialize(source)
    assert not values[6, 8].isfinite() or name == "gradient of clamped_swiglu"
    assert_fused_is_unfused(source, values)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOURCES)
def test_every_configuration_gives_the_same_bits(name):
    source = SOURCES[name](200, 272, "cuda", torch.bfloat16)
    values, spec = materialize(source), source.spec.bundle
    largest = amax(values)
    for block_r, block_c, num_warps, stages in ((1, 1024, 4, 1), (4, 512, 8, 3), (32, 128, 4, 2), (8, 1024, 8, 1)):
        config = amax_kernel.Config(block_r, block_c, num_warps, stages)
        assert amax_kernel.amax_launch(source.tensors, spec, config).max() == largest.max()
    expected = bias_grad(values, torch.float32)
    for block_n, num_warps in ((32, 2), (64, 4), (128, 4), (128, 8)):
        config = bias_grad_kernel.Config(block_n, num_warps)
        sums = bias_grad_kernel._bias_grad_launch(source.tensors, spec, torch.float32, config)
        assert torch.equal(bits(sums), bits(expected))
    for quantizer in QUANTIZERS:
        unfused = cast_bias_grad(values, largest, quantizer, row=True, column=True, dtype=torch.float32)
        arguments = (source.tensors, spec, largest, quantizer.bundle, True, True)
        for block_m, block_k, num_warps in ((GROUP, 64, 2), (GROUP, 64, 4), (GROUP, 128, 4), (GROUP, 128, 8)):
            config = cast_kernel.Config(block_m, block_k, num_warps)
            fused = cast_module._cast_bias_grad_launch(*arguments, torch.float32, config)
            assert_same(fused, unfused)
        for block_m, block_k, num_warps in ((8, 512, 4), (32, 32, 4), (128, 64, 4), (128, 128, 8)):
            config = cast_kernel.Config(block_m, block_k, num_warps)
            assert_same(cast_module._cast_launch(*arguments, config), unfused[:3])


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOURCES)
def test_cuda_is_cpu(name):
    """Bit for bit where no transcendental is used; tests/kernels/test_activations.py has the others."""
    exact = "swiglu" not in name and "gelu" not in name
    source = SOURCES[name](300, 272, "cpu", torch.bfloat16)
    on_gpu = source._replace(tensors=tuple(x.cuda() for x in source.tensors))
    if exact:
        assert torch.equal(bits(materialize(on_gpu)), bits(produce_ref(source)))
    else:
        eps = torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(materialize(on_gpu).cpu(), produce_ref(source), rtol=eps, atol=eps**2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["swiglu", "gradient of swiglu", "RMSNorm", "dropout"])
def test_case_30_more_than_2_31_elements(name):
    M, K = 2**22 + 16, 512
    source = SOURCES[name](1, K, "cuda", torch.bfloat16)
    matrices = [x.dim() == 2 for x in source.tensors]
    rows = [x.expand(M, -1).clone() if m else x for x, m in zip(source.tensors, matrices, strict=True)]
    rows = [x.expand(M).contiguous() if x.dtype == torch.float32 else x for x in rows]
    source = source._replace(tensors=tuple(rows))
    values = materialize(source)
    row_data, column_data, _, sums = cast_bias_grad(source, amax(source), QUANTIZERS[0], row=True, column=True)
    for start in range(0, M, 2**19):
        part = slice(start, min(start + 2**19, M))
        expected, _, _ = cast(values[part], amax(source), QUANTIZERS[0])
        assert torch.equal(bits(row_data[part]), bits(expected))
        assert torch.equal(bits(column_data[:, part]), bits(expected[:, : values.shape[1]].t()))
    assert torch.equal(bits(sums), bits(bias_grad(values)))


# ---- the Python side


def test_a_source_tells_what_its_values_are():
    x, dy = torch.randn(3, 8, dtype=torch.float16), torch.randn(3, 4)
    source = activation_gradient(dy, x, "swiglu", dtype=torch.bfloat16)
    assert (source.shape, source.dtype, source.device) == ((3, 8), torch.bfloat16, x.device)
    assert (source.rows, source.columns) == (3, 8)
    assert activated(x, "swiglu").shape == (3, 4)
    assert activated(x, "swiglu").dtype == torch.float16
    assert as_source("op", x) == Source((x,), PLAIN[torch.float16])
    assert produce_ref(as_source("op", x)) is x


@pytest.mark.parametrize("name", SOURCES)
def test_a_spec_crosses_as_its_bundle(name):
    spec = SOURCES[name](2, 4, "cpu", torch.float16).spec
    assert decode(spec.bundle) == spec
    assert decode(spec.bundle).bundle == spec.bundle


def test_sources_are_made_in_traced_code():
    def quantize(x: Tensor, dy: Tensor):
        source = activation_gradient(dy, x, "clamped_swiglu", {"limit": 3})
        copies = cast_bias_grad(source, amax(source), QUANTIZERS[0], row=True, column=True)
        return (*copies, materialize(activated(x, "swiglu")), bias_grad(source))

    x, dy = torch.randn(40, 32, dtype=torch.bfloat16), torch.randn(40, 16, dtype=torch.bfloat16)
    compiled = torch.compile(quantize, fullgraph=True, backend="aot_eager")
    assert_same(compiled(x, dy), quantize(x, dy))


x, vector = torch.zeros(2, 6), torch.zeros(2)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: torch.zeros(3), ValueError, r"materialize: x_MK must be 2-D, got \(3,\)\. Flatten"),
        (x.double, TypeError, r"materialize: x_MK must be one of .* got torch.float64"),
        (lambda: Source((x,), PLAIN[torch.float16]), TypeError, "x_MK must be torch.float16, as its source says, got"),
        (lambda: Source((x, x), PLAIN[torch.float32]), ValueError, "this source is made of 1 tensors, got 2"),
        (lambda: Plain(dtype=torch.int32), TypeError, "Plain: dtype must be one of .* got torch.int32"),
        (lambda: activated(x, "swish"), ValueError, "Activated: activation must be one of .* got 'swish'"),
        (lambda: activated(x, "gelu", {"a": 1}), ValueError, "Activated: gelu has no parameters, got 'a'"),
        (lambda: activated(x[:, 1:], "glu"), ValueError, r"glu is gated, so x_MX must have an even .* got \(2, 5\)"),
        (lambda: activated(torch.zeros(4), "gelu"), ValueError, r"materialize: x_MX must be 2-D, got \(4,\)"),
        (lambda: activation_gradient(x, x, "glu"), ValueError, r"dy_MK must be \(2, 3\), the shape after glu, got"),
        (lambda: activation_gradient(x[:1], x, "gelu"), ValueError, r"dy_MK must be \(2, 6\), .* got \(1, 6\)"),
        (lambda: activation_gradient(x, x, "relu", dtype=torch.int8), TypeError, "ActivationGradient: dtype must be"),
        (lambda: Source((x,), ActivationGradient(dtype=x.dtype, activation="gelu")), ValueError, "made of 2 tensors"),
        (lambda: normalized(x, None, vector[:1], None), ValueError, "rstd_M must have one element for each row"),
        (lambda: normalized(x, vector.half(), vector), TypeError, "mean_M must be fp32, got torch.float16"),
        (lambda: normalized(x, None, vector, vector), ValueError, r"w_K must have one element for each column"),
        (lambda: normalized(x, None, vector, None, x[0].double()), TypeError, "b_K must be one of .*float64"),
        (lambda: Source((x,), Normalized(dtype=x.dtype)), ValueError, "this source is made of 3 tensors, got 1"),
    ],
)
def test_errors(make, error, text):
    with pytest.raises(error, match=text):
        materialize(make())


@pytest.mark.parametrize(
    "call",
    [amax, bias_grad, materialize, lambda s: cast(s, vector, QUANTIZERS[0])],
    ids=["amax", "bias_grad", "materialize", "cast"],
)
def test_every_consumer_checks_its_source(call):
    with pytest.raises(ValueError, match="dy_MK must be"):
        call(activation_gradient(x, x, "swiglu"))


def test_formats_of_the_quantizers_here():
    assert [q.fmt for q in QUANTIZERS] == [E4M3, E5M2]


RISING = ["gelu", "qgelu", "silu", "relu", "srelu"]


@pytest.mark.parametrize("scale", [2.0**-7, 0.1, 1.0, 100.0, 2.0**80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", RISING)
def test_the_amax_of_a_rising_activation(device, name, dtype, scale):
    """Of small values too, whose negative ones count; of values that overflow; beside what is not finite."""
    x = (torch.randn(90, 1500) * min(scale, torch.finfo(dtype).max / 8)).to(dtype)
    x[3, 4], x[5, 6], x[7, 8] = torch.nan, torch.inf, -torch.inf
    for part in (x, -x.abs(), x[:, ::3], x.t(), x[:1, :1], x[:0]):
        source = activated(part.to(device), name)
        assert torch.equal(amax(source).max(), amax(materialize(source)).max())


def test_which_activations_rise():
    """From 0.5 on, above all magnitudes below: in fp64, on every bf16 number."""
    x = all_values(torch.bfloat16).flatten().double()
    x = x[x.isfinite()].sort().values
    for activation in ACTIVATIONS.values():
        value = activation.function.ref(x, tuple(activation.defaults.values()))[0]
        upper, lower = value[x >= 0.5], value[x < 0.5]
        rises = bool((upper.diff() >= 0).all() and lower.abs().max() < upper[0])
        assert activation.function.rising <= rises, "said to rise, and doesn't"
        assert activation.gate is not None or activation.function.rising == rises
