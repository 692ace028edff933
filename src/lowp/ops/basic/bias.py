"""Bias: `y = x + b`.

    db_N = sum over all leading axes of dy      dx = dy, the gradient itself

Where the operation before takes its output's gradient quantized, backward sums the bias gradient in the pass that
quantizes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lowp.distributed.groups import GroupHandle
from lowp.distributed.shapes import Split, local_size, rank_count
from lowp.distributed.sharding import DEFAULT_INITIALIZATION, Initialization, Sharding, init_sharded_
from lowp.errors import require
from lowp.formats import HIGH_PRECISION
from lowp.kernels.bias_grad import bias_grad
from lowp.kernels.elementwise import add
from lowp.ops.basic_op import BasicOperation, check_size
from lowp.ops.handover import copies, wants_quantized
from lowp.ops.op import BackwardContext, Direction, OperationContext
from lowp.quantization import Quantized, QuantizeRequest, as_matrix, cast_operand_bias_grad
from lowp.quantizers import Quantizer


@dataclass
class BiasForwardArgs:
    """What the forward pass reads."""

    input: Tensor
    bias: Tensor
    promotes: bool = True


@dataclass
class BiasBackwardArgs:
    """What the backward pass reads."""

    grad_output: Tensor
    bias_dtype: torch.dtype
    bias_requires_grad: bool
    quantizer: Quantizer | None
    row: bool
    column: bool


class Bias(BasicOperation):
    """Adds a learnable bias to the last axis.

    Args:
        size: N, the size of the last axis.
        device: of the parameter.
        dtype: of the parameter.
        tensor_parallel_group: the ranks that the last axis is split over, after a column-parallel layer.
        sequence_parallel: the tokens are split over ranks, so that each has a part of the bias's gradient: the
            parameter carries `sequence_parallel = True`, and `lowp.distributed.reduce_sequence_parallel_grads`
            completes it.
        split: how the layer that it belongs to is split, instead of the two arguments above it.
        initialization: of the bias.

    Attributes:
        bias: `[N]`, this rank's part of it.

    The output's dtype is torch's promotion of the input's and the bias's, or the input's where `promotes` is False.
    """

    fwd_args_type = BiasForwardArgs
    bwd_args_type = BiasBackwardArgs
    grad_input_is_grad_output = True
    quantizes_grad_input = True
    parameter_names = ("bias",)
    replays = True

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        split: Split | None = None,
        initialization: Initialization = DEFAULT_INITIALIZATION,
    ) -> None:
        super().__init__()
        require(size >= 0, "Bias", "size must not be negative", got=size)
        split = split or Split("column" if tensor_parallel_group is not None else None, tensor_parallel_group)
        self.promotes = True
        self.sequence_parallel = sequence_parallel or (split.mode == "row" and split.sequence_parallel)
        self._parts = split.parts
        self._group = GroupHandle(split.group if split.mode == "column" else None)
        self._ranks = rank_count("Bias", split.group, split.size) if split.mode == "column" else 1
        self._initialization = initialization
        local_size("Bias", "size", size // split.parts, self._ranks)
        self.size = size // self._ranks
        self.bias = nn.Parameter(torch.empty(self.size, device=device, dtype=dtype))
        self.mark_partial_gradients()
        self.reset_parameters()

    def set_tensor_parallel_group(self, group: ProcessGroup | None) -> None:
        """Say which ranks the bias is split over, where only their number was known.

        Raises:
            ValueError: it has another number of ranks.
        """
        if self._ranks > 1:
            rank_count("Bias", group, self._ranks)
            self._group = GroupHandle(group)

    def shardings(self) -> dict[str, Sharding]:
        """How the bias is split."""
        if self._group.group is None and self._parts == 1:
            return {}
        return {"bias": Sharding(0, self._group.group, self._parts)}

    def partial_gradients(self) -> tuple[str, ...]:
        """The bias, where tokens are split."""
        return ("bias",) if self.sequence_parallel else ()

    def reset_parameters(self) -> None:
        """Initialise the bias; by default with zeros."""
        for bias in self.pieces("bias"):
            whole = (bias.shape[0] * self._ranks,)
            init_sharded_(bias, whole, self.shardings().get("bias"), self._initialization, nn.init.zeros_)

    def extra_repr(self) -> str:
        """For `print`."""
        return f"size={self.size}"

    def output_dtype(
        self, input_dtype: torch.dtype, autocast_dtype: torch.dtype | None, extra_dtypes: tuple[torch.dtype, ...] = ()
    ) -> torch.dtype:
        """As torch promotes the input's and the bias's."""
        if not self.promotes:
            return input_dtype
        return torch.promote_types(input_dtype, self.parameter("bias").dtype)

    def hands_over(
        self, basic_op_ctxs: list[OperationContext], direction: Direction, request: QuantizeRequest | None
    ) -> bool:
        """In backward, where its own gradient is wanted and the sum's dtype is the input's."""
        ctx = basic_op_ctxs[0]
        same = self.output_dtype(ctx.dtype, ctx.autocast_dtype) == ctx.dtype
        return direction == "backward" and ctx.parameters_require_grad[0] and same and wants_quantized(request)

    def pack_forward_args(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: QuantizeRequest | None,
        **_: Any,
    ) -> BiasForwardArgs:
        """The input and the bias."""
        check_size("Bias", "the last axis of the input", input_, self.size)
        self.setup_bias(basic_op_ctxs[0], prev_op_grad_output_quantizer)
        return BiasForwardArgs(input_, basic_op_ctxs[0].parameters[0], self.promotes)

    def setup_bias(self, ctx: OperationContext, request: QuantizeRequest | None) -> None:
        """Fill this operation's context; for fusions too."""
        ctx.bias_dtype = ctx.parameters[0].dtype
        ctx.bias_request = request

    @classmethod
    def forward_compute(cls, args: BiasForwardArgs, *, in_custom_op: bool = False) -> Any:
        """The sum."""
        bias = args.bias if args.promotes else args.bias.to(args.input.dtype)
        return add(args.input, bias), ((),), ()

    def pack_backward_args(
        self, basic_op_ctxs: list[BackwardContext], grad_output: Tensor, **_: Any
    ) -> BiasBackwardArgs:
        """The gradient, and what the operation before reads."""
        ctx = basic_op_ctxs[0]
        same = grad_output.dtype == ctx.dtype  # else what is quantized is rounded first, and what is summed is not
        quantizer, row, column = copies(ctx.bias_request if same else None, self.size)
        return BiasBackwardArgs(grad_output, ctx.bias_dtype, ctx.parameters_require_grad[0], quantizer, row, column)

    @classmethod
    def backward_compute(cls, args: BiasBackwardArgs, *, in_custom_op: bool = False) -> Any:
        """The bias's gradient, with the quantized gradient where the operation before reads it."""
        dy_MN = as_matrix(args.grad_output)
        grad_input: Quantized | None = None
        grad_bias: Tensor | None = None
        if args.quantizer is not None and args.bias_requires_grad:
            grad_input, grad_bias = cast_operand_bias_grad(
                dy_MN, None, args.quantizer, row=args.row, column=args.column, dtype=args.bias_dtype
            )
        elif args.bias_requires_grad and dy_MN.dtype in HIGH_PRECISION and args.bias_dtype in HIGH_PRECISION:
            grad_bias = bias_grad(dy_MN, dtype=args.bias_dtype)
        elif args.bias_requires_grad:  # fp64
            grad_bias = dy_MN.sum(0).to(args.bias_dtype)
        return grad_input, ((grad_bias,),), ((),)
