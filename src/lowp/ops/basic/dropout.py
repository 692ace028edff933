"""Dropout: `y = x * keep / (1 - p)`, `dx = dy * keep / (1 - p)`.

The random bits follow from a seed and the element's place (see `lowp.kernels.dropped`), so only the seed is saved. It
is drawn on the device by an operator that compilers know to be random: eager, compiled and recomputed calls draw alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowp.formats import HIGH_PRECISION
from lowp.kernels.dropped import Dropped
from lowp.kernels.seed import draw_seed
from lowp.kernels.sources import Source, SourceSpec
from lowp.ops.basic_op import BasicOperation, check_high_precision
from lowp.ops.handover import Handover, copies, hand_over, wants_quantized
from lowp.ops.op import BackwardContext, Direction, OperationContext
from lowp.quantization import QuantizeRequest, as_matrix
from lowp.recipe import Recipe


@dataclass(kw_only=True)
class DropoutArgs(Handover):
    """What either pass reads: the input, or the output's gradient, the seed, and the spec of the values."""

    value: Tensor
    seed: Tensor
    spec: SourceSpec


class Dropout(BasicOperation):
    """Drops elements at random and scales the others; in evaluation mode it does nothing.

    Args:
        p: the probability of an element to be dropped, from 0 to 1.

    Raises:
        ValueError: `p` is out of range.
        TypeError: the input is not bf16, fp16 or fp32.
    """

    fwd_args_type = DropoutArgs
    bwd_args_type = DropoutArgs
    quantizes_output = True
    quantizes_grad_input = True
    replays = True

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = float(p)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "p":
            self._specs = {dtype: Dropped(dtype=dtype, p=value) for dtype in HIGH_PRECISION}
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """For `print`."""
        return f"p={self.p}"

    def bypassed(self, recipe: Recipe | None) -> bool:
        """In evaluation mode, and where nothing is dropped."""
        return not self.training or self.p == 0

    def hands_over(
        self, basic_op_ctxs: list[OperationContext], direction: Direction, request: QuantizeRequest | None
    ) -> bool:
        """In both directions."""
        return wants_quantized(request)

    def pack_forward_args(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: QuantizeRequest | None,
        next_op_input_quantizer: QuantizeRequest | None,
        **_: Any,
    ) -> DropoutArgs:
        """The input, a fresh seed, and what the next operation reads."""
        ctx = basic_op_ctxs[0]
        check_high_precision("Dropout", input_)
        ctx.spec = self._specs[ctx.dtype]
        ctx.dropout_request = copies(prev_op_grad_output_quantizer, input_.shape[-1])
        quantizer, row, column = copies(next_op_input_quantizer, input_.shape[-1])
        return DropoutArgs(
            value=input_, seed=draw_seed(input_), spec=ctx.spec, quantizer=quantizer, row=row, column=column
        )

    @classmethod
    def forward_compute(cls, args: DropoutArgs, *, in_custom_op: bool = False) -> Any:
        """The values that are left, quantized where the next operation reads them so."""
        return _dropped(args), ((),), ()

    def forward_setup_context(
        self, basic_op_ctxs: list[OperationContext], args: DropoutArgs, aux: tuple[Tensor, ...]
    ) -> None:
        """Save the seed."""
        basic_op_ctxs[0].save_for_backward(args.seed)

    def pack_backward_args(self, basic_op_ctxs: list[BackwardContext], grad_output: Tensor, **_: Any) -> DropoutArgs:
        """The gradient, the seed, and what the operation before reads."""
        ctx = basic_op_ctxs[0]
        (seed,) = ctx.saved_tensors
        assert seed is not None
        quantizer, row, column = ctx.dropout_request
        return DropoutArgs(value=grad_output, seed=seed, spec=ctx.spec, quantizer=quantizer, row=row, column=column)

    @classmethod
    def backward_compute(cls, args: DropoutArgs, *, in_custom_op: bool = False) -> Any:
        """The gradients of what was left, quantized where the operation before reads them so."""
        return _dropped(args), ((),), ((),)


def _dropped(args: DropoutArgs) -> Any:
    source = Source((as_matrix(args.value), args.seed), args.spec)
    return hand_over(source, args, args.value.shape[:-1])
