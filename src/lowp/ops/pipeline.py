"""One autograd.Function for a whole pipeline of operations, outside the registered operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowp.ops.boundary import compile_boundary_is_operation
from lowp.ops.op import BackwardContext, Direction, FusibleOperation, OperationContext
from lowp.ops.plan import Plan
from lowp.ops.registered import split_groups
from lowp.recipe import Recipe
from lowp.replay import Replays, layouts
from lowp.torch_compat import release_saved_tensors


class Call(NamedTuple):
    """One call of a pipeline: all that is not a tensor.

    Attributes:
        basic_ops: the operations.
        plan: how they run.
        recipe: the recipe in force; None: high precision.
        autocast_dtype: the dtype that torch.autocast asks for; None: it is off.
        dtypes: each operation's input dtype.
        input_requires_grad: for each operation, whether its input's gradient is wanted.
        requires_grad: for each operation, whether its backward will run.
        parameters_require_grad: for each operation and parameter, whether its gradient is wanted.
        extra_inputs_require_grad: for each operation and extra input, likewise.
        kwargs: each operation's keyword arguments.
        can_be_replayed: whether all operations say that both passes can be.
        replays: what is known of forward and of backward, on tensors of the layouts that this call is for; None: they
            are not replayed.
    """

    basic_ops: tuple[Any, ...]
    plan: Plan
    recipe: Recipe | None
    autocast_dtype: torch.dtype | None
    dtypes: tuple[torch.dtype, ...]
    input_requires_grad: tuple[bool, ...]
    requires_grad: tuple[bool, ...]
    parameters_require_grad: tuple[tuple[bool, ...], ...]
    extra_inputs_require_grad: tuple[tuple[bool, ...], ...]
    kwargs: list[dict[str, Any]]
    can_be_replayed: bool = False
    replays: tuple[Replays, Replays] | None = None


def forward(call: Call, input_: Any, tensors: Sequence[Tensor]) -> tuple[Any, list[OperationContext]]:
    """Run the forward pass, replayed where that can be.

    Args:
        call: the call.
        input_: the first operation's input.
        tensors: parameters of all operations, then extra inputs of all.

    Returns:
        output, extra outputs of all operations, what each operation saves; the operations' contexts, without tensors.
    """

    def run() -> tuple[Any, list[OperationContext]]:
        output, extra_outputs, ctxs = run_forward(call, input_, tensors)
        saved = tuple([ctx.to_save for ctx in ctxs])
        for ctx in ctxs:
            ctx.to_save = ()
        return (output, tuple(extra_outputs), saved), ctxs

    return run() if call.replays is None else call.replays[0].run(run, [input_, *tensors], _ONLY_LAYOUT)


_ONLY_LAYOUT = True
"""The key of a call's forward passes: a call is for tensors of the same layouts."""


def run_forward(call: Call, input_: Any, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor], list[OperationContext]]:
    """Run the forward steps.

    Args:
        call: the call.
        input_: the first operation's input.
        tensors: parameters of all operations, then extra inputs of all.

    Returns:
        output; extra outputs of all operations; the operations' contexts, filled where a backward will run.
    """
    counts = [len(op.parameter_names) for op in call.basic_ops]
    ctxs = _contexts(call, split_groups(tensors, counts))
    extra_inputs = split_groups(tensors[sum(counts) :], [op.num_extra_inputs for op in call.basic_ops])
    extra_outputs: list[Tensor] = []
    fresh = False  # whether `input_` is a tensor that this call made and that nobody else holds
    steps = call.plan.forward
    for index in range(len(steps)):
        op, start, stop = steps[index]
        grad_request = input_request = None
        if index > 0:
            previous = steps[index - 1].stop - 1
            if call.requires_grad[previous]:
                grad_request = call.basic_ops[previous].grad_output_request(ctxs[previous])
        if index + 1 < len(steps):
            following = steps[index + 1].start
            input_request = call.basic_ops[following].input_request(ctxs[following])
        args = op.pack_forward_args(
            ctxs[start:stop],
            input_,
            basic_op_extra_inputs=extra_inputs[start:stop],
            basic_op_kwargs=call.kwargs[start:stop],
            prev_op_grad_output_quantizer=grad_request,
            next_op_input_quantizer=input_request,
        )
        output, extra, aux = compute(op, "forward", args)
        for wanted, outputs in zip(call.requires_grad[start:stop], extra, strict=True):
            for tensor in outputs:
                if tensor is None and op.extra_output_is_input:
                    extra_outputs.append(_as_output(input_, wanted) if fresh else input_.clone())
                    fresh = False
                else:
                    extra_outputs.append(tensor)
        if output is not None or not op.output_is_input:
            input_, fresh = output, fresh or not op.is_view
        if call.requires_grad[stop - 1]:
            op.forward_setup_context(ctxs[start:stop], args, aux)
    for ctx in ctxs:
        ctx.parameters = ()  # what backward reads is saved
    if not fresh:
        input_ = input_.clone()
    elif steps[-1].op.is_view:  # a Function's output that is a view can't be changed in place
        input_ = torch.ops.aten._unsafe_view.default(input_, list(input_.shape))
    return input_, extra_outputs, ctxs


def _as_output(x: Tensor, requires_grad: bool) -> Tensor:
    """What an operation made, as an extra output: a view in traced code, where it may be a saved tensor as well.

    In code that torch 2.11 traces, an output of a Function that it also saves loses its gradient, and
    `mark_non_differentiable` has no effect on a view. Remove with torch 2.11.
    """
    return x.view_as(x) if requires_grad and torch.compiler.is_compiling() else x


