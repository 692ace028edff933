"""Weight gradients that backward leaves for later: it keeps their GEMM's operands, and `backward_dw()` multiplies them.

    backward:  keep(store, operands)          backward_dw():  dw[N,K] = dy[M,N].T @ x[M,K] of the oldest operands kept

Keeping is an operator that changes a ticket, a small tensor on the CPU that names the store. So the compiled backward
graph keeps its operands as the eager one does: what an operator changes is never left out, and never run twice.

Shape legend: M = tokens, N = out features, K = in features.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.errors import fail
from lowp.kernels.gemm import gemm, gemm_into, scaled_gemm, scaled_gemm_into
from lowp.quantization import Quantized
from lowp.registration import register


class WgradOperands(NamedTuple):
    """What wgrad's GEMM reads.

    Attributes:
        grad_output: `[M, N]`, or its column copy.
        input: `[M, K]`, or its column copy.
        fast_accumulation: of a quantized GEMM.
    """

    grad_output: Tensor | Quantized
    input: Tensor | Quantized
    fast_accumulation: bool

    def multiply(self, dtype: torch.dtype) -> Tensor:
        """`dy.T @ x`, `[N, K]`."""
        dy, x = self.grad_output, self.input
        if isinstance(dy, Quantized):
            assert isinstance(x, Quantized)
            return scaled_gemm(*dy.column, *x.column, dtype=dtype, fast_accumulation=self.fast_accumulation)
        assert isinstance(x, Tensor)
        return gemm(dy.t(), x.t(), dtype=dtype)

    def multiply_into(self, main_grad: Tensor, *, accumulate: bool) -> None:
        """`main_grad += dy.T @ x`, or `=`."""
        dy, x = self.grad_output, self.input
        if isinstance(dy, Quantized):
            assert isinstance(x, Quantized)
            scaled_gemm_into(
                *dy.column,
                *x.column,
                main_grad,
                fast_accumulation=self.fast_accumulation,
                accumulate=accumulate,
            )
            return
        assert isinstance(x, Tensor)
        gemm_into(dy.t(), x.t(), main_grad, accumulate=accumulate)

    def slots(self) -> list[Tensor | None]:
        """Data and scale of both operands."""
        pairs = [x.column if isinstance(x, Quantized) else (x, None) for x in (self.grad_output, self.input)]
        return [*pairs[0], *pairs[1]]


class WgradStore:
    """Operands in the order in which backward kept them. A copy of a store starts empty.

    Attributes:
        ticket: `[2]` int64 on the CPU: the store's number, and how many operands it was ever given.
    """

    def __init__(self) -> None:
        number = next(_NUMBERS)
        self.ticket = torch.tensor([number, 0], device="cpu")
        self._kept: collections.deque[tuple[WgradOperands, tuple[int, ...]]] = collections.deque()
        _STORES[number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return WgradStore, ()

    def __len__(self) -> int:
        return len(self._kept)

    def append(self, operands: WgradOperands) -> None:
        """Keep operands, and note how often their tensors were changed so far."""
        self._kept.append((operands, _versions(operands)))

    def pop(self) -> WgradOperands:
        """The oldest operands.

        Raises:
            RuntimeError: there are none; or one was changed in place since backward.
        """
        if not self._kept:
            hint = "Call it once for each backward."
            fail("backward_dw", "a backward must have run before", got="none", hint=hint, error=RuntimeError)
        operands, versions = self._kept.popleft()
        if versions != _versions(operands):
            hint = "Don't change inputs or output gradients in place before backward_dw()."
            fail("backward_dw", "an operand was changed in place since backward", hint=hint, error=RuntimeError)
        return operands


_NUMBERS = itertools.count()
_STORES: weakref.WeakValueDictionary[int, WgradStore] = weakref.WeakValueDictionary()


def _versions(operands: WgradOperands) -> tuple[int, ...]:
    return tuple([x._version for x in operands.slots() if x is not None and not x.is_inference()])


def keep(ticket: Tensor, operands: WgradOperands, *, copy: bool) -> None:
    """Keep operands in the store that the ticket names.

    Args:
        ticket: `WgradStore.ticket`.
        operands: of one wgrad.
        copy: keep copies: a compiler may use the operands' memory again.

    Raises:
        RuntimeError: a CUDA graph is being captured, which would keep nothing when it is replayed.
    """
    _keep(*operands.slots(), ticket, operands.fast_accumulation, copy)


def _keep_ref(
    grad_output: Tensor,
    grad_output_scale: Tensor | None,
    input: Tensor,
    input_scale: Tensor | None,
    ticket: Tensor,
    fast_accumulation: bool,
    copy: bool,
) -> None:
    """Append to the store."""
    dy = _operand(grad_output, grad_output_scale, copy)
    x = _operand(input, input_scale, copy)
    ticket[1] += 1
    store = _STORES.get(int(ticket[0]))
    if store is not None:  # else nobody is left who could ask for them
        store.append(WgradOperands(dy, x, fast_accumulation))


def _operand(data: Tensor, scale: Tensor | None, copy: bool) -> Tensor | Quantized:
    if copy:
        data, scale = data.clone(), None if scale is None else scale.clone()
    return data if scale is None else Quantized(None, None, data, scale)


def _keep_launch(grad_output: Tensor, *args: Any) -> None:
    if torch.cuda.is_current_stream_capturing():
        hint = "Build the module without delay_wgrad_compute."
        fail("delay_wgrad_compute", "no CUDA graph can be captured", hint=hint, error=RuntimeError)
    _keep_ref(grad_output, *args)


_keep = register(
    "keep_for_wgrad(Tensor grad_output, Tensor? grad_output_scale, Tensor input, Tensor? input_scale,"
    " Tensor(a!) ticket, bool fast_accumulation, bool copy) -> ()",
    ref=_keep_ref,
    launch=_keep_launch,
    allocate=lambda *_: None,
)
