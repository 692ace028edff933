"""Every Triton kernel, in every configuration that a launcher can pick, compiles for Hopper: no GPU needed."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lowp.kernels
from lowp.formats import E4M3, E5M2
from lowp.kernels import amax, bias_grad, cast_kernel, dequantize, transpose
from lowp.kernels.sources import load_plain, load_plain_kept

triton = pytest.importorskip("triton")
from tests.kernels.builds import POINTERS, TRITON_DTYPES, Build, cast_types  # noqa: E402
from tests.kernels.computed_builds import computed_builds  # noqa: E402
from tests.kernels.norm_builds import norm_builds  # noqa: E402


def plain(dtype: str, *strides: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Operands and constants of a tensor's own values."""
    constants = {"LOAD": load_plain, "DTYPE": TRITON_DTYPES[dtype], "FUNCTION": None, "GATE": None, "PARAMS": ()}
    return {"operands": (POINTERS[dtype], *strides)}, constants


def amax_builds() -> Iterator[Build]:
    for dtype, config in itertools.product(("bf16", "fp16", "fp32"), (amax.DENSE, amax.STRIDED)):
        operands, source = plain(dtype, "i32", "i32")
        types = dict.fromkeys(["rows", "cols", "blocks", "col_blocks"], "i32") | {"amax_ptr": "*fp32"}
        constants = source | {"BLOCK_R": config.block_r, "BLOCK_C": config.block_c, "STAGES": config.stages}
        constants["RISING"] = False
        yield Build(amax._amax_kernel, types | operands, dict(constants), config.num_warps)
        del types["rows"]
        operands, _ = plain(dtype, "i32", 1)
        aligned = {"operands", "amax_ptr", "cols"}
        yield Build(amax._amax_kernel, types | operands, constants | {"rows": 1}, config.num_warps, aligned)


def cast_builds() -> Iterator[Build]:
    flags = [
        (True, False, False, cast_kernel.ROW_ONLY),
        (False, True, False, cast_kernel.TRANSPOSING),
        (True, True, False, cast_kernel.TRANSPOSING),
        (True, False, True, cast_kernel.TRANSPOSING),
        (False, True, True, cast_kernel.TRANSPOSING),
        (True, True, True, cast_kernel.TRANSPOSING),
    ]
    few = [("bf16", E4M3, True, "*bf16"), ("bf16", E5M2, True, "*fp32")]
    few += [("fp32", E4M3, True, "*fp32"), ("fp16", E5M2, True, "*fp16")]
    many = [("bf16", E4M3, False, "*fp32"), ("bf16", E5M2, False, "*fp32")]
    many += [("fp32", E5M2, False, "*fp32"), ("fp16", E5M2, False, "*fp32")]
    for (dtype, fmt, few_values, sums), (row, column, bias, config) in itertools.product([*many, *few], flags):
        amax_block = cast_kernel.amax_block(256, 1, config.num_warps) if few_values else (None, None)
        types, constants = cast_types(fmt, row, column, bias, amax_block=amax_block, sums=sums)
        constants |= {"HALVES": 1, "LOAD_FIRST": load_plain_kept if bias else None}

        def build(
            *strides: Any,
            ones: Iterable[str] = (),
            aligned: set[str] | None = None,
            config=config,
            types=types,
            constants=constants,
            dtype=dtype,
            few_values=few_values,
        ) -> Build:
            operands, source = plain(dtype, *strides)
            rest = {name: kind for name, kind in types.items() if name not in ones}
            known = constants | dict.fromkeys(ones, 1) | source
            known |= {"BLOCK_M": config.block_m, "BLOCK_K": config.block_k}
            aligned = {*rest, "operands"} - {"epsilon"} if aligned is None else aligned
            maxnreg = None if few_values else config.maxnreg
            return Build(cast_kernel._cast_kernel, rest | operands, known, config.num_warps, aligned, maxnreg)

        yield build("i32", 1)
        if dtype == "bf16":
            yield build(1, "i32")
        if few_values:
            continue
        scattered = {"aligned": {"M_padded", "K_padded"}, "config": cast_kernel.TRANSPOSING_SCATTERED}
        if (dtype, fmt, row, column, bias) == ("bf16", E5M2, True, True, True):
            yield build("i32", "i32", **scattered)
        if row and column and (dtype, fmt) != ("bf16", E4M3):
            yield build("i32", 1, ones=["M"], **scattered)
            yield build(1, 1, ones=["K"], **scattered)


