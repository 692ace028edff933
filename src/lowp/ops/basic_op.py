"""Basic operations: the modules that users put into `lowp.ops.Sequential`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowp.ops.fuser import OperationFuser
from lowp.ops.op import FusibleOperation
from lowp.recipe import Recipe


class BasicOperation(FusibleOperation):
    """An operation that owns its parameters and runs alone as well."""

    def __init__(self) -> None:
        super().__init__()
        self._alone = OperationFuser((self,))

    def own_parameters(self) -> list[nn.Parameter]:
        """The parameters, looked up now, in the order of `parameter_names`."""
        return [getattr(self, name) for name in self.parameter_names]

    def bypassed(self, recipe: Recipe | None) -> bool:
        """Whether the operation does nothing under this recipe: it is left out of the plan."""
        return False

    def forward(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """Run this operation alone, as a pipeline of one."""
        return self._alone(input_, *extra_inputs, basic_op_kwargs=[kwargs] if kwargs else None)


class ViewOperation(BasicOperation):
    """An operation that gives a view of its input.

    At the edges of a pipeline it runs as torch's own view, so that a pipeline never returns its input; between other
    operations it takes part in their pipeline, traced inline.
    """

    def view(self, input_: Tensor) -> Tensor:
        """The view."""
        raise NotImplementedError

    def forward(self, input_: Tensor, *_: Tensor, **__: Any) -> Tensor:
        """The view, differentiated by torch."""
        return self.view(input_)


def check_size(op: str, what: str, x: Tensor, size: int) -> None:
    """Raise unless the last axis of `x` has `size` elements."""
    if x.ndim == 0 or x.shape[-1] != size:
        raise ValueError(f"{op}: {what} must have {size} elements, got shape {tuple(x.shape)}.")