def _contexts(call: Call, parameters: list[tuple[Tensor, ...]]) -> list[OperationContext]:
    ctxs = []
    for index in range(len(call.basic_ops)):
        ctx = OperationContext()
        ctx.recipe = call.recipe
        ctx.autocast_dtype = call.autocast_dtype
        ctx.dtype = call.dtypes[index]
        ctx.input_requires_grad = call.input_requires_grad[index]
        ctx.requires_grad = call.requires_grad[index]
        ctx.parameters = parameters[index]
        ctx.parameters_require_grad = call.parameters_require_grad[index]
        ctx.extra_inputs_require_grad = call.extra_inputs_require_grad[index]
        ctxs.append(ctx)
    return ctxs


def compute(op: FusibleOperation, direction: Direction, args: Any) -> Any:
    """Run one step: as a node of the graph at the operation boundary, directly otherwise."""
    registered = op.registered.get(direction)
    if registered is not None and torch.compiler.is_compiling() and compile_boundary_is_operation():
        return registered(args)
    return op.forward_compute(args) if direction == "forward" else op.backward_compute(args)


class Pipeline(torch.autograd.Function):
    """The gradient of a pipeline: `apply(input, call, *parameters of all operations, *extra inputs of all)`."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, call: Call, *tensors: Tensor) -> Any:
        """Run the forward steps and save what backward reads."""
        ctx.set_materialize_grads(False)
        (output, extra_outputs, saved), ctx.op_ctxs = forward(call, input_, tensors)
        ctx.save_for_backward(*[tensor for group in saved for tensor in group])
        ctx.saved_counts = [len(group) for group in saved]
        ctx.call = call
        if not extra_outputs:
            return output
        groups = split_groups(extra_outputs, [op.num_extra_outputs for op in call.basic_ops])
        inert = [group for group, wanted in zip(groups, call.requires_grad, strict=True) if not wanted]
        ctx.mark_non_differentiable(*[tensor for group in inert for tensor in group])
        return (output, *extra_outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Run the backward steps; under `create_graph=True`, to gradients that raise when they are differentiated."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled():  # in traced code, it costs nothing
            return _differentiable_once(ctx, *grads)
        return _backward(ctx, *grads)


def _backward(ctx: Any, *grads: Tensor | None) -> Any:
    """The gradients of input, call (None), parameters and extra inputs, from those of output and extra outputs."""
    call: Call = ctx.call
    op_ctxs, counts = ctx.op_ctxs, ctx.saved_counts
    tensors = [*grads, *ctx.saved_tensors]
    if not torch.compiler.is_compiling():
        release_saved_tensors(ctx)  # from here on `tensors` holds them, and what reads it lets go of each

    def run() -> tuple[Any, tuple[()]]:
        extra_counts = [op.num_extra_outputs for op in call.basic_ops]
        grad, *grad_extra = split_groups(tensors, [1, *extra_counts])
        saved = split_groups(tensors[1 + sum(extra_counts) :], counts)
        tensors.clear()
        ctxs = [BackwardContext(op_ctx, group) for op_ctx, group in zip(op_ctxs, saved, strict=True)]
        del saved
        grad_input, grad_parameters, grad_inputs = run_backward(call, ctxs, grad[0], grad_extra)
        return (grad_input, None, *[g for group in grad_parameters + grad_inputs for g in group]), ()

    return (run() if call.replays is None else call.replays[1].run(run, tensors, layouts(tensors)))[0]


_differentiable_once = once_differentiable(_backward)


def run_backward(
    call: Call,
    ctxs: list[BackwardContext],
    grad: Any,
    grad_extra_outputs: list[tuple[Tensor | None, ...]],
) -> tuple[Any, list[tuple[Tensor | None, ...]], list[tuple[Tensor | None, ...]]]:
    """Run the backward steps.

    Returns:
        gradient of the input; of each operation's parameters; of each operation's extra inputs.
    """
    grad_parameters: list[tuple[Tensor | None, ...]] = [(None,) * len(op.parameter_names) for op in call.basic_ops]
    grad_inputs: list[tuple[Tensor | None, ...]] = [(None,) * op.num_extra_inputs for op in call.basic_ops]
    for op, start, stop in call.plan.backward:
        if not call.requires_grad[stop - 1]:
            grad = None
            break
        grad_extra = grad_extra_outputs[start:stop]
        if grad is None and not [g for group in grad_extra for g in group if g is not None]:
            continue  # only outputs of earlier operations were used
        args = op.pack_backward_args(ctxs[start:stop], grad, basic_op_grad_extra_outputs=grad_extra)
        for ctx in ctxs[start:stop]:
            ctx.saved_tensors = ()  # the arguments hold what is still read
        if not op.grad_input_is_grad_output:
            grad = None  # the operation may release it
        grad_input, parameters, inputs = compute(op, "backward", args)
        if grad_input is None and op.grad_input_is_grad_output and call.input_requires_grad[start]:
            grad_input = grad
        if isinstance(grad_input, Tensor) and grad_input.dtype != call.dtypes[start]:
            grad_input = grad_input.to(call.dtypes[start])
        grad = grad_input
        for index in range(start, stop):
            grad_parameters[index] = parameters[index - start]
            grad_inputs[index] = inputs[index - start]
    return grad, grad_parameters, grad_inputs
