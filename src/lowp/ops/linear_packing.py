"""What a linear layer's passes read and keep, packed for the layer alone and for fusions that hold it.

Shape legend: M = tokens, N = out features, K = in features, all of them local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowp.distributed.collectives import group_size
from lowp.distributed.shapes import check_divisible_sequence
from lowp.errors import fail
from lowp.ops.basic_op import check_size
from lowp.ops.delayed_wgrad import WgradStore
from lowp.ops.linear_args import LinearBackwardArgs, LinearForwardArgs, backward_precision
from lowp.ops.linear_weight import LinearWeight
from lowp.ops.op import BackwardContext, OperationContext
from lowp.quantization import Quantized


class LinearPacking(LinearWeight):
    """Packs the arguments of both passes, fills the context between them, and knows the weight's `main_grad`.

    Attributes:
        keep_gathered_input: see `lowp.ops.BasicLinear`, which sets these.
        save_original_input: likewise.
        accumulate_into_main_grad: likewise.
        placeholder_grad: likewise.
        wgrad_store: where backward leaves wgrad's operands; None: it multiplies them.
    """

    keep_gathered_input: bool
    save_original_input: bool
    accumulate_into_main_grad: bool
    placeholder_grad: bool
    wgrad_store: WgradStore | None

    def pack_linear(
        self,
        ctx: OperationContext,
        input_: Tensor | Quantized,
        bias: Tensor | None = None,
        addend: Tensor | None = None,
        factor: float = 1.0,
    ) -> LinearForwardArgs:
        """The arguments of fprop.

        Args:
            ctx: of this operation.
            input_: `[..., K]`, or quantized.
            bias: `[N]`; None: none is added.
            addend: `[..., N]`; None: nothing is added.
            factor: of the product.

        Raises:
            ValueError: the last axis is not K; the tokens can't be split among the ranks, or these are not known.
            TypeError: the input's dtype is no floating-point one.
        """
        parallel, recipe = self.parallel, ctx.recipe
        if isinstance(input_, Tensor):
            check_size("BasicLinear", "the last axis of the input", input_, self.local_in_features)
            if not input_.dtype.is_floating_point:
                raise TypeError(f"BasicLinear: the input must have a floating-point dtype, got {input_.dtype}.")
        if parallel.sequence_parallel:
            ranks = group_size(parallel.group) if parallel.mode == "row" else 1
            whole = input_.row[0] if isinstance(input_, Quantized) else input_
            check_divisible_sequence("BasicLinear", whole.shape[:-1], ranks)
        self.check_group()
        override = None if recipe is None else recipe.backward_override
        by_column = not parallel.gathers("column") or self.keep_gathered_input
        quantized = ctx.parameters_require_grad[0] and recipe is not None and override != "high_precision"
        original = self.save_original_input and isinstance(input_, Tensor)
        by_row = override == "dequantized" or not by_column
        return LinearForwardArgs(
            input=input_,
            weight=ctx.parameters[0],
            bias=bias,
            group=parallel.group,
            parallel_mode=parallel.mode,
            sequence_parallel=parallel.sequence_parallel,
            dtype=ctx.autocast_dtype or ctx.dtype,
            input_quantizer=None if recipe is None else recipe.quantizer("input"),
            weight_quantizer=None if recipe is None else recipe.quantizer("weight"),
            fast_accumulation=recipe is not None and not recipe.gemm("fprop").use_split_accumulator,
            keep_column=quantized and not original and not by_row,
            keep_row=quantized and not original and by_row,
            keep_statistics=quantized and original,
            keep_weight_statistics=recipe is not None and override != "high_precision" and ctx.input_requires_grad,
            addend=addend,
            factor=factor,
        )

    def setup_linear(self, ctx: OperationContext, args: LinearForwardArgs, aux: tuple[Tensor, ...]) -> None:
        """Fill this operation's context from the arguments of fprop and what it gave besides its result."""
        input_, wgrad = args.input, ctx.parameters_require_grad[0]
        original: Tensor | None = None
        kept: Sequence[Tensor | None] = (None, None)
        if isinstance(input_, Quantized):
            leading = input_.row[0].shape[:-1]
            kept = input_.column if args.keep_column else input_.row
        else:
            leading = input_.shape[:-1]
            if args.keep_column or args.keep_row:
                kept, aux = aux[:2], aux[2:]
            elif wgrad:
                original = input_
            if args.keep_statistics:
                kept, aux = (None, None if aux[0].dtype is torch.bool else aux[0]), aux[1:]
        statistics = aux[0] if aux else None
        weight = args.weight if ctx.input_requires_grad else None
        ctx.save_for_backward(original, *(kept if wgrad else (None, None)), weight, statistics)
        ctx.weight_shape, ctx.weight_dtype = tuple(args.weight.shape), args.weight.dtype
        ctx.leading = leading
        ctx.compute_dtype = args.dtype
        ctx.kept_by_row = not args.keep_column
        ctx.input_quantizer = args.input_quantizer if args.keep_statistics else None
        ctx.precision = backward_precision(ctx.recipe)
        ctx.main_grad = ctx.ticket = None
        if wgrad and self.wgrad_store is not None:
            ctx.ticket = self.wgrad_store.ticket
        elif wgrad and self.accumulate_into_main_grad:
            ctx.main_grad = self._main_grad()

    def pack_linear_grad(
        self,
        ctx: BackwardContext,
        grad_output: Tensor | Quantized | None,
        addend: Tensor | None = None,
        factor: float = 1.0,
    ) -> LinearBackwardArgs:
        """The arguments of dgrad and wgrad.

        Args:
            ctx: of this operation.
            grad_output: `[..., N]`, or quantized; None: the output was not used.
            addend: `[..., K]`, added to dx; None: nothing is.
            factor: of dx before something is added.
        """
        original, kept, kept_scale, weight, statistics = ctx.saved_tensors
        parallel = self.parallel
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
            ticket=ctx.ticket,
            leading=tuple(ctx.leading),
            group=parallel.group,
            parallel_mode=parallel.mode,
            sequence_parallel=parallel.sequence_parallel,
            dtype=ctx.compute_dtype,
            input_dtype=ctx.dtype,
            weight_shape=ctx.weight_shape,
            weight_dtype=ctx.weight_dtype,
            **ctx.precision,
            input_quantizer=ctx.input_quantizer,
            input_statistics=None if ctx.input_quantizer is None else kept_scale,
            input_requires_grad=ctx.input_requires_grad,
            weight_requires_grad=ctx.parameters_require_grad[0],
            accumulate=ctx.main_grad is None or not getattr(self.parameter("weight"), "overwrite_main_grad", False),
            placeholder_grad=(
                self.placeholder_grad and ctx.main_grad is not None and not torch.compiler.is_compiling()
            ),
            addend=addend,
            factor=factor,
        )

    def prepare_parameters(self, require_grad: tuple[bool, ...]) -> None:
        """Tell who reduces gradients that the weight's is not in `grad`.

        Raises:
            ValueError: `main_grad` is missing, or has another shape than the weight.
        """
        if require_grad[0] and self.accumulate_into_main_grad:
            self._main_grad()
            weight: Any = self.parameter("weight")
            weight.grad_added_to_main_grad = True

    def _main_grad(self) -> Tensor:
        weight: Any = self.parameter("weight")
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None or main_grad.shape != weight.shape:
            fail(
                "BasicLinear",
                f"accumulate_into_main_grad needs weight.main_grad of the weight's shape {tuple(weight.shape)}",
                got=None if main_grad is None else tuple(main_grad.shape),
                hint="Set it before the first forward.",
            )
        return main_grad
