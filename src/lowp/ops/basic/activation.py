"""Activations: `y = f(x)`, or gated `y = f(a) * g(b)`, where `a` and `b` are halves of the last axis of x.

One operation runs every entry of `lowp.kernels.activations.ACTIVATIONS`; the classes below name them. Forward saves the
input. Where a neighbour reads its operand quantized, neither the activated values nor the gradient are ever written:
one pass finds the amax and another casts (of few values one does both), and they work the values out where they need
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowp.errors import fail
from lowp.formats import HIGH_PRECISION
from lowp.kernels.activated import Activated, ActivationGradient
from lowp.kernels.sources import Source, SourceSpec
from lowp.ops.basic_op import BasicOperation, check_high_precision
from lowp.ops.handover import Handover, copies, hand_over, wants_quantized
from lowp.ops.op import BackwardContext, Direction, OperationContext
from lowp.quantization import QuantizeRequest, as_matrix


@dataclass(kw_only=True)
class ActivationForwardArgs(Handover):
    """What the forward pass reads: the input, and the spec of the activated values."""

    input: Tensor
    spec: SourceSpec


@dataclass(kw_only=True)
class ActivationBackwardArgs(Handover):
    """What the backward pass reads: the gradient, the input, and the spec of the input's gradient."""

    grad_output: Tensor
    input: Tensor
    spec: SourceSpec


