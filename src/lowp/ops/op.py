"""The interface of fusible operations.

A basic operation owns parameters; a fused operation stands for several basic ones and owns none. Both run through the
same five steps, eager and compiled:

    pack_forward_args -> forward_compute -> forward_setup_context      pack_backward_args -> backward_compute
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lowp.ops.registered import register_direction
from lowp.quantization import QuantizeRequest
from lowp.recipe import Recipe

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


class OperationContext:
    """What the pipeline tells one basic operation about a call, and what that operation keeps for its backward.

    Attributes:
        recipe: the recipe in force; None: high precision.
        autocast_dtype: the dtype that torch.autocast asks for; None: it is off.
        dtype: of the operation's input, before quantization.
        input_requires_grad: whether the input's gradient is wanted.
        requires_grad: whether the operation's backward will run.
        parameters: of the operation, in the order of `parameter_names`, while forward runs.
        parameters_require_grad: whether each parameter's gradient is wanted.
        extra_inputs_require_grad: whether each extra input's gradient is wanted.
    """

    recipe: Recipe | None
    autocast_dtype: torch.dtype | None
    dtype: torch.dtype
    input_requires_grad: bool
    requires_grad: bool
    parameters: tuple[Tensor, ...]
    parameters_require_grad: tuple[bool, ...]
    extra_inputs_require_grad: tuple[bool, ...]

    def __init__(self) -> None:
        self.to_save: tuple[Tensor | None, ...] = ()

    if TYPE_CHECKING:  # operations set what they like

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep plain tensors: inputs, or results of kernels; never a buffer that changes."""
        self.to_save = tensors


class BackwardContext:
    """An `OperationContext` in backward: its attributes but for the recipe, and `saved_tensors`.

    What depends on the recipe is decided in forward and arrives as simple values.
    """

    def __init__(self, forward: OperationContext, saved_tensors: tuple[Tensor | None, ...]) -> None:
        self._forward = forward
        self.saved_tensors = saved_tensors

    def __getattr__(self, name: str) -> Any:
        if name == "recipe":
            raise AttributeError(
                "BackwardContext: backward has no recipe; set what it decides on the context in forward."
            )
        return getattr(self._forward, name)


