"""The floor's arithmetic, against the measured baseline of the same cases."""

import pytest

import lowp
from lowp.cli.bench.cases import MODULES
from lowp.cli.bench.floor import COPY_TB_S, FAST_CEILING, SPLIT_CEILING, SPLIT_E5M2_CEILING, floor

(LINEAR_BIAS,) = [case for case in MODULES if case.name == "linear+bias 4096x4096"]
BF16_COMPILED_MS = {8192: 1.14, 16384: 2.49}  # torch 2.11.0+cu130 on one H200
CURRENT = lowp.recipe.Float8CurrentScaling()


@pytest.mark.parametrize(("tokens", "lowest", "highest"), [(8192, 1.44, 1.46), (16384, 1.60, 1.62)])
def test_how_much_faster_current_scaling_can_be(tokens, lowest, highest):
    least = floor(LINEAR_BIAS, tokens, CURRENT)
    assert lowest < BF16_COMPILED_MS[tokens] / least.ms < highest
    assert least.slowest_ms / least.fastest_ms < 1.03


def test_bytes_of_current_scaling():
    T, N, K = 8192, 4096, 4096
    each = 2 * 2 + 2 * 1  # bf16 read for amax and for the cast, FP8 written along both axes
    assert floor(LINEAR_BIAS, T, CURRENT).moved_bytes == each * (T * K + N * K + T * N)


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
