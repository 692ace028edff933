"""Sources: where the matrix comes from that a kernel quantizes, sums or stores.

    values_MK = round(f(tensors))           computed in fp32, rounded to the source's dtype before anything uses them

A kernel that takes a source works the values out where it needs them, so they are never written to memory; its results
are bit for bit those of the values as a tensor. A new source works with every such kernel, and the other way round.

Shape legend: M = rows (tokens), K = columns of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.errors import fail
from lowp.formats import HIGH_PRECISION
from lowp.kernels._triton import jit, tl
from lowp.values import Value


class Kernel(NamedTuple):
    """How a Triton kernel gets the values.

    Attributes:
        load: `@jit` function `(operands, m, k, M, K, DTYPE, FUNCTION, GATE, PARAMS) -> (tile, ...)`: the values of
            rows `m [BLOCK_M, 1]` and columns `k [1, BLOCK_K]`, both int64, rounded to `DTYPE` (tiles of it, or of
            fp32), and 0 where `m >= M` or `k >= K`; where the source has two halves, K is the width of one, and there
            are two tiles, the second of columns `k + K`.
        operands: tensors, their strides and other integers, or None.
        function: `@jit` function that `load` is given as `FUNCTION`, or None.
        gate: likewise, as `GATE`.
        params: numbers that `load` is given as `PARAMS`.
        rising: whether the values are `function` of one tensor's, which `load` gives for `identity`, and their amax is
            found as `Function.rising` says (lowp.kernels.activation_functions).
    """

    load: Any
    operands: tuple[Any, ...]
    function: Any = None
    gate: Any = None
    params: tuple[float, ...] = ()
    rising: bool = False

    def constants(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """`LOAD, DTYPE, FUNCTION, GATE, PARAMS`, for values of `dtype`."""
        return self.load, TRITON_DTYPES[dtype], self.function, self.gate, self.params


TRITON_DTYPES: dict[torch.dtype, Any] = (
    {} if tl is None else {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
)

Tensors = Sequence[Tensor]
"""The tensors of a source, as operators get them."""


class SourceSpec(Value):
    """Base of what says how values are obtained from tensors: a frozen value, which crosses into operators.

    Attributes:
        dtype: bf16 | fp16 | fp32, to which the values are rounded.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        """Check the fields, then work the bundle out.

        Raises:
            TypeError: `dtype` is another.
        """
        if self.dtype not in HIGH_PRECISION:
            name = type(self).__name__
            fail(name, f"dtype must be one of {HIGH_PRECISION}", got=self.dtype, error=TypeError)
        super().__post_init__()

    def check(self, op: str, tensors: Tensors) -> None:
        """Raise ValueError or TypeError unless the tensors fit each other; `op` is what the user called."""
        raise NotImplementedError

    def shape(self, tensors: Tensors) -> tuple[int, int]:
        """M and K of the values."""
        raise NotImplementedError

    def produce_ref(self, tensors: Tensors) -> Tensor:
        """The values, in plain torch."""
        raise NotImplementedError

    def kernel(self, tensors: Tensors) -> Kernel:
        """The values, in Triton."""
        raise NotImplementedError

    @property
    def halves(self) -> int:
        """How many tiles `Kernel.load` gives at a time: 2 where each half of the columns needs the same operands."""
        return 1


class Source(NamedTuple):
    """A matrix that is not in memory, but is known how to get.

    Attributes:
        tensors: what the values are computed from.
        spec: how.
    """

    tensors: tuple[Tensor, ...]
    spec: SourceSpec

    @property
    def shape(self) -> tuple[int, int]:
        """M and K of the values."""
        return self.spec.shape(self.tensors)

    @property
    def rows(self) -> int:
        """M."""
        return self.shape[0]

    @property
    def columns(self) -> int:
        """K."""
        return self.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.spec.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.tensors[0].device