class FusibleOperation(nn.Module):
    """An operation that the fuser can plan, with its own forward and backward.

    Class attributes:
        fwd_args_type: dataclass whose fields are the forward operator's schema; None: traced inline.
        bwd_args_type: the same of backward. It may declare `GRAD_OUTPUT_FIELDS`, one field for the gradient of the
            output and of each extra output, in this order; each of them may be None.
        grad_input_is_grad_output: backward passes the gradient through where `backward_compute` gives none.
        output_is_input: forward passes the input through where `forward_compute` gives none.
        extra_output_is_input: likewise, the extra outputs. What others would hold too is copied.
        is_view: the output is a view of the input.
        parameter_names: the parameters, in the order of their gradients.
        num_extra_inputs, num_extra_outputs: tensors besides input and output.
        quantizes_output, quantizes_grad_input: the result may be `Quantized`.
        replays: both passes depend on their tensors' layouts and the operation's attributes only, and change nothing
            but what they are given: they may be replayed (see `lowp.replay`). A derived class that overrides
            a method must say so again.
    """

    fwd_args_type: ClassVar[type | None] = None
    bwd_args_type: ClassVar[type | None] = None
    grad_input_is_grad_output: ClassVar[bool] = False
    output_is_input: ClassVar[bool] = False
    extra_output_is_input: ClassVar[bool] = False
    is_view: ClassVar[bool] = False
    parameter_names: ClassVar[tuple[str, ...]] = ()
    num_extra_inputs: ClassVar[int] = 0
    num_extra_outputs: ClassVar[int] = 0
    quantizes_output: ClassVar[bool] = False
    quantizes_grad_input: ClassVar[bool] = False
    replays: ClassVar[bool] = False

    registered: ClassVar[dict[str, Callable[[Any], Any] | None]] = {}
    """The functions that call the registered operators, by direction; None or absent: traced inline."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.registered = dict(cls.registered)
        for direction in DIRECTIONS:
            cls.registered |= register_direction(cls, direction, replays=says_it_replays(cls))

    @classmethod
    def basic_types(cls) -> tuple[type[FusibleOperation], ...]:
        """The basic operations that this one stands for."""
        return (cls,)

    def pack_forward_args(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Any,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        basic_op_kwargs: list[dict[str, Any]],
        prev_op_grad_output_quantizer: QuantizeRequest | None,
        next_op_input_quantizer: QuantizeRequest | None,
    ) -> Any:
        """Everything that `forward_compute` reads, as `fwd_args_type`."""
        raise NotImplementedError

    @classmethod
    def forward_compute(cls, args: Any, *, in_custom_op: bool = False) -> tuple[Any, Any, tuple[Tensor, ...]]:
        """The forward pass, out of kernel functions only.

        Args:
            args: `fwd_args_type`.
            in_custom_op: the call comes through the registered operator: change nothing but mutable arguments.

        Returns:
            output; the extra outputs, a tuple for each basic operation; auxiliary tensors, all of them fresh.
        """
        raise NotImplementedError

    @classmethod
    def forward_compute_fake(cls, args: Any) -> tuple[Any, Any, tuple[Tensor, ...]]:
        """`forward_compute`'s results in shape, dtype, strides and device; by default, from the kernels' own fakes."""
        return cls.forward_compute(args, in_custom_op=True)

    def forward_setup_context(self, basic_op_ctxs: list[OperationContext], args: Any, aux: tuple[Tensor, ...]) -> None:
        """Save in each basic operation's context what any legal backward of it reads."""

    def pack_backward_args(
        self,
        basic_op_ctxs: list[BackwardContext],
        grad_output: Any,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> Any:
        """Everything that `backward_compute` reads, as `bwd_args_type`."""
        raise NotImplementedError

    @classmethod
    def backward_compute(cls, args: Any, *, in_custom_op: bool = False) -> tuple[Any, Any, Any]:
        """The backward pass, out of kernel functions only.

        Args:
            args: `bwd_args_type`.
            in_custom_op: as in `forward_compute`.

        Returns:
            gradient of the input; of the parameters, a tuple for each basic operation; of the extra inputs, likewise.
            None: not computed.
        """
        raise NotImplementedError

    @classmethod
    def backward_compute_fake(cls, args: Any) -> tuple[Any, Any, Any]:
        """`backward_compute`'s results in shape, dtype, strides and device; by default, from the kernels' own fakes."""
        return cls.backward_compute(args, in_custom_op=True)

    def is_kind(self, kind: type) -> bool:
        """Whether fusion rules that name `kind` hold: for it, and for classes that change its constructor alone."""
        return computes_as(type(self), kind)

    def compile_unsupported_reason(self, direction: Direction) -> str | None:
        """Why this direction can't be compiled; None: it can."""
        return None

    def output_dtype(
        self, input_dtype: torch.dtype, autocast_dtype: torch.dtype | None, extra_dtypes: tuple[torch.dtype, ...] = ()
    ) -> torch.dtype:
        """The output's dtype, before quantization, from the dtypes of the input and of the extra inputs."""
        return input_dtype

    def input_request(self, ctx: OperationContext) -> QuantizeRequest | None:
        """The quantized form in which this operation would take its input; None: high precision."""
        return None

    def grad_output_request(self, ctx: OperationContext) -> QuantizeRequest | None:
        """The quantized form in which this operation would take its output's gradient; None: high precision."""
        return None

    def hands_over(
        self, basic_op_ctxs: list[OperationContext], direction: Direction, request: QuantizeRequest | None
    ) -> bool:
        """Whether the result of a direction is given quantized to a neighbour with this request, if the size fits."""
        return False


_METHODS = (FunctionType, classmethod, staticmethod, property)
_HARMLESS = ("__init__", "extra_repr", "reset_parameters")


def computes_as(cls: type, kind: type) -> bool:
    """Whether `cls` is `kind`, or derives from it and overrides none of its methods but harmless ones."""
    for derived in cls.__mro__ if issubclass(cls, kind) else ():
        if derived is kind:
            return True
        for name, value in vars(derived).items():
            if isinstance(value, _METHODS) and hasattr(kind, name) and name not in _HARMLESS:
                return False
    return False


def says_it_replays(cls: type) -> bool:
    """Whether the class says so, or the one that it derives from and computes as."""
    for owner in cls.__mro__:
        if "replays" in vars(owner):
            return vars(owner)["replays"] and computes_as(cls, owner)
    return False
