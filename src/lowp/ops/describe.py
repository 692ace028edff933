"""A plan as text: the steps of both directions, what they hand to each other, and the rules that didn't apply."""

from __future__ import annotations

from typing import Any

import torch

from lowp.ops.op import DIRECTIONS, Direction, OperationContext
from lowp.ops.plan import Plan, Step
from lowp.recipe import Recipe


def describe(basic_ops: tuple[Any, ...], plan: Plan, dtypes: tuple[torch.dtype, ...], recipe: Recipe | None) -> str:
    """The plan's text, as if all gradients were wanted.

    Args:
        basic_ops: the pipeline.
        plan: how it runs.
        dtypes: each operation's input dtype.
        recipe: the recipe in force.

    Returns:
        A line for each direction and each rule that didn't apply: `a[0] -> b[1]` hands a tensor over,
        `a[0] =E4M3=> b[1]` quantized values.
    """
    ctxs = []
    for op, dtype in zip(basic_ops, dtypes, strict=True):
        ctx = OperationContext()
        ctx.recipe, ctx.autocast_dtype, ctx.dtype = recipe, None, dtype
        ctx.input_requires_grad = ctx.requires_grad = True
        ctx.parameters_require_grad = (True,) * len(op.parameter_names)
        ctx.extra_inputs_require_grad = (True,) * op.num_extra_inputs
        ctxs.append(ctx)
    lines = []
    for direction in DIRECTIONS:
        steps = getattr(plan, direction)
        text = [_name(step) for step in steps]
        for index in range(len(steps) - 1):
            text[index] += _arrow(basic_ops, ctxs, direction, steps[index], steps[index + 1])
        lines.append(f"{direction:9}" + "".join(text))
    return "\n".join([*lines, *plan.declined])


def _name(step: Step) -> str:
    span = f"{step.start}" if step.stop == step.start + 1 else f"{step.start}..{step.stop - 1}"
    return f"{type(step.op).__name__}[{span}]"


def _arrow(basic_ops: tuple[Any, ...], ctxs: list[OperationContext], direction: Direction, step: Step, to: Step) -> str:
    """What a step hands to the next one in its direction."""
    reader = to.start if direction == "forward" else to.stop - 1
    ask = basic_ops[reader].input_request if direction == "forward" else basic_ops[reader].grad_output_request
    request = ask(ctxs[reader])
    if request is None or not step.op.hands_over(ctxs[step.start : step.stop], direction, request):
        return " -> "
    return f" ={request.quantizer.fmt!r}=> "