def bias_grad_builds() -> Iterator[Build]:
    types: dict[str, Any]
    for dtype, by_rows in itertools.product(("bf16", "fp16", "fp32"), (False, True)):
        config = bias_grad.partial_config(wide=dtype == "fp32", by_rows=by_rows)
        constants = {"HALVES": 1, "GROUP": bias_grad.GROUP, "BLOCK_N": config.block_n}
        types = {"M": "i32", "N": "i32", "sums_ptr": "*fp32"}
        operands, source = plain(dtype, "i32", 1 if by_rows else "i32")
        aligned = {*types, "operands"} if by_rows else set()
        known = constants | source
        yield Build(
            bias_grad._partial_kernel, types | operands, known, config.num_warps, aligned, maxnreg=config.maxnreg
        )
    config = bias_grad.TOTAL
    constants = {"GROUP": bias_grad.GROUP, "BLOCK_N": config.block_n}
    for dtype in ("bf16", "fp16", "fp32"):
        types = {"partial_ptr": "*fp32", "out_ptr": POINTERS[dtype], "G": "i32", "N": "i32"}
        yield Build(bias_grad._total_kernel, types, constants, config.num_warps)
        yield Build(bias_grad._total_kernel, types, constants, config.num_warps, {*types} - {"G"})


def dequantize_builds() -> Iterator[Build]:
    for fmt, dtype in itertools.product((E4M3, E5M2), ("bf16", "fp16", "fp32")):
        types = dict.fromkeys(["total", "columns", "padded_columns"], "i32")
        types |= {"data": POINTERS[fmt], "scale": "*fp32", "out": POINTERS[dtype]}
        for aligned in ({"padded_columns"}, {*types}):
            yield Build(
                dequantize._dequantize_kernel, types, {"BLOCK": dequantize._BLOCK}, 8, aligned, enable_fp_fusion=True
            )


def transpose_builds() -> Iterator[Build]:
    types = {"source": "*u8", "out": "*u8"} | dict.fromkeys(["M", "K", "Kp", "Mp"], "i32")
    for aligned in ({"Kp", "Mp"}, {*types}):
        yield Build(transpose._transpose_kernel, types, {"BLOCK": transpose.BLOCK}, 4, aligned)


BUILDS = [
    *computed_builds(),
    *amax_builds(),
    *cast_builds(),
    *bias_grad_builds(),
    *norm_builds(),
    *dequantize_builds(),
    *transpose_builds(),
]


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_compiles_for_hopper(build, tmp_path):
    compiled = build.compile()
    ptx, code = compiled.asm["ptx"], sass(compiled.asm["cubin"], tmp_path)
    kept = ptx.replace("ex2.approx.ftz.f32", "").replace("rcp.approx.ftz.f32", "")  # the two of a sigmoid
    assert ".ftz" not in kept  # subnormals are kept, as on the CPU
    assert "div.full" not in ptx  # the division is IEEE's (CASES 19)
    assert "div.approx" not in ptx
    if not build.scattered:
        assert code.count(" STL") <= build.spills
    for conversion in re.findall(r"F2FP\.SATFINITE\.E[45]M[23].*?;", code):
        assert re.search(r", RZ\s*;", conversion)  # two merged conversions can break the stored bytes (CASES 16)


def sass(cubin: bytes, folder: Path) -> str:
    """The machine code, disassembled."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, "-sass", path], check=True, capture_output=True, text=True).stdout


def test_every_kernel_is_built():
    names = [module.name for module in pkgutil.iter_modules(lowp.kernels.__path__, "lowp.kernels.")]
    defined = {
        name
        for module in map(importlib.import_module, names)
        for name, value in vars(module).items()
        if name.endswith("_kernel") and isinstance(value, triton.JITFunction)
    }
    assert defined == {build.kernel.__name__ for build in BUILDS}
