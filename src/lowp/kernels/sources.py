"""Sources: where the matrix comes from that a kernel quantizes, sums or stores.

    values_MK = round(f(tensors))           computed in fp32, rounded to the source's dtype before anything uses them

A kernel that takes a source works the values out where it needs them, so they are never written to memory; its results
are bit for bit those of the values as a tensor. A new source works with every such kernel, and the other way round.

Shape legend: M = rows (tokens), K = columns of the values.
"""

from __future__ import annotations

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
            rows `m [BLOCK_M, 1]` and columns `k [1, BLOCK_K]`, both int64, as `DTYPE`, and 0 where `m >= M` or
            `k >= K`; where the source has two halves, K is the width of one, and there are two tiles, the second of
            columns `k + K`.
        operands: tensors, their strides and other integers, or None.
        function: `@jit` function that `load` is given as `FUNCTION`, or None.
        gate: likewise, as `GATE`.
        params: numbers that `load` is given as `PARAMS`.
    """

    load: Any
    operands: tuple[Any, ...]
    function: Any = None
    gate: Any = None
    params: tuple[float, ...] = ()


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

    def check(self, op: str, tensors: tuple[Tensor, ...]) -> None:
        """Raise ValueError or TypeError unless the tensors fit each other; `op` is what the user called."""
        raise NotImplementedError

    def shape(self, tensors: tuple[Tensor, ...]) -> tuple[int, int]:
        """M and K of the values."""
        raise NotImplementedError

    def produce_ref(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """The values, in plain torch."""
        raise NotImplementedError

    def kernel(self, tensors: tuple[Tensor, ...]) -> Kernel:
        """The values, in Triton."""
        raise NotImplementedError

    @property
    def halves(self) -> int:
        """How many tiles `Kernel.load` gives at a time: 2 where each half of the columns needs the same operands."""
        return 1

    @property
    def flat(self) -> bool:
        """Whether contiguous tensors may be taken as one long row each: the values don't depend on row and column."""
        return False


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

    def check(self, op: str, tensors: tuple[Tensor, ...]) -> None:
        """Raise unless it is a matrix of the dtype."""
        (x_MK,) = tensors
        check_matrix(op, "x_MK", x_MK)
        if x_MK.dtype != self.dtype:
            fail(op, f"x_MK must be {self.dtype}, as its source says", got=x_MK.dtype, error=TypeError)

    def shape(self, tensors: tuple[Tensor, ...]) -> tuple[int, int]:
        """That of the tensor."""
        M, K = tensors[0].shape
        return M, K

    def produce_ref(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """The tensor."""
        return tensors[0]

    def kernel(self, tensors: tuple[Tensor, ...]) -> Kernel:
        """One load."""
        return Kernel(load_plain, (tensors[0], *tensors[0].stride()))

    @property
    def flat(self) -> bool:
        """True."""
        return True


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


PLAIN = {dtype: Plain(dtype=dtype) for dtype in HIGH_PRECISION}
"""The spec of a tensor's own values, by its dtype."""


def as_source(op: str, x: Tensor | Source) -> Source:
    """A checked source; a tensor stands for its own values.

    Args:
        op: what the user called.
        x: `[M, K]` bf16 | fp16 | fp32, any strides, or a source.

    Raises:
        ValueError: `x` is not 2-D, or the source's tensors don't fit each other.
        TypeError: a dtype is another.
    """
    if isinstance(x, Source):
        x.spec.check(op, x.tensors)
        return x
    check_matrix(op, "x_MK", x)
    return Source((x,), PLAIN[x.dtype])


def produce_ref(tensors: tuple[Tensor, ...], spec: SourceSpec) -> Tensor:
    """The values as a tensor."""
    return spec.produce_ref(tensors)


def check_matrix(op: str, name: str, x: Tensor) -> None:
    """Raise unless `x` is a matrix of a high-precision dtype."""
    if x.ndim != 2:
        hint = "Flatten leading dimensions with x.flatten(0, -2)."
        fail(op, f"{name} must be 2-D", got=tuple(x.shape), hint=hint)
    if x.dtype not in HIGH_PRECISION:
        fail(op, f"{name} must be one of {HIGH_PRECISION}", got=x.dtype, error=TypeError)
