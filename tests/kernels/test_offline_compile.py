"""Every Triton kernel, in every configuration that a launcher can pick, compiles for Hopper: no GPU needed."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import lowp.kernels
from lowp.formats import E4M3, E5M2
from lowp.kernels import amax, bias_grad, cast, dequantize, transpose

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32", E4M3: "*fp8e4nv", E5M2: "*fp8e5"}


@dataclass
class Build:
    """One specialization: types of the run-time arguments (those of `aligned` are multiples of 16), and constants."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    aligned: set[str] = field(default_factory=set)
    maxnreg: int | None = None

    def compile(self) -> Any:
        names = self.kernel.arg_names
        assert set(names) == self.types.keys() | self.constants.keys()
        source = ASTSource(
            fn=self.kernel,
            signature={name: self.types.get(name, "constexpr") for name in names},
            constexprs=self.constants,
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in self.aligned},
        )
        return triton.compile(source, target=HOPPER, options={"num_warps": self.num_warps, "maxnreg": self.maxnreg})

    def __str__(self) -> str:
        return "-".join([str(v) for v in (*self.types.values(), *self.constants.values())]).replace("*", "")


def amax_builds() -> Iterator[Build]:
    for dtype, config in itertools.product(("bf16", "fp16", "fp32"), (amax.DENSE, amax.STRIDED)):
        types = dict.fromkeys(["rows", "cols", "stride_r", "stride_c", "blocks", "col_blocks"], "i32")
        types |= {"x_ptr": POINTERS[dtype], "amax_ptr": "*fp32"}
        constants = {"BLOCK_R": config.block_r, "BLOCK_C": config.block_c}
        yield Build(amax._amax_kernel, dict(types), dict(constants), config.num_warps)
        for name in ("rows", "stride_c"):
            del types[name]
        aligned = {"x_ptr", "amax_ptr", "cols", "stride_r"}
        yield Build(amax._amax_kernel, types, constants | {"rows": 1, "stride_c": 1}, config.num_warps, aligned)


def cast_builds() -> Iterator[Build]:
    flags = [
        (True, False, False, cast.ROW_ONLY),
        (False, True, False, cast.TRANSPOSING),
        (True, True, False, cast.TRANSPOSING),
        (True, False, True, cast.TRANSPOSING),
        (False, True, True, cast.TRANSPOSING),
        (True, True, True, cast.TRANSPOSING),
    ]
    for (dtype, fmt), (row, column, bias, config) in itertools.product(
        [("bf16", E4M3), ("bf16", E5M2), ("fp32", E5M2), ("fp16", E5M2)], flags
    ):
        types = dict.fromkeys(["M", "K", "M_padded", "K_padded", "stride_m", "stride_k", "P"], "i32")
        types |= {"x_ptr": POINTERS[dtype], "amax_ptr": "*fp32", "row_ptr": POINTERS[fmt], "scale_ptr": "*fp32"}
        constants = {"FMT_MAX": fmt.max, "POWER_2": fmt is E5M2, "ROW": row, "COLUMN": column, "BIAS": bias}
        constants |= {"BLOCK_M": config.block_m, "BLOCK_K": config.block_k}
        constants |= {"BLOCK_P": cast.BLOCK_P}
        for pointer, kind, present in (("column_ptr", POINTERS[fmt], column), ("partial_ptr", "*fp32", bias)):
            if present:
                types[pointer] = kind
            else:
                constants[pointer] = None
        aligned = set(types)
        types["epsilon"] = "fp32"

        def build(ones: Iterable[str], aligned: set[str], types=types, constants=constants, config=config) -> Build:
            rest = {name: kind for name, kind in types.items() if name not in ones}
            known = constants | dict.fromkeys(ones, 1)
            return Build(cast._cast_kernel, rest, known, config.num_warps, aligned - set(ones), config.maxnreg)

        yield build(["stride_k"], aligned)
        if dtype == "bf16":
            yield build(["stride_m"], aligned)
        if (dtype, fmt, row, column, bias) == ("bf16", E5M2, True, True, True):
            yield build([], {"M_padded", "K_padded"}, config=cast.TRANSPOSING_SCATTERED)
        if row and column and (dtype, fmt) != ("bf16", E4M3):
            scattered = partial(build, aligned={"M_padded", "K_padded"}, config=cast.TRANSPOSING_SCATTERED)
            yield scattered(["M", "stride_k"])
            yield scattered(["K", "stride_m", "stride_k"])


def bias_grad_builds() -> Iterator[Build]:
    config = bias_grad.PARTIAL
    constants = {"GROUP": bias_grad.GROUP, "BLOCK_N": config.block_n}
    for dtype in ("bf16", "fp16", "fp32"):
        types = dict.fromkeys(["M", "N", "stride_m", "stride_n"], "i32")
        types |= {"dy_ptr": POINTERS[dtype], "partial_ptr": "*fp32"}
        yield Build(bias_grad._partial_kernel, dict(types), constants, config.num_warps)
        aligned = {"dy_ptr", "partial_ptr", "M", "N", "stride_m"}
        del types["stride_n"]
        yield Build(bias_grad._partial_kernel, types, constants | {"stride_n": 1}, config.num_warps, aligned)
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
            yield Build(dequantize._dequantize_kernel, types, {"BLOCK": dequantize._BLOCK}, 8, aligned)


def transpose_builds() -> Iterator[Build]:
    types = {"source": "*u8", "out": "*u8"} | dict.fromkeys(["M", "K", "Kp", "Mp"], "i32")
    for aligned in ({"Kp", "Mp"}, {*types}):
        yield Build(transpose._transpose_kernel, types, {"BLOCK": transpose.BLOCK}, 4, aligned)


BUILDS = [*amax_builds(), *cast_builds(), *bias_grad_builds(), *dequantize_builds(), *transpose_builds()]


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_compiles_for_hopper(build, tmp_path):
    compiled = build.compile()
    ptx, code = compiled.asm["ptx"], sass(compiled.asm["cubin"], tmp_path)
    assert ".ftz" not in ptx  # subnormals are kept, as on the CPU
    assert "div.full" not in ptx  # the division is IEEE's (CASES 19)
    assert "div.approx" not in ptx
    if {"stride_m", "stride_k"} - build.types.keys():  # some axis is contiguous
        assert code.count(" STL") <= 1  # then registers are not spilled
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