@dataclass(frozen=True, kw_only=True)
class Plain(SourceSpec):
    """The tensor itself.

    Tensors: `x_MK` of `dtype`, any strides.

    Attributes:
        dtype: that of the tensor.
    """

    dtype: torch.dtype

    def check(self, op: str, tensors: Tensors) -> None:
        """Raise unless it is a matrix of the dtype."""
        check_count(op, tensors, 1)
        x_MK = tensors[0]
        check_matrix(op, "x_MK", x_MK)
        if x_MK.dtype != self.dtype:
            fail(op, f"x_MK must be {self.dtype}, as its source says", got=x_MK.dtype, error=TypeError)

    def shape(self, tensors: Tensors) -> tuple[int, int]:
        """That of the tensor."""
        M, K = tensors[0].shape
        return M, K

    def produce_ref(self, tensors: Tensors) -> Tensor:
        """The tensor."""
        return tensors[0]

    def kernel(self, tensors: Tensors) -> Kernel:
        """One load."""
        return Kernel(load_plain, (tensors[0], *tensors[0].stride()))


@jit
def widened(x):
    """A tile as fp32.

    Triton hoists its own conversions between layouts above such an extension, and then works out twice what follows.
    """
    if x.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            "{shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;}",
            "=&r,=&r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    elif x.dtype == tl.float16:
        y = tl.inline_asm_elementwise(
            "{.reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi;}",
            "=f,=f,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        y = x
    return y


@jit
def rounded(x, DTYPE: tl.constexpr):
    """An fp32 tile, rounded to a dtype: fp32 values. Two at a time to bf16, which is half the work."""
    if DTYPE == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            "{.reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xFFFF0000;}",
            "=r,=r,r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        y = widened(x.to(DTYPE))
    return y


@jit
def load_plain(
    operands,
    m,
    k,
    M,
    K,
    DTYPE: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATE: tl.constexpr,
    PARAMS: tl.constexpr,
):
    """Load a tile."""
    x, stride_m, stride_k = operands
    return (tl.load(x + m * stride_m + k * stride_k, mask=(m < M) & (k < K), other=0.0),)


@jit
def load_plain_kept(
    operands,
    m,
    k,
    M,
    K,
    DTYPE: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATE: tl.constexpr,
    PARAMS: tl.constexpr,
):
    """Load a tile that is soon loaded again, from L1."""
    x, stride_m, stride_k = operands
    present = (m < M) & (k < K)
    return (tl.load(x + m * stride_m + k * stride_k, mask=present, other=0.0, eviction_policy="evict_last"),)


PLAIN = {dtype: Plain(dtype=dtype) for dtype in HIGH_PRECISION}
"""The spec of a tensor's own values, by its dtype."""


def as_source(op: str, x: Tensor | Source, name: str = "x_MK") -> Source:
    """A checked source; a tensor stands for its own values.

    Args:
        op: what the user called.
        x: `[M, K]` bf16 | fp16 | fp32, any strides, or a source.
        name: that of a tensor, for the error.

    Raises:
        ValueError: `x` is not 2-D, or the source's tensors don't fit each other.
        TypeError: a dtype is another.
    """
    if isinstance(x, Source):
        x.spec.check(op, x.tensors)
        return x
    check_matrix(op, name, x)
    return Source((x,), PLAIN[x.dtype])


def produce_ref(source: Source) -> Tensor:
    """The values as a tensor, in plain torch."""
    return source.spec.produce_ref(source.tensors)


def is_wide(tensors: Tensors) -> bool:
    """Whether a matrix is fp32, so that a tile takes more registers."""
    return any(x.dtype == torch.float32 and x.ndim == 2 for x in tensors)


def is_by_rows(tensors: Tensors) -> bool:
    """Whether the rows of all matrices are contiguous."""
    return all(x.stride(1) == 1 for x in tensors if x.ndim == 2)


def check_count(op: str, tensors: Tensors, count: int) -> None:
    """Raise unless a source has so many tensors."""
    if len(tensors) != count:
        fail(op, f"this source is made of {count} tensors", got=len(tensors))


def check_matrix(op: str, name: str, x: Tensor) -> None:
    """Raise unless `x` is a matrix of a high-precision dtype."""
    if x.ndim != 2:
        hint = "Flatten leading dimensions with x.flatten(0, -2)."
        fail(op, f"{name} must be 2-D", got=tuple(x.shape), hint=hint)
    if x.dtype not in HIGH_PRECISION:
        fail(op, f"{name} must be one of {HIGH_PRECISION}", got=x.dtype, error=TypeError)
