"""BasicLinear: `y = x @ w.T`, without bias.

    fprop y[M,N] = x[M,K] @ w[N,K].T    dgrad dx[M,K] = dy[M,N] @ w[N,K]    wgrad dw[N,K] = dy[M,N].T @ x[M,K]

Shape legend: M = tokens, all leading axes together; N = out_features; K = in_features. Under a recipe each GEMM reads
quantized operands, padded along its contraction axis, so that any M, N and K run. Forward keeps for wgrad the
transposed quantized input alone; the weight is cast again in backward with the statistics of its forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowp.dynamo.schema import Mutable, Sizes
from lowp.errors import require
from lowp.ops import linear_gemms as gemms
from lowp.ops.basic_op import BasicOperation, check_size
from lowp.ops.op import BackwardContext, OperationContext
from lowp.quantization import Quantized, QuantizeRequest
from lowp.quantizers import Quantizer
from lowp.recipe import BackwardOverride


@dataclass
class LinearForwardArgs:
    """What the forward pass reads; `keep_column` and `keep_row`: the input's quantized copy that backward reads."""

    input: Tensor | Quantized
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    input_quantizer: Quantizer | None
    weight_quantizer: Quantizer | None
    fast_accumulation: bool
    keep_column: bool
    keep_row: bool


@dataclass
class LinearBackwardArgs:
    """What the backward pass reads."""

    grad_output: Tensor | Quantized
    input: Tensor | Quantized | None
    weight: Tensor
    weight_statistics: Tensor | None
    main_grad: Mutable
    leading: Sizes
    dtype: torch.dtype
    input_dtype: torch.dtype
    weight_quantizer: Quantizer | None
    grad_output_quantizer: Quantizer | None
    override: BackwardOverride | None
    fast_dgrad: bool
    fast_wgrad: bool
    input_requires_grad: bool
    weight_requires_grad: bool
    accumulate: bool
    placeholder_grad: bool


