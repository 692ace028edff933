"""A chain of operations, planned as pipelines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lowp.ambient import autocast, current_recipe
from lowp.ops.basic_op import BasicOperation, ViewOperation
from lowp.ops.fuser import OperationFuser
from lowp.ops.group import OperationGroup
from lowp.recipe import Recipe


class Sequential(nn.Sequential):
    """Operations in a row; neighbours are planned together and fused where a rule applies.

    Args:
        *args: operations and modules, or one OrderedDict of them, as nn.Sequential takes. A plain nn.Module runs as it
            is and splits the operations around it into groups.
        recipe: the recipe of what is inside, plain modules and inner pipelines included, instead of the one in force.

    The list methods of nn.Sequential work. `print(sequential.plan)` shows what runs fused.
    """

    def __init__(self, *args: Any, recipe: Recipe | None = None) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"Sequential: recipe must be a lowp.recipe.Recipe, got {type(recipe).__name__}.")
        super().__init__(*args)
        self.recipe = recipe
        self._regroup()

    def _regroup(self) -> None:
        """Split the modules into groups; done whenever the list changes, never in `forward`, which is traced."""
        self._members = tuple(self._modules.values())
        self._groups = tuple(_group(list(self._members)))

    def forward(self, input: Any, *extra_inputs: Tensor) -> Any:
        """Run all modules in order.

        Args:
            input: `[..., in_features]`, as the first module takes it.
            *extra_inputs: of all operations, in order.

        Returns:
            The last module's output; with extra outputs, a tuple of it and of them all.

        Raises:
            ValueError: the number of extra inputs is not what the operations take.
        """
        members = tuple(self._modules.values())
        if not torch.compiler.is_compiling() and members != self._members:  # some tools write into `_modules`
            self._regroup()
        return self._run(members if self._hooked() else self._groups, input, extra_inputs)

    def _hooked(self) -> bool:
        """Whether an operation has hooks or a forward of its own: each is then called as a module, nothing is fused."""
        for module in self._modules.values():
            if isinstance(module, (BasicOperation, OperationGroup)) and (
                module._forward_pre_hooks
                or module._forward_hooks
                or module._backward_pre_hooks
                or module._backward_hooks
                or "forward" in module.__dict__
            ):
                return True
        return False

    def _run(self, groups: Sequence[Any], input: Any, extra_inputs: tuple[Tensor, ...]) -> Any:
        extra_outputs: list[Tensor] = []
        at = 0
        for group in groups:
            stop = at + getattr(group, "num_extra_inputs", 0)
            if isinstance(group, OperationFuser):
                input = group(input, *extra_inputs[at:stop], recipe=self.recipe)
            else:
                with autocast(recipe=self.recipe) if self.recipe is not None else nullcontext():
                    input = group(input, *extra_inputs[at:stop])
                if not isinstance(group, (BasicOperation, OperationGroup)):
                    continue
            at = stop
            if isinstance(input, tuple):
                input, *extra = input
                extra_outputs.extend(extra)
        if at != len(extra_inputs):
            raise ValueError(f"Sequential: the operations take {at} extra inputs, got {len(extra_inputs)}.")
        return (input, *extra_outputs) if extra_outputs else input

    def __getitem__(self, index: int | slice) -> Any:
        """The module at `index`, or a pipeline of the modules of a slice, with the same recipe."""
        part: Any = super().__getitem__(index)
        if isinstance(index, slice):
            part.recipe = self.recipe
        return part

    def __add__(self, other: nn.Sequential) -> Sequential:
        """A pipeline of the modules of both, with this one's recipe."""
        return Sequential(*super().__add__(other), recipe=self.recipe)

    def __mul__(self, count: int) -> Sequential:
        """A pipeline of these modules, `count` times, with the same recipe."""
        return Sequential(*super().__mul__(count), recipe=self.recipe)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_modules", ()):  # tools that convert models replace modules so
            self._regroup()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._regroup()

    @property
    def plan(self) -> str:
        """What runs in each direction, under the recipe in force and for inputs in the weights' dtype.

        `a[0] -> b[1]` hands a tensor over, `a[0] =E4M3=> b[1]` what b reads, quantized as a's result is made.
        """
        recipe = self.recipe or current_recipe()
        dtype = next((parameter.dtype for parameter in self.parameters()), torch.get_default_dtype())
        lines = [f"recipe   {recipe if recipe is not None else 'high precision'}"]
        for group in self._groups:
            if isinstance(group, OperationFuser):
                lines.append(group.describe(dtype, recipe))
            else:
                lines.append(f"module   {type(group).__name__}")
        return "\n".join(lines)


def _is_planned(module: nn.Module) -> bool:
    """Whether a module is an operation that runs as planned: one with a forward of its own is called."""
    return type(module).forward in (BasicOperation.forward, ViewOperation.forward)


def _group(modules: list[nn.Module]) -> list[OperationFuser | nn.Module]:
    groups: list[OperationFuser | nn.Module] = []
    run: list[BasicOperation] = []

    def close() -> None:
        trailing: list[nn.Module] = []
        while run and isinstance(run[-1], ViewOperation):
            trailing.insert(0, run.pop())
        if run:
            groups.append(OperationFuser(tuple(run)))
        groups.extend(trailing)
        run.clear()

    for module in _flat(modules):
        if (
            isinstance(module, BasicOperation)
            and _is_planned(module)
            and (run or not isinstance(module, ViewOperation))
        ):
            run.append(module)
        else:
            close()
            groups.append(module)
    close()
    return groups


def _flat(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Modules, with groups of operations opened up, to be planned together with their neighbours."""
    for module in modules:
        if isinstance(module, OperationGroup) and type(module).forward is OperationGroup.forward:
            yield from module.basic_ops
        else:
            yield module


def _then_regroup(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def changed(self: Sequential, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if "_groups" in self.__dict__:
            self._regroup()
        return result

    return changed


for _name in ("__setitem__", "__delitem__", "append", "insert", "extend", "pop", "__iadd__", "__imul__", "add_module"):
    setattr(Sequential, _name, _then_regroup(getattr(nn.Sequential, _name)))
