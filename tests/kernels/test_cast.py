from __future__ import annotations

import math

import pytest
import torch

from lowp import formats
from lowp.formats import HIGH_PRECISION
from lowp.kernels import cast as kernel
from lowp.kernels.activated import activation_gradient
from lowp.kernels.amax import amax
from lowp.kernels.cast import cast, cast_bias_grad
from lowp.kernels.cast_kernel import Config, pad_contraction
from lowp.kernels.materialize import materialize
from lowp.kernels.sources import PLAIN
from lowp.quantizers import Float8CurrentScalingQuantizer
from tests import oracle
from tests.goldens import goldens
from tests.kernels.layouts import LAYOUTS, all_values, bits

FORMATS = ["E4M3", "E5M2"]
COPIES = {"row": (True, False), "column": (False, True), "both": (True, True)}
CONFIGS = [
    Config(block_m, block_k, num_warps)
    for block_m, block_k in ((32, 32), (16, 256), (64, 64), (64, 128), (128, 64), (128, 128))
    for num_warps in (2, 4, 8)
]
AMAXES = [0.0, 2.0**-149, 1e-40, 2.0**-126, 1e-30, 1e-3, 0.9, 1.75, 3.859375, 100.0, 57344.0, 1e30, oracle.FP32_MAX]


def spec(fmt: str, *, power_2: bool = False, epsilon: float = 0.0) -> Float8CurrentScalingQuantizer:
    return Float8CurrentScalingQuantizer(fmt=getattr(formats, fmt), power_2_scale=power_2, amax_epsilon=epsilon)


def check(
    outputs: tuple, x: torch.Tensor, largest: float, fmt: str, *, power_2: bool = False, epsilon: float = 0.0
) -> None:
    """Compare `row_data, column_data, scale` with the oracle, padding and all."""
    row_data, column_data, scale = outputs
    table = oracle.TABLES[fmt]
    codes = oracle.cast(x.cpu(), largest, table, power_2, epsilon)
    assert torch.equal(scale.cpu(), oracle.scale(largest, table, power_2, epsilon))
    assert scale.dtype == torch.float32
    for data, expected in ((row_data, codes), (column_data, codes.t())):
        if data is None:
            continue
        size = expected.shape[1]
        assert data.dtype == getattr(formats, fmt).dtype
        assert data.shape == (expected.shape[0], pad_contraction(size))
        assert data.is_contiguous()
        assert torch.equal(bits(data)[:, :size], expected)
        assert not bits(data)[:, size:].any()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("power_2", [False, True])
