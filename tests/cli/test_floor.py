"""The floor's arithmetic, against the measured baseline of the same cases."""

import pytest

import lowp
from lowp.cli.bench.cases import MODULES
from lowp.cli.bench.floor import COPY_TB_S, FAST_CEILING, SPLIT_CEILING, SPLIT_E5M2_CEILING, floor

CASES = {case.name: case for case in MODULES}
LINEAR_BIAS = CASES["linear+bias 4096x4096"]
NORM_LINEAR = CASES["RMSNorm+linear 4096x6144"]
SWIGLU = CASES["RMSNorm+SwiGLU MLP 4096/14336"]
GELU = CASES["LayerNorm+GELU MLP 4096/16384"]
CURRENT = lowp.recipe.Float8CurrentScaling()

RATIOS = [
    # bf16 torch.compile's ms (torch 2.11.0+cu130 on one H200), and how much faster current scaling can be
    (LINEAR_BIAS, 8192, 1.14, 1.44, 1.46),
    (LINEAR_BIAS, 16384, 2.49, 1.60, 1.62),
    (NORM_LINEAR, 8192, 1.85, 1.53, 1.55),
    (NORM_LINEAR, 16384, 3.83, 1.61, 1.63),
    (SWIGLU, 16384, 27.5, 1.71, 1.73),
    (GELU, 16384, 20.9, 1.71, 1.73),
]


@pytest.mark.parametrize(("case", "tokens", "bf16_ms", "lowest", "highest"), RATIOS)
def test_how_much_faster_current_scaling_can_be(case, tokens, bf16_ms, lowest, highest):
    least = floor(case, tokens, CURRENT)
    assert lowest < bf16_ms / least.ms < highest
    assert least.slowest_ms / least.fastest_ms < 1.03


def test_bytes_of_current_scaling():
    T, N, K = 8192, 4096, 4096
    each = 2 * 2 + 2 * 1  # bf16 read for amax and for the cast, FP8 written along both axes
    assert floor(LINEAR_BIAS, T, CURRENT).moved_bytes == each * (T * K + N * K + T * N)


def test_bytes_of_operands_that_are_worked_out():
    """A norm's backward, and the activation's input and gradient where the operand is made from those."""
    T, K, F = 16384, 4096, 14336
    weights = (2 * F * K + F * K) * (2 * 2 + 2 * 1)
    read = 2 * (K + 3 * F + 2 * F + K)  # x, h and da, h, dy: for amax and for the cast
    written = 2 * (K + 2 * F + F + K)  # along both axes
    norm = 3 * K
    assert floor(SWIGLU, T, CURRENT).moved_bytes == T * (2 * (read + norm) + written) + weights


def test_each_gemm_has_the_ceiling_of_its_accumulation_and_formats():
    T = 16384
    flop = 2 * T * 4096 * 4096
    all_fast = lowp.recipe.MMParams(use_split_accumulator=False)
    e4m3 = lowp.recipe.Float8CurrentScaling(fp8_format=lowp.recipe.Format.E4M3)
    fast = lowp.recipe.Float8CurrentScaling(fp8_gemm_dgrad=all_fast, fp8_gemm_wgrad=all_fast)
    for recipe, backward in ((CURRENT, SPLIT_E5M2_CEILING), (e4m3, SPLIT_CEILING), (fast, FAST_CEILING)):
        least = floor(LINEAR_BIAS, T, recipe)
        copy_ms = least.moved_bytes / COPY_TB_S / 1e9
        assert least.fastest_ms - copy_ms == pytest.approx(flop * (1 / FAST_CEILING.high + 2 / backward.high) / 1e9)
        assert least.slowest_ms - copy_ms == pytest.approx(flop * (1 / FAST_CEILING.low + 2 / backward.low) / 1e9)
        assert least.fastest_ms < least.ms < least.slowest_ms


def test_an_unknown_quantizer_has_no_floor(monkeypatch):
    monkeypatch.setattr("lowp.cli.bench.floor._READS", {})
    assert floor(LINEAR_BIAS, 8192, CURRENT) is None