class BasicLinear(BasicOperation):
    """Applies a linear map without bias.

    Args:
        in_features: K.
        out_features: N.
        device: of the parameter.
        dtype: of the parameter.
        accumulate_into_main_grad: backward adds the weight's gradient to `weight.main_grad` (or overwrites it where
            `weight.overwrite_main_grad` is true) instead of returning it, and `weight.grad_added_to_main_grad` is set.
        placeholder_grad: with `accumulate_into_main_grad`, `weight.grad` becomes a tensor of undefined content instead
            of staying None, for code that needs one.

    Attributes:
        weight: `[out_features, in_features]`.

    Raises:
        ValueError: a size is negative; the input's last axis is not `in_features`; `weight.main_grad` is missing or
            has another shape.
        TypeError: the input's dtype is no floating-point one.
    """

    fwd_args_type = LinearForwardArgs
    bwd_args_type = LinearBackwardArgs
    parameter_names = ("weight",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
        placeholder_grad: bool = False,
    ) -> None:
        super().__init__()
        require(
            in_features >= 0 and out_features >= 0,
            "BasicLinear",
            "in_features and out_features must not be negative",
            got=(in_features, out_features),
        )
        self.in_features = in_features
        self.out_features = out_features
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.placeholder_grad = placeholder_grad
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.Linear: uniform in +-1 / sqrt(in_features)."""
        if self.weight.numel():
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def extra_repr(self) -> str:
        """For `print`."""
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def output_dtype(self, input_dtype: torch.dtype, autocast_dtype: torch.dtype | None) -> torch.dtype:
        """torch.autocast's dtype where it is on, else the input's."""
        return autocast_dtype or input_dtype

    def input_request(self, ctx: OperationContext) -> QuantizeRequest | None:
        """Row for fprop; column for wgrad, unless the recipe overrides backward."""
        if ctx.recipe is None:
            return None
        column = ctx.requires_grad and self.weight.requires_grad and ctx.recipe.backward_override is None
        return QuantizeRequest(ctx.recipe.quantizer("input"), row=True, column=column)

    def grad_output_request(self, ctx: OperationContext) -> QuantizeRequest | None:
        """Row for dgrad, column for wgrad, unless the recipe overrides backward."""
        if ctx.recipe is None or ctx.recipe.backward_override is not None:
            return None
        quantizer = ctx.recipe.quantizer("grad_output")
        return QuantizeRequest(quantizer, row=ctx.input_requires_grad, column=self.weight.requires_grad)

    def pack_forward_args(
        self, basic_op_ctxs: list[OperationContext], input_: Tensor | Quantized, **_: Any
    ) -> LinearForwardArgs:
        """The arguments of fprop without bias."""
        return self.pack_linear(basic_op_ctxs[0], input_, None)

    def pack_linear(self, ctx: OperationContext, input_: Tensor | Quantized, bias: Tensor | None) -> LinearForwardArgs:
        """The arguments of fprop; for fusions too."""
        if isinstance(input_, Tensor):
            check_size("BasicLinear", "the last axis of the input", input_, self.in_features)
            if not input_.dtype.is_floating_point:
                raise TypeError(f"BasicLinear: the input must have a floating-point dtype, got {input_.dtype}.")
        recipe = ctx.recipe
        request = self.input_request(ctx)
        wgrad = ctx.requires_grad and self.weight.requires_grad
        return LinearForwardArgs(
            input=input_,
            weight=self.weight,
            bias=bias,
            dtype=ctx.autocast_dtype or ctx.dtype,
            input_quantizer=None if request is None else request.quantizer,
            weight_quantizer=None if recipe is None else recipe.quantizer("weight"),
            fast_accumulation=recipe is not None and not recipe.gemm("fprop").use_split_accumulator,
            keep_column=request is not None and request.column,
            keep_row=wgrad and recipe is not None and recipe.backward_override == "dequantized",
        )

    @classmethod
    def forward_compute(cls, args: LinearForwardArgs, *, in_custom_op: bool = False) -> Any:
        """Fprop; aux: the input's kept copy and its scale where one is made, the weight's statistics."""
        output, aux = gemms.fprop(args)
        return output, ((),), aux

    def forward_setup_context(
        self, basic_op_ctxs: list[OperationContext], args: LinearForwardArgs, aux: tuple[Tensor, ...]
    ) -> None:
        """Save what dgrad and wgrad read, and nothing for a gradient that nobody wants."""
        self.setup_linear(basic_op_ctxs[0], args, aux)

    def setup_linear(self, ctx: OperationContext, args: LinearForwardArgs, aux: tuple[Tensor, ...]) -> None:
        """Fill this operation's context; for fusions too."""
        input_, wgrad = args.input, self.weight.requires_grad
        original: Tensor | None = None
        kept: Sequence[Tensor | None] = (None, None)
        statistics = aux[-1] if args.weight_quantizer is not None and ctx.input_requires_grad else None
        if isinstance(input_, Quantized):
            leading = input_.row[0].shape[:-1]
            kept = input_.column if args.keep_column else input_.row
        else:
            leading = input_.shape[:-1]
            if args.keep_column or args.keep_row:
                kept = aux[:2]
            elif wgrad:
                original = input_
        ctx.save_for_backward(original, *(kept if wgrad else (None, None)), args.weight, statistics)
        ctx.leading = leading
        ctx.compute_dtype = args.dtype
        ctx.kept_by_row = not args.keep_column
        ctx.main_grad = self._main_grad() if self.accumulate_into_main_grad and wgrad else None

    def _main_grad(self) -> Tensor:
        main_grad = getattr(self.weight, "main_grad", None)
        if main_grad is None or main_grad.shape != self.weight.shape:
            raise ValueError(
                "BasicLinear: accumulate_into_main_grad needs weight.main_grad, a tensor of the weight's shape"
                f" {tuple(self.weight.shape)}, got {None if main_grad is None else tuple(main_grad.shape)}."
                " Set it before the first forward."
            )
        self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return main_grad

    def pack_backward_args(
        self, basic_op_ctxs: list[BackwardContext], grad_output: Tensor | Quantized, **_: Any
    ) -> LinearBackwardArgs:
        """The arguments of dgrad and wgrad."""
        ctx = basic_op_ctxs[0]
        recipe = ctx.recipe
        override = None if recipe is None else recipe.backward_override
        original, kept, kept_scale, weight, statistics = ctx.saved_tensors
        assert weight is not None
        input_: Tensor | Quantized | None = original
        if kept is not None and ctx.kept_by_row:
            input_ = Quantized(kept, kept_scale, None, None)
        elif kept is not None:
            input_ = Quantized(None, None, kept, kept_scale)
        return LinearBackwardArgs(
            grad_output=grad_output,
            input=input_,
            weight=weight,
            weight_statistics=statistics,
            main_grad=ctx.main_grad,
            leading=tuple(ctx.leading),
            dtype=ctx.compute_dtype,
            input_dtype=ctx.dtype,
            weight_quantizer=None if recipe is None else recipe.quantizer("weight"),
            grad_output_quantizer=None if recipe is None or override else recipe.quantizer("grad_output"),
            override=override,
            fast_dgrad=recipe is not None and not recipe.gemm("dgrad").use_split_accumulator,
            fast_wgrad=recipe is not None and not recipe.gemm("wgrad").use_split_accumulator,
            input_requires_grad=ctx.input_requires_grad,
            weight_requires_grad=weight.requires_grad,
            accumulate=not getattr(self.weight, "overwrite_main_grad", False),
            placeholder_grad=self.placeholder_grad and ctx.main_grad is not None,
        )

    @classmethod
    def backward_compute(cls, args: LinearBackwardArgs, *, in_custom_op: bool = False) -> Any:
        """Dgrad, then wgrad, each where its gradient is wanted."""
        grad_output = gemms.grad_operand(args)
        grad_input = gemms.dgrad(args, grad_output) if args.input_requires_grad else None
        if isinstance(grad_output, Quantized) and not in_custom_op:
            args.grad_output = None  # type: ignore[assignment]
            grad_output = grad_output._replace(row_data=None)  # dgrad is done: its memory is free for wgrad
        grad_weight = gemms.wgrad(args, grad_output) if args.weight_requires_grad else None
        if args.placeholder_grad and not in_custom_op:
            grad_weight = torch.empty_like(args.weight)
        return grad_input, ((grad_weight,),), ((),)