@pytest.mark.parametrize("largest", AMAXES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value(device, fmt, power_2, largest, dtype):
    x = all_values(dtype)
    parts = torch.tensor(largest, device=device)
    outputs = cast(x.to(device), parts, spec(fmt, power_2=power_2), row=True, column=True)
    check(outputs, x, largest, fmt, power_2=power_2)


@pytest.mark.parametrize("fmt", FORMATS)
def test_fp32_around_every_midpoint(device, fmt):
    table = oracle.TABLES[fmt]
    midpoints = ((table.values[1:] + table.values[:-1]) / 2).float()
    edges = torch.cat([midpoints, table.values.float(), torch.tensor([table.max * 2, oracle.FP32_MAX, math.inf])])
    near = torch.cat([edges, edges.nextafter(torch.tensor(0.0)), edges.nextafter(torch.tensor(math.inf))])
    x = torch.stack([near, -near])
    outputs = cast(x.to(device), torch.tensor(table.max, device=device), spec(fmt), row=True, column=True)
    check(outputs, x, table.max, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("power_2", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_scale_of_many_amaxes(device, fmt, power_2, epsilon):
    magnitudes = torch.randint(0, 0x7F7FFFFF, (200,), dtype=torch.int32).view(torch.float32)
    x = torch.ones(1, 1, device=device)
    for largest in [*AMAXES, *magnitudes.tolist()]:
        parts = torch.tensor([0.0, largest, largest / 2], device=device)
        outputs = cast(x, parts, spec(fmt, power_2=power_2, epsilon=epsilon))
        check(outputs, x, largest, fmt, power_2=power_2, epsilon=epsilon)


@pytest.mark.parametrize("shape", [(), (1,), (1024,), (1025,), (3, 700)])
def test_amax_is_the_largest_part(device, shape):
    parts = torch.rand(shape)
    x = torch.randn(20, 20)
    for layout in (parts.to(device), parts.to(device).expand(2, *shape).movedim(0, -1)):
        check(cast(x.to(device), layout, spec("E4M3")), x, parts.max().item(), "E4M3")


@pytest.mark.parametrize("largest", [5, 1029, 1279])
def test_any_part_may_be_the_largest(device, largest):
    """Whether they are read before the values are worked out or after, and in one step or in several."""
    parts = torch.rand(1280)
    parts[largest] = 8.0
    x, dy, both = torch.randn(70, 48), torch.randn(70, 48), torch.randn(70, 96)
    rule, given = spec("E5M2"), parts.to(device)
    gradient = activation_gradient(dy.to(device), both.to(device), "swiglu")
    for row, column in COPIES.values():
        check(cast(x.to(device), given, rule, row=row, column=column), x, 8.0, "E5M2")
        *copies, _ = cast_bias_grad(x.to(device), given, rule, row=row, column=column)
        check(tuple(copies), x, 8.0, "E5M2")
        worked_out = cast(gradient, given, rule, row=row, column=column)
        check(worked_out, materialize(gradient).cpu(), 8.0, "E5M2")


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("dtype", HIGH_PRECISION)
@pytest.mark.parametrize("shape", [(1, 1), (1, 100), (100, 1), (16, 16), (17, 31), (130, 257), (300, 64)])
def test_shapes_and_padding(device, copies, dtype, shape):
    row, column = COPIES[copies]
    x = torch.randn(shape, dtype=dtype)
    outputs = cast(x.to(device), amax(x.to(device)), spec("E4M3"), row=row, column=column)
    assert (outputs[0] is not None, outputs[1] is not None) == (row, column)
    check(outputs, x, oracle.amax(x), "E4M3")


ABOUT_FEW = [(1, 1), (3, 5), (64, 1024), (65, 1024), (65536, 1), (65537, 1), (1, 65536), (1, 65537), (5, 13107), (0, 8)]


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("shape", ABOUT_FEW, ids=str)
def test_without_an_amax_it_is_found(device, shape, copies):
    """Of few values in the same launch, of more in one before it: the bits are those of a given amax."""
    row, column = COPIES[copies]
    x = torch.randn(shape, dtype=torch.bfloat16).to(device)
    for quantizer in (spec("E4M3"), spec("E5M2", power_2=True, epsilon=0.5)):
        given = cast_bias_grad(x, amax(x), quantizer, row=row, column=column)
        for outputs in (cast_bias_grad(x, None, quantizer, row=row, column=column), given[:3]):
            alone = cast(x, None, quantizer, row=row, column=column)
            for a, b in zip(alone, outputs, strict=False):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(bits(a), bits(b))
        assert torch.equal(bits(cast_bias_grad(x, None, quantizer)[3]), bits(given[3]))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", HIGH_PRECISION)
def test_without_an_amax_in_any_layout(device, dtype, name):
    x = LAYOUTS[name](torch.randn(64, 128, dtype=dtype).to(device))
    check(cast(x, None, spec("E4M3"), row=True, column=True), x, oracle.amax(x.cpu()), "E4M3")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_an_amax_every_value(device, dtype):
    """That of the finite ones counts."""
    x = all_values(dtype)
    check(cast(x.to(device), None, spec("E5M2"), row=True, column=True), x, oracle.amax(x), "E5M2")


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (0, 64)])
def test_empty(device, shape):
    x = torch.empty(shape, dtype=torch.bfloat16, device=device)
    outputs = cast(x, amax(x), spec("E5M2"), row=True, column=True)
    check(outputs, x, 0.0, "E5M2")
    bias_grad = cast_bias_grad(x, amax(x), spec("E5M2"))[3]
    assert torch.equal(bias_grad.cpu(), torch.zeros(shape[1], dtype=torch.bfloat16))


@pytest.mark.parametrize("fmt", FORMATS)
def test_case_9_zeros_stay_zeros(device, fmt):
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    x[3] = 0
    outputs = cast(x.to(device), amax(x.to(device)), spec(fmt), row=True, column=True)
    check(outputs, x, oracle.amax(x), fmt)
    assert not bits(outputs[0])[3].any()
    zeros = torch.zeros(64, 128, device=device)
    row_data, _, scale = cast(zeros, amax(zeros), spec(fmt))
    assert scale.item() == 1
    assert not bits(row_data).any()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_case_14_what_is_not_finite_stays_visible(device, fmt, value):
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    expected = oracle.amax(x)
    x[5, 7] = value
    outputs = cast(x.to(device), amax(x.to(device)), spec(fmt), row=True, column=True)
    check(outputs, x, max(expected, oracle.amax(x)), fmt)
    assert (~outputs[0].float().isfinite()).nonzero().tolist() == [[5, 7]]
    x.fill_(value)
    check(cast(x.to(device), amax(x.to(device)), spec(fmt), row=True, column=True), x, 0.0, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", HIGH_PRECISION)
def test_case_16_transposed_store(device, fmt, dtype):
    x = torch.randn(512, 512, dtype=dtype).to(device)
    row_data, column_data, _ = cast(x, amax(x), spec(fmt), row=True, column=True)
    assert torch.equal(bits(column_data), bits(row_data).t())


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_case_16_transposed_store_in_many_configurations(fmt, config):
    x = torch.cat([all_values(torch.bfloat16), torch.randn(80, 256, dtype=torch.bfloat16)])
    parts, quantizer = torch.tensor(3.0), spec(fmt).bundle
    for view in (x, x.t()):
        plain = PLAIN[view.dtype].bundle
        got = kernel._cast_launch((view.cuda(),), plain, parts.cuda(), quantizer, True, True, config)
        expected = kernel._cast_ref((view,), plain, parts, quantizer, True, True)
        for g, e in zip(got, expected, strict=True):
            assert torch.equal(bits(g), bits(e))


def test_case_19_compiled_scale_has_the_same_bits(device):
    quantizer = spec("E4M3")

    def quantize(x):
        return cast(x, amax(x), quantizer, row=True, column=True)

    x = torch.randn(16 * 16, 768, dtype=torch.bfloat16, device=device)
    compiled = torch.compile(quantize, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(x), quantize(x), strict=True):
        assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("copies", COPIES)
def test_case_22_layouts(device, layout, copies):
    row, column = COPIES[copies]
    x = LAYOUTS[layout](torch.randn(200, 150, dtype=torch.bfloat16).to(device))
    outputs = cast(x, amax(x), spec("E5M2"), row=row, column=column)
    check(outputs, x.cpu(), oracle.amax(x.cpu()), "E5M2")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**23 + 16, 256), (65537, 32768)])
