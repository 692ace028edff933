"""Basic operations: the modules that users put into `lowp.ops.Sequential`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowp.distributed.sharding import Sharding
from lowp.errors import fail
from lowp.formats import HIGH_PRECISION
from lowp.ops.fuser import OperationFuser
from lowp.ops.op import FusibleOperation
from lowp.recipe import Recipe


class PartialGradients(nn.Module):
    """A module that marks the parameters of whose gradient each rank computes a part: `sequence_parallel = True`.

    torch drops a parameter's attributes when it copies one (deepcopy) or replaces one (`to_empty`): they are set again.
    """

    def partial_gradients(self) -> tuple[str, ...]:
        """The names of these parameters."""
        return ()

    def mark_partial_gradients(self) -> None:
        """Set the mark."""
        for name in self.partial_gradients():
            parameter: Any = self._parameters.get(name)
            if parameter is not None:
                parameter.sequence_parallel = True

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        self.mark_partial_gradients()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark_partial_gradients()


class BasicOperation(PartialGradients, FusibleOperation):
    """An operation that owns its parameters and runs alone as well.

    Attributes:
        revision: grows whenever another attribute is set; what was decided before no longer holds then.
    """

    revision = 0

    def __init__(self) -> None:
        super().__init__()
        self._alone = OperationFuser((self,))
        self._owner: tuple[nn.Module] | None = None
        self._names: dict[str, tuple[str, ...]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "training" and not isinstance(value, nn.Parameter):  # these two are looked at in each call
            self.__dict__["revision"] = self.revision + 1

    def bind(self, owner: nn.Module, **names: str | dict[str, int]) -> None:
        """Hand the parameters over to a facade, which has them under names of its own.

        The operation keeps no second reference: it looks each parameter up on its owner at call time, so that an
        assigned one is used and state_dict keys stay single.

        Args:
            owner: the facade.
            **names: the owner's name of each parameter; or the names and sizes of the pieces along its first axis that
                the owner has instead.
        """
        for name, owner_names in names.items():
            parameter = getattr(self, name)
            delattr(self, name)
            if isinstance(owner_names, str):
                owner.register_parameter(owner_names, parameter)
                self._names[name] = (owner_names,)
                continue
            for piece_name, piece in zip(owner_names, parameter.detach().split([*owner_names.values()]), strict=True):
                owner.register_parameter(piece_name, nn.Parameter(piece.clone()))
            self._names[name] = tuple(owner_names)
        self._owner = (owner,)

    def parameter(self, name: str) -> Tensor:
        """A parameter, looked up now; out of pieces, as their concatenation."""
        names = self._names.get(name)
        if names is not None and len(names) > 1:
            return torch.cat([*self.pieces(name)])
        return self._look_up(name if names is None else names[0])

    def pieces(self, name: str) -> list[Tensor]:
        """The pieces that a parameter is registered as, mostly one."""
        return [self._look_up(owner_name) for owner_name in self.owner_names(name)]

    def _look_up(self, name: str) -> Tensor:
        owner = self if self._owner is None else self._owner[0]
        found = owner._parameters.get(name)  # costs the host less than getattr, which a parametrized one takes
        return getattr(owner, name) if found is None else found

    def owner_names(self, name: str) -> tuple[str, ...]:
        """The names of a parameter, or of its pieces, where it is registered."""
        return self._names.get(name, (name,))

    def shardings(self) -> dict[str, Sharding]:
        """How each sharded parameter is split."""
        return {}

    def own_parameters(self) -> list[Tensor | None]:
        """The parameters, in the order of `parameter_names`; None where there is none."""
        return [self.parameter(name) for name in self.parameter_names]

    def prepare_parameters(self, require_grad: tuple[bool, ...]) -> None:
        """Set attributes of parameters before a forward that a backward will follow.

        Here alone: inside of the pipeline's autograd.Function, traced code that sets them can't save views.

        Args:
            require_grad: whether each parameter's gradient is wanted.
        """

    def bypassed(self, recipe: Recipe | None) -> bool:
        """Whether the operation does nothing under this recipe: it is left out of the plan."""
        return False

    def reset_parameters(self) -> None:
        """Initialise the parameters."""

    def forward(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """Run this operation alone, as a pipeline of one."""
        return self._alone(input_, *extra_inputs, basic_op_kwargs=[kwargs] if kwargs else None)


class ViewOperation(BasicOperation):
    """An operation that gives a view of its input.

    At the edges of a pipeline it runs as torch's own view, so that a pipeline never returns its input; between other
    operations it takes part in their pipeline, traced inline.
    """

    is_view = True

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


def check_high_precision(op: str, x: Tensor) -> None:
    """Raise unless the input is of a dtype that the kernels take."""
    if x.dtype not in HIGH_PRECISION:
        fail(op, f"the input must be one of {HIGH_PRECISION}", got=x.dtype, error=TypeError)
