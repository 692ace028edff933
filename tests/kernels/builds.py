"""Specializations of Triton kernels, compiled for Hopper without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lowp.formats import E4M3, E5M2
from lowp.kernels import cast_kernel

HOPPER = GPUTarget("cuda", 90, 32)
TRITON_DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
POINTERS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32", E4M3: "*fp8e4nv", E5M2: "*fp8e5"}


@dataclass
class Build:
    """One specialization: types of the run-time arguments (those of `aligned` are multiples of 16), and constants.

    The types of a tuple's items are a tuple, in which 1 and None are constants. `spills`: at most so many instructions
    store registers.
    """

    kernel: Any
    types: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int
    aligned: set[str] = field(default_factory=set)
    maxnreg: int | None = None
    enable_fp_fusion: bool = False
    label: str = ""
    spills: int = 1

    def compile(self) -> Any:
        names = self.kernel.arg_names
        assert set(names) == self.types.keys() | self.constants.keys()
        paths = dict(self._paths())
        constants: dict[Any, Any] = {path: kind for path, (_, kind) in paths.items() if kind in (1, None)}
        aligned = [p for p, (name, _) in paths.items() if name in self.aligned and p not in constants]
        source = ASTSource(
            fn=self.kernel,
            signature={name: _signature(self.types.get(name)) for name in names},
            constexprs=constants | self.constants,
            attrs={path: [["tt.divisibility", 16]] for path in aligned},
        )
        options = {"num_warps": self.num_warps, "maxnreg": self.maxnreg, "enable_fp_fusion": self.enable_fp_fusion}
        return triton.compile(source, target=HOPPER, options=options)

    def _paths(self) -> Iterator[tuple[tuple[int, ...], tuple[str, Any]]]:
        """Where each run-time argument, or item of one, is: its path, its argument's name, its type."""
        for position, name in enumerate(self.kernel.arg_names):
            kind = self.types.get(name)
            if isinstance(kind, tuple):
                yield from (((position, i), (name, item)) for i, item in enumerate(kind))
            elif kind is not None:
                yield (position,), (name, kind)

    @property
    def scattered(self) -> bool:
        """Whether no axis of some matrix is known to be contiguous."""
        kinds = self.types.get("operands", (1,))
        return "i32" in kinds and 1 not in kinds

    def __str__(self) -> str:
        words = [_word(v) for v in (*self.types.values(), *self.constants.values())]
        return "-".join([self.kernel.__name__, self.label, *words]).replace("*", "").replace(" ", "")


def _signature(kind: Any) -> Any:
    if isinstance(kind, tuple):
        return tuple([_signature(item) for item in kind])
    return kind if isinstance(kind, str) else "constexpr"


def _word(value: Any) -> str:
    return getattr(value, "__name__", str(value))


def cast_types(
    fmt: Any,
    row: bool,
    column: bool,
    bias: bool,
    *,
    amax_block: tuple[int | None, int | None] = (None, None),
    sums: str = "*fp32",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Types and constants of what a cast writes.

    amax_block: of few values, of which it finds the amax. sums: where partial sums go, or those of a single group.
    """
    types = dict.fromkeys(["M", "K", "M_padded", "K_padded", "P"], "i32")
    types |= {"row_ptr": POINTERS[fmt], "scale_ptr": "*fp32", "epsilon": "fp32"}
    constants = {"FMT_MAX": fmt.max, "POWER_2": fmt is E5M2, "ROW": row, "COLUMN": column, "BIAS": bias}
    constants |= {"BLOCK_P": cast_kernel.BLOCK_P, "BLOCK_R": amax_block[0], "BLOCK_C": amax_block[1]}
    pointers = [
        ("amax_ptr", "*fp32", amax_block[0] is None),
        ("column_ptr", POINTERS[fmt], column),
        ("sums_ptr", sums, bias),
    ]
    for pointer, kind, present in pointers:
        (types if present else constants)[pointer] = kind if present else None
    return types, constants
