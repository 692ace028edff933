"""Modules made of basic operations: they own the parameters, under names of their own, and run as pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lowp.distributed.sharding import Sharding
from lowp.errors import fail
from lowp.ops.basic_op import BasicOperation, PartialGradients
from lowp.ops.fuser import OperationFuser


class OperationGroup(PartialGradients):
    """A module made of basic operations, which `Sequential` plans together with its neighbours.

    It owns their parameters; the operations look them up here.

    Args:
        basic_ops: all operations that hold parameters of the module, and the others of its pipeline.
        pipeline: those that `forward` runs; None: all.
    """

    def __init__(self, basic_ops: Sequence[BasicOperation], pipeline: Sequence[BasicOperation] | None = None) -> None:
        nn.Module.__init__(self)
        self.basic_ops: tuple[Any, ...] = tuple(basic_ops)
        self._fuser = OperationFuser(self.basic_ops if pipeline is None else tuple(pipeline))
        self.num_extra_inputs = self._fuser.num_extra_inputs

    def forward(self, input_: Tensor, *extra_inputs: Tensor) -> Any:
        """Run the operations as a pipeline of their own."""
        return self._fuser(input_, *extra_inputs)

    def __setattr__(self, name: str, value: Any) -> None:
        parameters = self.__dict__.get("_parameters", {})
        if name in parameters and (value is None) != (parameters[name] is None):
            hint = "Build another module, with or without it."
            fail(type(self).__name__, f"{name} can be neither added nor removed", got=type(value).__name__, hint=hint)
        super().__setattr__(name, value)

    def set_tensor_parallel_group(self, group: ProcessGroup | None) -> None:
        """Say which ranks the module is split over, where it was built with their number alone.

        Args:
            group: the tensor-parallel group.

        Raises:
            ValueError: it has another number of ranks.
        """
        for op in self.basic_ops:
            if hasattr(op, "set_tensor_parallel_group"):
                op.set_tensor_parallel_group(group)

    def backward_dw(self) -> None:
        """The weight gradients of the earliest backward that left them for later, the last layer's first.

        Raises:
            RuntimeError: as for `BasicLinear.backward_dw`.
        """
        for op in reversed(self.basic_ops):
            if hasattr(op, "backward_dw"):
                op.backward_dw()

    def shardings(self) -> dict[str, Sharding]:
        """How each sharded parameter is split."""
        return {
            owner_name: how
            for op in self.basic_ops
            for name, how in op.shardings().items()
            for owner_name in op.owner_names(name)
        }

    def partial_gradients(self) -> tuple[str, ...]:
        """The parameters of whose gradient each rank computes a part."""
        return tuple(
            owner_name
            for op in self.basic_ops
            for name in op.partial_gradients()
            for owner_name in op.owner_names(name)
        )

    def reset_parameters(self) -> None:
        """Every operation's own initialisation."""
        for op in self.basic_ops:
            op.reset_parameters()
