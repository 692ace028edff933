"""BasicLinear: `y = x @ w.T`, without bias.

    fprop y[M,N] = x[M,K] @ w[N,K].T    dgrad dx[M,K] = dy[M,N] @ w[N,K]    wgrad dw[N,K] = dy[M,N].T @ x[M,K]

Shape legend: M = tokens, all leading axes together; N = out_features; K = in_features. Under a recipe each GEMM reads
quantized operands, padded along its contraction axis, so that any M, N and K run. Forward keeps for wgrad the
transposed quantized input alone, unless the recipe overrides backward or the input is gathered again; the weight is
cast again in backward, a large one with the amax that forward found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lowp.distributed.collectives import Pending, group_size
from lowp.distributed.shapes import ParallelMode, Split
from lowp.distributed.sharding import DEFAULT_INITIALIZATION, Initialization
from lowp.errors import fail
from lowp.ops import linear_gemms as gemms
from lowp.ops.delayed_wgrad import WgradOperands, WgradStore
from lowp.ops.linear_args import LinearBackwardArgs, LinearForwardArgs
from lowp.ops.linear_packing import LinearPacking
from lowp.ops.op import BackwardContext, OperationContext
from lowp.quantization import Quantized, QuantizeRequest


class BasicLinear(LinearPacking):
    """Applies a linear map without bias.

    Args:
        in_features: K, of the whole layer.
        out_features: N, of the whole layer.
        device: of the parameter.
        dtype: of the parameter.
        tensor_parallel_mode: None, "column" (out features are split) or "row" (in features are split); the table of
            local shapes is in `lowp.distributed.shapes`.
        tensor_parallel_group: the ranks; None: this process alone.
        sequence_parallel: tokens are split along the first axis where the layer is not: the input under "column", the
            output under "row".
        keep_gathered_input: under "column" with sequence parallelism, keep the gathered quantized input for wgrad
            instead of gathering it again in backward: more memory, less traffic.
        save_original_input: keep the input as it came, and cast it again in backward, with the same bytes: no more
            memory where something else keeps the input too.
        accumulate_into_main_grad: backward adds the weight's gradient to `weight.main_grad` (or overwrites it where
            `weight.overwrite_main_grad` is true) instead of returning it, and `weight.grad_added_to_main_grad` is set.
        placeholder_grad: with `accumulate_into_main_grad`, in eager mode, `weight.grad` becomes a tensor of undefined
            content instead of staying None, for code that needs one.
        delay_wgrad_compute: backward keeps wgrad's operands, and `backward_dw()` multiplies them.
        split: how the layer is split, with options that the three arguments above it lack; instead of them.
        initialization: of the weight.

    Attributes:
        weight: `[out_features, in_features]`, this rank's part of it.

    Raises:
        ValueError: a size is negative or not divisible by the ranks; the mode is unknown, or missing under sequence
            parallelism; the ranks are not known; the input's last axis is not the local `in_features`; the tokens can't
            be split; `weight.main_grad` is missing or has another shape.
        TypeError: the input's dtype is no floating-point one.
    """

    fwd_args_type = LinearForwardArgs
    bwd_args_type = LinearBackwardArgs
    parameter_names = ("weight",)
    replays = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: ParallelMode | None = None,
        tensor_parallel_group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        keep_gathered_input: bool = False,
        save_original_input: bool = False,
        accumulate_into_main_grad: bool = False,
        placeholder_grad: bool = False,
        delay_wgrad_compute: bool = False,
        split: Split | None = None,
        initialization: Initialization = DEFAULT_INITIALIZATION,
    ) -> None:
        split = split or Split(tensor_parallel_mode, tensor_parallel_group, None, sequence_parallel)
        super().__init__(
            in_features, out_features, device=device, dtype=dtype, split=split, initialization=initialization
        )
        self.keep_gathered_input = keep_gathered_input
        self.save_original_input = save_original_input
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.placeholder_grad = placeholder_grad
        self.wgrad_store = WgradStore() if delay_wgrad_compute else None

    def backward_dw(self) -> None:
        """The weight's gradient of the earliest backward that `delay_wgrad_compute` left it out of.

        It is added to `weight.grad`, as a backward would, or goes to `weight.main_grad`. Not compiled.

        Raises:
            RuntimeError: no backward ran since; or its operands were changed in place; or nothing is delayed.
        """
        if self.wgrad_store is None:
            fail("backward_dw", "the layer must have delay_wgrad_compute=True", error=RuntimeError)
        with torch.enable_grad():
            weight = self.parameter("weight")
        if not weight.requires_grad:
            return
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            operands = self.wgrad_store.pop()
            if self.accumulate_into_main_grad:
                accumulate = not getattr(weight, "overwrite_main_grad", False)
                operands.multiply_into(self._main_grad(), accumulate=accumulate)
                return
            grad = operands.multiply(weight.dtype)
        weight.backward(grad)

    def output_dtype(
        self, input_dtype: torch.dtype, autocast_dtype: torch.dtype | None, extra_dtypes: tuple[torch.dtype, ...] = ()
    ) -> torch.dtype:
        """torch.autocast's dtype where it is on, else the input's."""
        return autocast_dtype or input_dtype

    def input_request(self, ctx: OperationContext) -> QuantizeRequest | None:
        """Row for fprop; for wgrad column, or what the recipe's override says. None where ranks agree on an amax."""
        if ctx.recipe is None or self.parallel.gathers("column"):
            return None
        wgrad, override = ctx.parameters_require_grad[0], ctx.recipe.backward_override
        if wgrad and self.save_original_input:
            return None
        return QuantizeRequest(
            ctx.recipe.quantizer("input"),
            row=True,
            column=wgrad and override is None,
            size=self.local_in_features,
            high_precision=wgrad and override == "high_precision",
        )

    def grad_output_request(self, ctx: OperationContext) -> QuantizeRequest | None:
        """Row for dgrad, column for wgrad, unless the recipe overrides backward or ranks agree on an amax."""
        if ctx.recipe is None or ctx.recipe.backward_override is not None or self.parallel.gathers("row"):
            return None
        quantizer = ctx.recipe.quantizer("grad_output")
        column = ctx.parameters_require_grad[0]
        return QuantizeRequest(quantizer, ctx.input_requires_grad, column, self.local_out_features)

    def pack_forward_args(
        self, basic_op_ctxs: list[OperationContext], input_: Tensor | Quantized, **_: Any
    ) -> LinearForwardArgs:
        """The arguments of fprop without bias."""
        return self.pack_linear(basic_op_ctxs[0], input_)

    @classmethod
    def forward_compute(cls, args: LinearForwardArgs, *, in_custom_op: bool = False) -> Any:
        """Fprop; aux: that of `linear_gemms.fprop`."""
        output, aux = gemms.fprop(args)
        return output, ((),), aux

    def forward_setup_context(
        self, basic_op_ctxs: list[OperationContext], args: LinearForwardArgs, aux: tuple[Tensor, ...]
    ) -> None:
        """Save what dgrad and wgrad read, and nothing for a gradient that nobody wants."""
        self.setup_linear(basic_op_ctxs[0], args, aux)

    def pack_backward_args(
        self, basic_op_ctxs: list[BackwardContext], grad_output: Tensor | Quantized, **_: Any
    ) -> LinearBackwardArgs:
        """The arguments of dgrad and wgrad."""
        return self.pack_linear_grad(basic_op_ctxs[0], grad_output)

    @classmethod
    def backward_compute(cls, args: LinearBackwardArgs, *, in_custom_op: bool = False) -> Any:
        """Dgrad and wgrad, each where its gradient is wanted.

        Wgrad runs first, and what it alone reads is released before dgrad's result is allocated. Where ranks
        communicate, dgrad runs first instead: the input is gathered meanwhile, and dgrad's result is reduced during
        wgrad. The weight is cast while the gradient is gathered.
        """
        overlaps = args.parallel.mode == "column" and group_size(args.parallel.group) > 1
        wait_for_input = gemms.start_input(args) if args.weight_requires_grad else None
        wait_for_grad = gemms.start_grad(args)
        weight = gemms.dgrad_weight(args) if args.input_requires_grad and args.parallel.mode else None
        dy = wait_for_grad()
        del wait_for_grad
        grad_input: Pending | None = None
        grad_weight: Tensor | None = None
        if overlaps and weight is not None:
            grad_input = gemms.dgrad(args, dy, weight)
            dy = gemms.released(args, dy, "row_data", in_custom_op)
        if wait_for_input is not None:
            operands = WgradOperands(dy, wait_for_input(), args.fast_wgrad)
            grad_weight = gemms.wgrad(args, operands, in_custom_op=in_custom_op)
            del operands, wait_for_input
            dy = gemms.released(args, dy, "column_data", in_custom_op)
        if args.input_requires_grad and grad_input is None:
            grad_input = gemms.dgrad(args, dy, gemms.dgrad_weight(args) if weight is None else weight)
        if args.placeholder_grad and not in_custom_op:
            grad_weight = gemms.empty_weight(args)
        dx = None if grad_input is None else gemms.with_leading(grad_input.wait(), args.leading)
        return dx, ((grad_weight,),), ((),)
