"""What LayerNorm, RMSNorm and L2Normalization have in common: one operation over the kernels of `lowp.kernels.norm`.

Where the next operation reads its input quantized, the normalized values are never written: the pass that works out
the statistics also finds the amax, and the cast normalizes again.

Shape legend: M = rows, all leading axes together; K = features, the normalized axes together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lowp.errors import fail, require
from lowp.formats import HIGH_PRECISION
from lowp.kernels.norm import norm_forward
from lowp.kernels.norm_grad import norm_backward
from lowp.kernels.normalized import Normalized
from lowp.kernels.sources import Source
from lowp.ops.basic_op import BasicOperation, check_high_precision
from lowp.ops.handover import copies, hand_over, wants_quantized
from lowp.ops.normalization_args import NormalizationBackwardArgs, NormalizationForwardArgs
from lowp.ops.op import BackwardContext, Direction, OperationContext
from lowp.quantization import QuantizeRequest, as_matrix, measures_amax


class Normalization(BasicOperation):
    """Normalizes the trailing axes; derived classes say how.

    Args:
        normalized_shape: the trailing axes, or the size of the last one; None: the last one, of any size.
        eps: added under the root.
        weight, bias: whether there is one.
        device: of the parameters.
        dtype: of the parameters.
        zero_centered_gamma: the weight is stored as its difference from 1.
        sequence_parallel: each rank has a part of the parameters' gradients.

    Class attributes:
        kind: as in `lowp.kernels.norm`.
    """

    fwd_args_type = NormalizationForwardArgs
    bwd_args_type = NormalizationBackwardArgs
    quantizes_output = True
    replays = True
    parameter_names = ("weight", "bias")
    kind: ClassVar[str]

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None,
        eps: float,
        *,
        weight: bool,
        bias: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        shape = normalized_shape if normalized_shape is None else _as_shape(name, normalized_shape)
        require(math.isfinite(eps) and eps >= 0, name, "eps must be finite and >= 0", got=eps)
        self.normalized_shape = shape
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        for parameter, present in (("weight", weight), ("bias", bias)):
            data = nn.Parameter(torch.empty(shape or (), device=device, dtype=dtype)) if present else None
            self.register_parameter(parameter, data)
        self._specs = {
            out: Normalized(
                dtype=out, mean=self.kind == "layer", weight=weight, bias=bias, zero_centered=zero_centered_gamma
            )
            for out in HIGH_PRECISION
        }
        self.mark_partial_gradients()
        self.reset_parameters()

    def partial_gradients(self) -> tuple[str, ...]:
        """All parameters, where tokens are split."""
        return self.parameter_names if self.sequence_parallel else ()

    def reset_parameters(self) -> None:
        """The weight 1, the bias 0."""
        weight, bias = self.own_parameters()
        if weight is not None:
            nn.init.constant_(weight, 0.0 if self.zero_centered_gamma else 1.0)
        if bias is not None:
            nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        """For `print`."""
        return f"eps={self.eps}" if self.normalized_shape is None else f"{self.normalized_shape}, eps={self.eps}"

    def output_dtype(
        self, input_dtype: torch.dtype, autocast_dtype: torch.dtype | None, extra_dtypes: tuple[torch.dtype, ...] = ()
    ) -> torch.dtype:
        """torch.autocast's dtype where it is on, else the input's."""
        return autocast_dtype or input_dtype

    @property
    def axes(self) -> int:
        """How many axes are normalized."""
        return 1 if self.normalized_shape is None else len(self.normalized_shape)

    def _fits(self, shape: Sequence[int]) -> bool:
        """Whether an input of this shape has the normalized axes."""
        if self.normalized_shape is None or len(shape) < self.axes:
            return self.normalized_shape is None and len(shape) > 0
        pairs = zip(shape[-self.axes :], self.normalized_shape, strict=True)  # sizes may be symbolic
        return not [None for size, expected in pairs if size != expected]

    def hands_over(
        self, basic_op_ctxs: list[OperationContext], direction: Direction, request: QuantizeRequest | None
    ) -> bool:
        """In forward, where the last axis alone is normalized."""
        return direction == "forward" and self.axes == 1 and wants_quantized(request)

    def pack_forward_args(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        next_op_input_quantizer: QuantizeRequest | None,
        **_: Any,
    ) -> NormalizationForwardArgs:
        """Input, parameters, and what the next operation reads."""
        ctx, name = basic_op_ctxs[0], type(self).__name__
        if not self._fits(input_.shape):
            fail(name, f"the input's last axes must be {self.normalized_shape or 'there'}", got=tuple(input_.shape))
        check_high_precision(name, input_)
        quantizer, row, column = copies(next_op_input_quantizer if self.axes == 1 else None, input_.shape[-1])
        return NormalizationForwardArgs(
            input=input_,
            weight=ctx.parameters[0],
            bias=ctx.parameters[1],
            axes=self.axes,
            kind=self.kind,
            eps=self.eps,
            spec=self._specs[ctx.autocast_dtype or ctx.dtype],
            quantizer=quantizer,
            row=row,
            column=column,
        )

    @classmethod
    def forward_compute(cls, args: NormalizationForwardArgs, *, in_custom_op: bool = False) -> Any:
        """Normalize, or normalize and quantize; aux: the statistics."""
        x_MK = rows(args.input, args.axes)
        parameters = [None if p is None else p.reshape(-1) for p in (args.weight, args.bias)]
        spec: Any = args.spec
        quantized = args.quantizer is not None
        y_MK, mean_M, rstd_M, amax_P = norm_forward(
            x_MK,
            *parameters,
            kind=args.kind,
            eps=args.eps,
            zero_centered_gamma=spec.zero_centered,
            dtype=spec.dtype,
            output=not quantized,
            amax=args.quantizer is not None and measures_amax(args.quantizer),
        )
        aux = (rstd_M,) if mean_M is None else (mean_M, rstd_M)
        if y_MK is not None:
            return reshaped(y_MK, args.input.shape), ((),), aux
        source = Source(tuple([x for x in (x_MK, mean_M, rstd_M, *parameters) if x is not None]), spec)
        return hand_over(source, args, args.input.shape[:-1], amax_P), ((),), aux

    def forward_setup_context(
        self, basic_op_ctxs: list[OperationContext], args: NormalizationForwardArgs, aux: tuple[Tensor, ...]
    ) -> None:
        """Save the input and its statistics."""
        ctx = basic_op_ctxs[0]
        *mean, rstd = aux
        ctx.save_for_backward(args.input, args.weight, mean[0] if mean else None, rstd)
        ctx.bias_dtype = None if args.bias is None else args.bias.dtype

    def pack_backward_args(
        self, basic_op_ctxs: list[BackwardContext], grad_output: Tensor, **_: Any
    ) -> NormalizationBackwardArgs:
        """The gradient, and what forward saved."""
        return self.pack_norm_grad(basic_op_ctxs[0], grad_output)

    def pack_norm_grad(
        self, ctx: BackwardContext, grad_output: Tensor | None, residual: Tensor | None = None
    ) -> NormalizationBackwardArgs:
        """The arguments of backward; for fusions too."""
        input_, weight, mean, rstd = ctx.saved_tensors
        assert input_ is not None
        assert rstd is not None
        wants_weight, wants_bias = ctx.parameters_require_grad
        return NormalizationBackwardArgs(
            grad_output=grad_output,
            input=input_,
            weight=weight,
            mean=mean,
            rstd=rstd,
            residual=residual,
            axes=self.axes,
            kind=self.kind,
            zero_centered=self.zero_centered_gamma,
            input_requires_grad=ctx.input_requires_grad,
            weight_requires_grad=wants_weight,
            bias_dtype=ctx.bias_dtype if wants_bias else None,
        )

    @classmethod
    def backward_compute(cls, args: NormalizationBackwardArgs, *, in_custom_op: bool = False) -> Any:
        """The gradients that are wanted."""
        assert args.grad_output is not None
        dx_MK, dweight_K, dbias_K = norm_backward(
            rows(args.grad_output, args.axes),
            rows(args.input, args.axes),
            args.mean,
            args.rstd,
            None if args.weight is None else args.weight.reshape(-1),
            kind=args.kind,
            zero_centered_gamma=args.zero_centered,
            grad_input=args.input_requires_grad,
            grad_weight=args.weight_requires_grad,
            bias_dtype=args.bias_dtype,
            residual_MK=None if args.residual is None else rows(args.residual, args.axes),
        )
        shape = args.input.shape
        grads = [None if g is None else reshaped(g, shape[-args.axes :]) for g in (dweight_K, dbias_K)]
        return None if dx_MK is None else reshaped(dx_MK, shape), (tuple(grads),), ((),)


def _as_shape(name: str, sizes: int | Iterable[int]) -> tuple[int, ...]:
    shape = tuple(sizes) if isinstance(sizes, Iterable) else (int(sizes),)
    require(len(shape) > 0, name, "normalized_shape must name at least one axis", got=shape)
    require(min(shape, default=0) >= 0, name, "sizes must not be negative", got=shape)
    return shape


def rows(x: Tensor, axes: int) -> Tensor:
    """`[..., *normalized_shape] -> [M, K]`."""
    return as_matrix(x.flatten(-axes) if axes > 1 else x)


def reshaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`x` in another shape, not as a view: users may change an operation's output in place."""
    return x if x.shape == shape else torch.ops.aten._unsafe_view.default(x, list(shape))
