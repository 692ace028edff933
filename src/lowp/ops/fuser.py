"""Runs a group of consecutive basic operations: plans it, and decides between autograd and a plain forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowp.ambient import autocast_is_entered, autocast_was_entered, current_recipe
from lowp.errors import fail
from lowp.ops.describe import describe
from lowp.ops.op import DIRECTIONS, says_it_replays
from lowp.ops.pipeline import Call, Pipeline, forward
from lowp.ops.plan import Plan, candidates, make_plan
from lowp.ops.registered import split_groups
from lowp.recipe import Recipe
from lowp.replay import Replays, layouts, make_room
from lowp.torch_compat import backward_is_running, forward_ad_is_active, plain_apply

if TYPE_CHECKING:
    from lowp.ops.basic_op import BasicOperation


class _UNKNOWN:  # a class: copies and pickles of it stay the same object
    """No recipe, not even None, is known."""


class OperationFuser:
    """A group of basic operations that run as one pipeline."""

    def __init__(self, basic_ops: tuple[BasicOperation, ...]) -> None:
        self.basic_ops = basic_ops
        self.fusions = candidates(basic_ops)
        self.num_extra_inputs = sum(op.num_extra_inputs for op in basic_ops)
        self._replays = all(says_it_replays(type(op)) for op in basic_ops)
        self._plans: dict[Any, Call] = {}  # by dtypes
        self._calls: dict[Any, Call] = {}  # by layouts: those that can be replayed
        self._revisions: list[int] = []
        self._forward_recipe: Any = _UNKNOWN

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}, "_calls": {}, "_forward_recipe": _UNKNOWN}

    def __call__(
        self,
        input_: Tensor,
        *extra_inputs: Tensor,
        recipe: Recipe | None = None,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Run the group.

        Args:
            input_: the first operation's input.
            *extra_inputs: of all operations, in order.
            recipe: instead of the one in force.
            basic_op_kwargs: a dict of keyword arguments for each operation.

        Returns:
            The last operation's output; with extra outputs, a tuple of it and of them all.

        Raises:
            ValueError: the number of extra inputs is not what the operations take.
            RuntimeError: the pipeline first runs inside backward, with no recipe in force.
        """
        if len(extra_inputs) != self.num_extra_inputs:
            fail("OperationFuser", f"takes {self.num_extra_inputs} extra inputs", got=len(extra_inputs))
        recipe = self._resolve(recipe)
        tensors: list[Any] = [input_, *[parameter for op in self.basic_ops for parameter in op.own_parameters()]]
        tensors += extra_inputs
        call = self.prepare(tensors, recipe, basic_op_kwargs)
        if not call.plan.forward:
            return input_
        if call.autocast_dtype is None:
            return self._run(call, tensors)
        with torch.autocast(input_.device.type, enabled=False):
            return self._run(call, tensors)

    def _resolve(self, recipe: Recipe | None) -> Recipe | None:
        """The recipe of this call: the one given, else the one in force.

        Where backward recomputes the pipeline and nothing is in force, that is the recipe of the forward before it.
        """
        if recipe is not None:
            return recipe
        if torch.compiler.is_compiling():
            from lowp.ops.traced import traced_in_backward

            if traced_in_backward() and not autocast_is_entered() and autocast_was_entered():
                raise _no_recipe("compiled", "in that call or around it")
            return current_recipe()
        if backward_is_running() and not autocast_is_entered():
            if self._forward_recipe is _UNKNOWN:
                raise _no_recipe("that first runs", "around it")
            return self._forward_recipe
        self._forward_recipe = current_recipe()
        return self._forward_recipe

    def prepare(self, tensors: list[Any], recipe: Recipe | None, basic_op_kwargs: list[dict[str, Any]] | None) -> Call:
        """Everything that a call of the pipeline needs besides tensors. Remembered in eager mode only.

        Args:
            tensors: the input, parameters of all operations, then extra inputs of all.
            recipe: the recipe in force.
            basic_op_kwargs: a dict of keyword arguments for each operation, or None.

        Returns:
            The call: the same one, if it can be replayed, for tensors of the same layouts.
        """
        device = tensors[0].device.type
        autocast_dtype = None
        if device != "meta" and torch.is_autocast_enabled(device):
            autocast_dtype = torch.get_autocast_dtype(device)
        grads = torch.is_grad_enabled()
        if torch.compiler.is_compiling() or basic_op_kwargs is not None:
            return self._prepare(tensors, recipe, basic_op_kwargs, autocast_dtype, grads)
        revisions = [op.revision for op in self.basic_ops]
        if revisions != self._revisions:  # someone set an attribute of an operation
            self._plans, self._calls, self._revisions = {}, {}, revisions
        bundle = None if recipe is None else recipe.bundle
        facts = [grads, autocast_dtype, bundle, *[op.training for op in self.basic_ops]]
        facts += [None if tensor is None else tensor.requires_grad for tensor in tensors]
        layout = layouts(tensors) if self._replays else None
        key = (*facts, layout)
        call = None if layout is None else self._calls.get(key)
        if call is None:
            call = self._planned(facts, tensors, recipe, autocast_dtype)
            if layout is not None and call.can_be_replayed:
                make_room(self._calls, _MOST_CALLS)
                call = self._calls[key] = call._replace(replays=(Replays(1), Replays()))
        return call

    def _planned(
        self, facts: list[Any], tensors: list[Any], recipe: Recipe | None, autocast_dtype: torch.dtype | None
    ) -> Call:
        """The call for tensors of these dtypes, whatever their layouts."""
        key = (*facts, *[None if tensor is None else tensor.dtype for tensor in tensors])
        call = self._plans.get(key)
        if call is None:
            call = self._plans[key] = self._prepare(tensors, recipe, None, autocast_dtype, torch.is_grad_enabled())
        return call

    def _prepare(
        self,
        tensors: list[Any],
        recipe: Recipe | None,
        basic_op_kwargs: list[dict[str, Any]] | None,
        autocast_dtype: torch.dtype | None,
        grads: bool,
    ) -> Call:
        counts = [len(op.parameter_names) for op in self.basic_ops]
        extra_counts = [op.num_extra_inputs for op in self.basic_ops]
        input_, parameters, extra_inputs = tensors[0], tensors[1 : 1 + sum(counts)], tensors[1 + sum(counts) :]
        extra_dtypes = split_groups([tensor.dtype for tensor in extra_inputs], extra_counts)
        dtypes, plan = self.plan(input_.dtype, autocast_dtype, recipe, extra_dtypes)
        own = split_groups([p is not None and grads and p.requires_grad for p in parameters], counts)
        extra = split_groups([grads and tensor.requires_grad for tensor in extra_inputs], extra_counts)
        wanted = grads and input_.requires_grad
        input_requires_grad, requires_grad = [], []
        for index in range(len(self.basic_ops)):
            input_requires_grad.append(wanted)
            wanted = wanted or any(own[index]) or any(extra[index])
            requires_grad.append(wanted)
        return Call(
            self.basic_ops,
            plan,
            recipe,
            autocast_dtype,
            dtypes,
            tuple(input_requires_grad),
            tuple(requires_grad),
            tuple(own),
            tuple(extra),
            [{} for _ in self.basic_ops] if basic_op_kwargs is None else basic_op_kwargs,
            basic_op_kwargs is None and _can_be_replayed(plan),
        )

    def plan(
        self,
        dtype: torch.dtype,
        autocast_dtype: torch.dtype | None,
        recipe: Recipe | None,
        extra_dtypes: list[tuple[torch.dtype, ...]] | None = None,
    ) -> tuple[tuple[torch.dtype, ...], Plan]:
        """Each operation's input dtype, and the plan; extra inputs of unknown dtype have that of the input."""
        dtypes: list[torch.dtype] = []
        extra: list[tuple[torch.dtype, ...]] = []
        for index in range(len(self.basic_ops)):
            op = self.basic_ops[index]
            dtypes.append(dtype)
            extra.append((dtype,) * op.num_extra_inputs if extra_dtypes is None else extra_dtypes[index])
            dtype = op.output_dtype(dtype, autocast_dtype, extra[index])
        compiling = torch.compiler.is_compiling()
        return tuple(dtypes), make_plan(
            self.basic_ops, self.fusions, tuple(dtypes), tuple(extra), autocast_dtype, recipe, compiling
        )

    def describe(self, dtype: torch.dtype, recipe: Recipe | None) -> str:
        """The plan for people, as if all gradients were wanted."""
        dtypes, plan = self.plan(dtype, None, recipe)
        return describe(self.basic_ops, plan, dtypes, recipe)

    def _run(self, call: Call, tensors: list[Tensor]) -> Any:
        if torch.compiler.is_compiling():
            reason = _unsupported_reason(call.plan)
            if reason is not None:
                from lowp.ops.traced import apply_eagerly

                torch._dynamo.graph_break(msg=reason)  # `fullgraph=True` raises with the reason
                return apply_eagerly(self, call, tensors)
            tensors = _without_repetitions(tensors)
        return self.apply(call, tensors)

    def apply(self, call: Call, tensors: list[Tensor]) -> Any:
        """Run a prepared call on input, parameters and extra inputs, with autograd where gradients are wanted."""
        if call.requires_grad[-1]:
            for op, require_grad in zip(self.basic_ops, call.parameters_require_grad, strict=True):
                op.prepare_parameters(require_grad)
        if call.requires_grad[-1] or (not torch.compiler.is_compiling() and forward_ad_is_active()):
            apply = Pipeline.apply if call.replays is None else _apply_to_plain_tensors  # `layouts` has looked
            return apply(tensors[0], call, *tensors[1:])
        (output, extra_outputs, _), _ = forward(call, tensors[0], tensors[1:])
        return (output, *extra_outputs) if extra_outputs else output