def test_case_30_more_than_2_31_elements(shape):
    x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    x[-1] = -3.5
    row_data, column_data, scale, bias_grad = cast_bias_grad(x, amax(x), spec("E4M3"), row=True, column=True)
    assert scale.item() == 2**-7
    assert (bias_grad == -3.5).all()
    assert (row_data[-1].float() == -448).all()
    assert (column_data[:, x.shape[0] - 1].float() == -448).all()
    assert not any(rows.any() for rows in row_data[:-1].view(torch.uint8).split(4096))
    assert all(int((rows != 0).sum()) == rows.shape[0] for rows in column_data.view(torch.uint8).split(16))
    transposed, _, _ = cast(x.t(), amax(x), spec("E4M3"))
    assert torch.equal(transposed.view(torch.uint8), column_data.view(torch.uint8))


@pytest.mark.gpu2
def test_case_32_second_device():
    x = torch.randn(100, 100)
    with torch.cuda.device(0):
        outputs = cast(x.to("cuda:1"), amax(x.to("cuda:1")), spec("E4M3"), row=True, column=True)
    assert {str(out.device) for out in outputs} == {"cuda:1"}
    check(outputs, x, oracle.amax(x), "E4M3")


GOLDEN_KEYS = sorted(key.removesuffix("/data") for key in goldens() if "/current_" in key and key.endswith("/data"))


@pytest.mark.parametrize("key", GOLDEN_KEYS)
def test_transformer_engine_goldens(device, key):
    _, kind, shape, name = key.split("/")
    _, fmt, pow2, eps = name.split("_")
    power_2, epsilon = pow2 == "pow21", float(eps.removeprefix("eps"))
    x = goldens()[f"quant/{kind}/{shape}/x"].to(device)
    quantizer = spec(fmt.upper(), power_2=power_2, epsilon=epsilon)
    row_data, _, scale = cast(x, amax(x), quantizer)
    codes, scale_inv = goldens()[f"{key}/data"], goldens()[f"{key}/scale_inv"]
    differing = oracle.steps(bits(row_data)[:, : x.shape[1]], codes)
    ulps = (bits(scale) - bits(scale_inv.squeeze())).abs().item()
    if power_2:
        assert ulps == 0
        assert torch.equal(bits(row_data)[:, : x.shape[1]], codes)
    else:  # the division on TE's side is approximate
        assert ulps <= 1
        assert differing.max() <= 1
        assert differing.float().mean() <= 0.015


def test_goldens_are_all_there():
    assert len(GOLDEN_KEYS) == 8 * 8


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x_MK": torch.zeros(2, 3, 4)}, ValueError, r"cast: x_MK must be 2-D, got \(2, 3, 4\)\. Flatten"),
        ({"x_MK": torch.zeros(2, 3, dtype=torch.float64)}, TypeError, "cast: x_MK must be one of .* got torch.float64"),
        ({"amax_P": torch.zeros(1, dtype=torch.bfloat16)}, TypeError, "cast: amax_P must be fp32, got torch.bfloat16"),
        ({"amax_P": torch.zeros(0)}, ValueError, r"cast: amax_P must not be empty, got \(0,\)"),
        ({"quantizer": "E4M3"}, TypeError, "cast: quantizer must be a Float8CurrentScalingQuantizer, got str"),
        ({"row": False}, ValueError, "cast: row or column must be True"),
    ],
)
def test_errors(change, error, text):
    arguments = {"x_MK": torch.zeros(2, 3), "amax_P": torch.zeros(1), "quantizer": spec("E4M3"), "row": True} | change
    with pytest.raises(error, match=text):
        cast(**arguments)


def test_cast_bias_grad_errors():
    with pytest.raises(TypeError, match=r"cast_bias_grad: dtype must be one of .* got torch.int32"):
        cast_bias_grad(torch.zeros(2, 3), torch.zeros(1), spec("E4M3"), dtype=torch.int32)
    with pytest.raises(ValueError, match="cast_bias_grad: row or column must be True"):
        cast_bias_grad(torch.zeros(2, 3), torch.zeros(1), spec("E4M3"), row=False)


def test_pad_contraction():
    assert [pad_contraction(n) for n in (0, 1, 15, 16, 17, 4096)] == [0, 16, 16, 16, 32, 4096]
