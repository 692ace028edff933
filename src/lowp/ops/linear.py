"""ops.Linear: BasicLinear, Bias and the collective between them, as one module with nn.Linear's parameters."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lowp.distributed.shapes import ParallelMode, Split
from lowp.distributed.sharding import Initialization
from lowp.ops.basic.basic_linear import BasicLinear
from lowp.ops.basic.bias import Bias
from lowp.ops.group import OperationGroup


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
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        add = Bias(
            out_features,
            device=device,
            dtype=dtype,
            split=Split(tensor_parallel_mode, tensor_parallel_group, None, sequence_parallel),
            initialization=Initialization(functools.partial(nn.init.uniform_, a=-bound, b=bound)),
        )
        add.promotes = False  # the layer's output has the product's dtype, as nn.Linear's has
        super().__init__((linear, add))
        linear.bind(self, weight="weight")
        add.bind(self, bias="bias")

    @property
    def in_features(self) -> int:
        """K, of the whole layer."""
        return self.basic_ops[0].in_features

    @property
    def out_features(self) -> int:
        """N, of the whole layer."""
        return self.basic_ops[0].out_features

    def extra_repr(self) -> str:
        """For `print`."""
        return f"{self.basic_ops[0].extra_repr()}, bias={self.bias is not None}"
