"""Pipelines and steps that several tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import lowp
from lowp import ops
from lowp.ops import plan as planning
from lowp.replay import Replays

BOUNDARIES = ["operation", "kernel"]


def linear_bias(
    in_features: int = 32,
    out_features: int = 48,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    recipe: Any = None,
    bias_dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> ops.Sequential:
    """Linear + Bias, with a bias that is not zero."""
    pipeline = ops.Sequential(
        ops.BasicLinear(in_features, out_features, device=device, dtype=dtype, **kwargs),
        ops.Bias(out_features, device=device, dtype=bias_dtype or dtype),
        recipe=recipe,
    )
    with torch.no_grad():
        pipeline[1].bias.copy_(torch.randn(out_features))
    return pipeline


def compiled(function: Any, backend: Any = "aot_eager", boundary: str = "operation", **kwargs: Any) -> Any:
    """`torch.compile` without graph breaks, at one boundary."""
    call = torch.compile(function, backend=backend, fullgraph=True, **kwargs)

    def at_boundary(*args: Any) -> Any:
        with lowp.compile_boundary(boundary):
            return call(*args)

    return at_boundary


def step(call: Callable[..., Tensor], module: nn.Module, x: Tensor, dy: Tensor | None = None, *, within: Any = None):
    """One forward and backward with cleared gradients: y, dx and the parameters' gradients, which may be None."""
    x = x.detach().requires_grad_(x.requires_grad)
    for parameter in module.parameters():
        parameter.grad = None
    with within or nullcontext():
        y = call(x)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return [y.detach(), x.grad, *[parameter.grad for parameter in module.parameters()]]


def step_of(
    call: Callable[..., Any],
    module: nn.Module,
    tensors: list[Tensor],
    grads: list[Tensor | None] | None = None,
) -> list[Tensor | None]:
    """`step` with extra inputs and outputs; random operations draw the same numbers each time.

    Args:
        call: takes `tensors`, gives one output or several.
        module: whose parameters' gradients are meant.
        tensors: the input, then the extra inputs; those that require a gradient get one.
        grads: of each output; None: the output is not used.

    Returns:
        The outputs, the gradients of `tensors`, the gradients of the parameters.
    """
    tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    for parameter in module.parameters():
        parameter.grad = None
    torch.manual_seed(0)
    outputs = call(*tensors)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    grads = [torch.ones_like(y) for y in outputs] if grads is None else grads
    used = [(y, dy) for y, dy in zip(outputs, grads, strict=True) if dy is not None and y.requires_grad]
    if used:
        torch.autograd.backward([y for y, _ in used], [dy for _, dy in used])
    return [
        *[y.detach() for y in outputs],
        *[tensor.grad for tensor in tensors],
        *[parameter.grad for parameter in module.parameters()],
    ]


def same(results: list[Tensor | None], others: list[Tensor | None]) -> bool:
    """Whether two lists of tensors are equal bit for bit (zeros of both signs are equal)."""
    return len(results) == len(others) and all(
        a is b if a is None or b is None else a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(results, others, strict=True)
    )


def same_or_absent(results: list[Tensor | None], others: list[Tensor | None]) -> bool:
    """As `same`, where None and zeros count as equal: a compiled backward gets zeros for outputs that aren't used."""
    pairs = list(zip(results, others, strict=True))
    return same(
        [b if a is None and b is not None and not b.any() else a for a, b in pairs],
        [a if b is None and a is not None and not a.any() else b for a, b in pairs],
    )


@contextmanager
def without_replays() -> Iterator[None]:
    """Inside, every pass is an ordinary one."""
    run = Replays.run
    Replays.run = lambda self, function, tensors, key: function()  # type: ignore[method-assign]
    try:
        yield
    finally:
        Replays.run = run  # type: ignore[method-assign]


@contextmanager
def rules(chosen: Callable[[planning.FusionRule], bool]) -> Iterator[None]:
    """Inside, pipelines are built with these rules only."""
    kept = planning._RULES
    planning._RULES = [rule for rule in kept if chosen(rule)]
    try:
        yield
    finally:
        planning._RULES = kept
