"""ops.Linear: BasicLinear, Bias and the collective between them, as one module with nn.Linear's parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lowp.distributed.shapes import ParallelMode
from lowp.distributed.sharding import Sharding, init_sharded_
from lowp.errors import fail
from lowp.ops.basic.basic_linear import BasicLinear
from lowp.ops.basic.bias import Bias
from lowp.ops.basic_op import BasicOperation, PartialGradients
from lowp.ops.fuser import OperationFuser


class OperationGroup(PartialGradients):
    """A module made of basic operations, which `Sequential` plans together with its neighbours.

    It owns their parameters; the operations look them up here.
    """

    def __init__(self, basic_ops: tuple[BasicOperation, ...]) -> None:
        super().__init__()
        self.basic_ops: tuple[Any, ...] = basic_ops
        self._fuser = OperationFuser(basic_ops)
        self.num_extra_inputs = self._fuser.num_extra_inputs

    def forward(self, input_: Tensor, *extra_inputs: Tensor) -> Any:
        """Run the operations as a pipeline of their own."""
        return self._fuser(input_, *extra_inputs)

    def shardings(self) -> dict[str, Sharding]:
        """How each sharded parameter is split."""
        return {op.owner_name(name): how for op in self.basic_ops for name, how in op.shardings().items()}

    def partial_gradients(self) -> tuple[str, ...]:
        """The parameters of whose gradient each rank computes a part."""
        return tuple(op.owner_name(name) for op in self.basic_ops for name in op.partial_gradients())

    def reset_parameters(self) -> None:
        """Every operation's own initialisation."""
        for op in self.basic_ops:
            op.reset_parameters()


class Linear(OperationGroup):
    """`y = x @ w.T + b`.

    Args:
        in_features: K, of the whole layer.
        out_features: N, of the whole layer.
        bias: whether there is one.
        device: of the parameters.
        dtype: of the parameters.
        tensor_parallel_mode: None, "column" or "row"; local shapes are tabled in `lowp.distributed.shapes`.
        tensor_parallel_group: the ranks.
        sequence_parallel: tokens are split along the first axis where the layer is not.
        keep_gathered_input: as for `BasicLinear`.
        accumulate_into_main_grad: as for `BasicLinear`.

    Attributes:
        weight: `[out_features, in_features]`, this rank's part of it.
        bias: `[out_features]`, this rank's part of it, or None. Under "row" it is added once, after the sum; with
            sequence parallelism it carries `sequence_parallel = True`, since each rank then has a part of its gradient.

    Raises:
        ValueError: as for `BasicLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: ParallelMode | None = None,
        tensor_parallel_group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        keep_gathered_input: bool = False,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        linear = BasicLinear(
            in_features,
            out_features,
            device=device,
            dtype=dtype,
            tensor_parallel_mode=tensor_parallel_mode,
            tensor_parallel_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            keep_gathered_input=keep_gathered_input,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )
        if not bias:
            super().__init__((linear,))
            linear.bind(self, weight="weight")
            self.register_parameter("bias", None)
            return
        add = Bias(
            out_features,
            device=device,
            dtype=dtype,
            tensor_parallel_group=tensor_parallel_group if tensor_parallel_mode == "column" else None,
            sequence_parallel=sequence_parallel and tensor_parallel_mode == "row",
        )
        add.promotes = False  # the layer's output has the product's dtype, as nn.Linear's has
        super().__init__((linear, add))
        linear.bind(self, weight="weight")
        add.bind(self, bias="bias")
        self._reset_bias()

    @property
    def in_features(self) -> int:
        """K, of the whole layer."""
        return self.basic_ops[0].in_features

    @property
    def out_features(self) -> int:
        """N, of the whole layer."""
        return self.basic_ops[0].out_features

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "bias" and "_fuser" in self.__dict__ and (value is None) != (len(self.basic_ops) == 1):
            hint = "Build another layer, with bias=True or bias=False."
            fail("Linear", "a bias can be neither added nor removed", got=type(value).__name__, hint=hint)
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """As nn.Linear; the same function of the seed on any number of ranks."""
        super().reset_parameters()
        if self.bias is not None:
            self._reset_bias()

    def _reset_bias(self) -> None:
        linear, add = self.basic_ops
        bound = 1 / math.sqrt(linear.in_features) if linear.in_features else 0.0
        init_sharded_(
            self.get_parameter("bias"),
            (linear.out_features,),
            add.shardings().get("bias"),
            lambda b: nn.init.uniform_(b, -bound, bound),
        )

    def extra_repr(self) -> str:
        """For `print`."""
        return f"{self.basic_ops[0].extra_repr()}, bias={self.bias is not None}"