class Activation(BasicOperation):
    """Applies an activation.

    Args:
        activation: a name of `lowp.kernels.activations.ACTIVATIONS`.
        activation_params: the activation's parameters, where they differ from their defaults.

    Raises:
        ValueError: the activation or a parameter is unknown, or out of range; gated: the last axis has an odd size.
        TypeError: a parameter is not a number; the input is not bf16, fp16 or fp32.

    Values are worked out in fp32; the output has torch.autocast's dtype where it is on, else the input's.
    """

    fwd_args_type = ActivationForwardArgs
    bwd_args_type = ActivationBackwardArgs
    quantizes_output = True
    quantizes_grad_input = True
    replays = True

    def __init__(self, activation: str, activation_params: Mapping[str, float] | None = None) -> None:
        super().__init__()
        params = activation_params or {}
        self._forward_specs, self._backward_specs = (
            {dtype: kind(dtype=dtype, activation=activation, params=params) for dtype in HIGH_PRECISION}
            for kind in (Activated, ActivationGradient)
        )
        spec = self._forward_specs[torch.float32]
        self.activation = activation
        self.activation_params = dict(spec.params)
        self.gated = spec.gated

    def extra_repr(self) -> str:
        """For `print`."""
        named = [repr(self.activation)] if type(self) is Activation else []
        return ", ".join([*named, *[f"{key}={value}" for key, value in self.activation_params.items()]])

    def output_dtype(
        self, input_dtype: torch.dtype, autocast_dtype: torch.dtype | None, extra_dtypes: tuple[torch.dtype, ...] = ()
    ) -> torch.dtype:
        """torch.autocast's dtype where it is on, else the input's."""
        return autocast_dtype or input_dtype

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
    ) -> ActivationForwardArgs:
        """The input, and what the next operation reads."""
        ctx, name = basic_op_ctxs[0], type(self).__name__
        check_high_precision(name, input_)
        if input_.ndim == 0 or (self.gated and input_.shape[-1] % 2):
            rule = "the input's last axis must have an even size" if self.gated else "the input must have an axis"
            fail(name, rule, got=tuple(input_.shape))
        size = input_.shape[-1]
        ctx.activation_request = copies(prev_op_grad_output_quantizer, size)
        quantizer, row, column = copies(next_op_input_quantizer, size // 2 if self.gated else size)
        spec = self._forward_specs[ctx.autocast_dtype or ctx.dtype]
        return ActivationForwardArgs(input=input_, spec=spec, quantizer=quantizer, row=row, column=column)

    @classmethod
    def forward_compute(cls, args: ActivationForwardArgs, *, in_custom_op: bool = False) -> Any:
        """The activated values, quantized where the next operation reads them so."""
        source = Source((as_matrix(args.input),), args.spec)
        return hand_over(source, args, args.input.shape[:-1]), ((),), ()

    def forward_setup_context(
        self, basic_op_ctxs: list[OperationContext], args: ActivationForwardArgs, aux: tuple[Tensor, ...]
    ) -> None:
        """Save the input."""
        basic_op_ctxs[0].save_for_backward(args.input)

    def pack_backward_args(
        self, basic_op_ctxs: list[BackwardContext], grad_output: Tensor, **_: Any
    ) -> ActivationBackwardArgs:
        """The gradient, the input, and what the operation before reads."""
        return self.pack_activation_grad(basic_op_ctxs[0], grad_output, *basic_op_ctxs[0].activation_request)

    def pack_activation_grad(
        self, ctx: BackwardContext, grad_output: Tensor, quantizer: Any, row: bool, column: bool
    ) -> ActivationBackwardArgs:
        """The arguments of backward; for fusions too."""
        (input_,) = ctx.saved_tensors
        assert input_ is not None
        return ActivationBackwardArgs(
            grad_output=grad_output,
            input=input_,
            spec=self._backward_specs[ctx.dtype],
            quantizer=quantizer,
            row=row,
            column=column,
        )

    @classmethod
    def backward_compute(cls, args: ActivationBackwardArgs, *, in_custom_op: bool = False) -> Any:
        """The gradient, quantized where the operation before reads it so."""
        return hand_over(gradient_source(args), args, args.input.shape[:-1]), ((),), ((),)


def gradient_source(args: ActivationBackwardArgs) -> Source:
    """The gradient of the activation's input."""
    return Source((as_matrix(args.grad_output), as_matrix(args.input)), args.spec)


class _Named(Activation):
    """An entry of the table as a class."""

    entry: ClassVar[str]

    def __init__(self, activation_params: Mapping[str, float] | None = None) -> None:
        super().__init__(self.entry, activation_params)


class GELU(_Named):
    """`x sigmoid(2 u)`, which is the tanh form `0.5 x (1 + tanh(u))`, with `u = sqrt(2 / pi) (x + 0.044715 x^3)`."""

    entry = "gelu"


class GEGLU(_Named):
    """`gelu(a) * b`."""

    entry = "geglu"


class GLU(_Named):
    """`sigmoid(a) * b`."""

    entry = "glu"


class QGELU(_Named):
    """`x sigmoid(1.702 x)`."""

    entry = "qgelu"


class QGEGLU(_Named):
    """`qgelu(a) * b`."""

    entry = "qgeglu"


class ReLU(_Named):
    """`max(x, 0)`."""

    entry = "relu"


class ReGLU(_Named):
    """`relu(a) * b`."""

    entry = "reglu"


class SReLU(_Named):
    """`max(x, 0)^2`."""

    entry = "srelu"


class SReGLU(_Named):
    """`srelu(a) * b`."""

    entry = "sreglu"


class SiLU(_Named):
    """`x sigmoid(x)`."""

    entry = "silu"


class SwiGLU(_Named):
    """`silu(a) * b`."""

    entry = "swiglu"


class ClampedSwiGLU(_Named):
    """`c sigmoid(alpha c) * (d + glu_linear_offset)`, with `c = min(a, limit)` and `d` the clamp of `b` to +-`limit`.

    Its parameters are `limit` (7), `alpha` (1.702) and `glu_linear_offset` (1).
    """

    entry = "clamped_swiglu"


ACTIVATION_CLASSES: tuple[type[Activation], ...] = (
    GELU, GEGLU, GLU, QGELU, QGEGLU, ReLU, ReGLU, SReLU, SReGLU, SiLU, SwiGLU, ClampedSwiGLU
)  # fmt: skip
"""The classes of the table's entries."""