_MOST_CALLS = 64
"""Layouts of a pipeline's tensors that are remembered."""
_apply_to_plain_tensors = plain_apply(Pipeline)


def _no_recipe(which: str, where: str) -> RuntimeError:
    return RuntimeError(
        f"OperationFuser: a pipeline {which} inside backward needs a recipe in force, got none."
        f" Enter lowp.autocast {where} (enabled=False for high precision), or give the pipeline a recipe."
    )


def _without_repetitions(tensors: list[Any]) -> list[Any]:
    """The tensors, with views of those that came before: Dynamo traces no Function that takes a tensor twice."""
    distinct: list[Any] = []
    for tensor in tensors:
        seen = False
        for other in distinct:
            seen = seen or (tensor is other and tensor is not None)
        distinct.append(tensor.view_as(tensor) if seen else tensor)
    return distinct


def _can_be_replayed(plan: Plan) -> bool:
    """Whether the classes of all steps say so."""
    if torch.compiler.is_compiling():
        return False
    return all(says_it_replays(type(step.op)) for step in (*plan.forward, *plan.backward))


def _unsupported_reason(plan: Plan) -> str | None:
    """Why this plan can't be compiled: fusions that can't are left out of it, so a basic operation says so."""
    for direction in DIRECTIONS:
        for step in getattr(plan, direction):
            reason = step.op.compile_unsupported_reason(direction)
            if reason is not None:
                return f"{type(step.op).__name__} {direction}: {reason}"
    return None
