"""Builds of every kernel that takes a source, on sources of values that are worked out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from lowp.formats import E4M3, E5M2
from lowp.kernels import activated, amax, bias_grad, cast_kernel, materialize
from lowp.kernels.activations import ACTIVATIONS
from lowp.kernels.dropped import load_dropped
from lowp.kernels.normalized import load_normalized
from tests.kernels.builds import POINTERS, TRITON_DTYPES, Build, cast_types


def activation_source(name: str, gradient: bool, dtype: str = "bf16", *strides: Any) -> Computed:
    """Operands, constants and halves of an activation or of its gradient."""
    activation = ACTIVATIONS[name]
    gated = activation.gate is not None
    matrix = (POINTERS[dtype], *(strides or ("i32", 1)))
    constants = {
        "LOAD": activated.load_activation_gradient if gradient else activated.load_activated,
        "DTYPE": TRITON_DTYPES[dtype],
        "FUNCTION": activation.function.triton,
        "GATE": activation.gate.triton if activation.gate else None,
        "PARAMS": tuple(activation.defaults.values()),
    }
    operands = (*(matrix if gradient else ()), *matrix, "i32" if gated else None)
    rising = activation.function.rising and not (gated or gradient)
    return Computed(name, operands, constants, 1 + (gated and gradient), rising)


def vector_source(label: str, load: Any, params: tuple[Any, ...], *vectors: Any, dtype: str = "bf16") -> Computed:
    """Operands and constants of a source that reads vectors beside a matrix."""
    constants = {"LOAD": load, "DTYPE": TRITON_DTYPES[dtype], "FUNCTION": None, "GATE": None, "PARAMS": params}
    return Computed(label, (POINTERS[dtype], "i32", 1, *vectors), constants, 1)


class Computed(NamedTuple):
    """A source of values that are worked out."""

    label: str
    operands: tuple[Any, ...]
    constants: dict[str, Any]
    halves: int
    rising: bool = False

    @property
    def wide(self) -> bool:
        """Whether the matrices are fp32."""
        return self.operands[0] == "*fp32"

    @property
    def by_rows(self) -> bool:
        """Whether their rows are contiguous."""
        return self.operands[2] == 1

    def build(
        self, kernel: Any, types: dict[str, Any], constants: dict[str, Any], config: Any, **options: Any
    ) -> Build:
        """The kernel on this source, all run-time arguments but fp32 multiples of 16."""
        constants = self.constants | constants
        if "HALVES" in kernel.arg_names:
            constants["HALVES"] = self.halves
        aligned = {"operands", *[name for name, kind in types.items() if kind != "fp32"]}
        types = types | {"operands": self.operands}
        return Build(kernel, types, constants, config.num_warps, aligned, label=self.label, **options)


RMS_NORM = vector_source("RMSNorm", load_normalized, (True,), None, "*fp32", "*bf16", None)
LAYER_NORM = vector_source("LayerNorm", load_normalized, (False,), "*fp32", "*fp32", "*bf16", "*bf16")
DROPOUT = vector_source("dropout", load_dropped, (2**30, 4 / 3), "*i64")
USUAL = ("swiglu", "gelu")
UNUSUAL = [name for name in ACTIVATIONS if name not in USUAL]


def computed_builds() -> Iterator[Build]:
    for source in (*[activation_source(name, False) for name in USUAL], RMS_NORM, LAYER_NORM, DROPOUT):
        yield from tensor_builds(source)
        yield from computed_cast_builds(source, E4M3, [(True, False, False), (True, True, False)])
    for name in USUAL:
        gradient = activation_source(name, True)
        yield from tensor_builds(gradient)
        flags = [(True, False, False), (False, True, False), (True, False, True), (True, True, True)]
        yield from computed_cast_builds(gradient, E5M2, flags)
    for name in UNUSUAL:
        value = activation_source(name, False)
        yield from computed_cast_builds(value, E4M3, [(True, True, False)])
        if value.rising:
            yield from tensor_builds(value)
        yield from computed_cast_builds(activation_source(name, True), E5M2, [(True, True, True)])
    for source in (
        activation_source("geglu", True, "fp32"),
        activation_source("swiglu", True, "fp16", 1, "i32"),
        activation_source("clamped_swiglu", True, "bf16", 1, "i32"),
    ):
        yield from tensor_builds(source)
        yield from computed_cast_builds(source, E5M2, [(True, True, True)])


def tensor_builds(source: Computed) -> Iterator[Build]:
    """What gives a maximum, the values or their sums."""
    config: Any = amax.COMPUTED
    types = dict.fromkeys(["rows", "cols", "blocks", "col_blocks"], "i32") | {"amax_ptr": "*fp32"}
    constants: dict[str, Any] = {"BLOCK_R": config.block_r, "BLOCK_C": config.block_c, "STAGES": config.stages}
    constants["RISING"] = source.rising
    yield source.build(amax._amax_kernel, types, constants, config)
    config = materialize.TILE
    types = {"M": "i32", "K": "i32", "out_ptr": f"*{source.constants['DTYPE']}"}
    constants = {"BLOCK_M": config.block_m, "BLOCK_K": config.block_k}
    yield source.build(materialize._materialize_kernel, types, constants, config)
    config = bias_grad.partial_config(wide=source.wide, by_rows=source.by_rows)
    types = {"M": "i32", "N": "i32", "sums_ptr": "*fp32"}
    constants = {"GROUP": bias_grad.GROUP, "BLOCK_N": config.block_n}
    yield source.build(bias_grad._partial_kernel, types, constants, config, maxnreg=config.maxnreg)


def computed_cast_builds(source: Computed, fmt: Any, flags: list[tuple[bool, bool, bool]]) -> Iterator[Build]:
    """Casts that write a row copy, a column copy and sums; the last one also of few values."""
    for row, column, bias in flags:
        config = cast_kernel.ROW_ONLY
        if column or bias:
            shape = {"wide": source.wide, "by_rows": source.by_rows, "summing": bias}
            config = cast_kernel.computed_config(source.halves, **shape)
        types, constants = cast_types(fmt, row, column, bias)
        tile = {"LOAD_FIRST": None, "BLOCK_M": config.block_m, "BLOCK_K": config.block_k}
        yield source.build(cast_kernel._cast_kernel, types, constants | tile, config, maxnreg=config.maxnreg)
        if (row, column, bias) == flags[-1]:
            width = 1024 if source.constants["LOAD"] is load_normalized else 256  # tiles of 4 rows, or of 16
            amax_block = cast_kernel.amax_block(width, source.halves, config.num_warps)
            types, constants = cast_types(fmt, row, column, bias, amax_block=amax_block, sums="*bf16")
            yield source.build(cast_kernel._cast_kernel, types, constants | tile, config)
