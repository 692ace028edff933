"""Who runs a module case, as data: torch, lowp with each recipe, and torchao where it is installed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import lowp
from lowp.cli.bench.cases import ModuleCase
from lowp.cli.machine import package_version
from lowp.ops.boundary import Boundary
from lowp.recipe import Recipe

BASELINE = "bf16 torch.compile"
"""What ratios are to."""
HOST_BASELINE = "bf16 eager"
"""What ratios of host time are to."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a module.

    Attributes:
        name: of the table.
        library: whose module.
        recipe: of the linear layers, and what a result may differ by; None: bf16.
        compiled: through torch.compile.
        boundary: what torch.compile sees of lowp's operations.
        mode: of torch.compile.
        torchao: torchao's name of its recipe.
    """

    name: str
    library: Literal["torch", "lowp", "torchao"]
    recipe: Recipe | None = None
    compiled: bool = False
    boundary: Boundary = "operation"
    mode: str | None = None
    torchao: str = ""

    def build(self, case: ModuleCase, reference: nn.Module, backend: str) -> tuple[nn.Module, Callable[[Tensor], Any]]:
        """A module with the reference's parameter values, and the function that runs it.

        Args:
            case: the module case.
            reference: torch's module, on its device and in its dtype; it is copied.
            backend: of torch.compile.
        """
        module = self._module(case, reference)
        function: Callable[[Tensor], Any] = module
        if self.library == "lowp":
            function = functools.partial(_under, self.recipe, module)
        if not self.compiled:
            return module, function
        options: dict[str, Any] = {"mode": self.mode} if self.mode else {"backend": backend}
        compiled = torch.compile(function, fullgraph=self.library == "lowp", **options)
        return module, functools.partial(_at, self.boundary, compiled) if self.library == "lowp" else compiled

    def _module(self, case: ModuleCase, reference: nn.Module) -> nn.Module:
        parameter = next(reference.parameters())
        module = case.lowp() if self.library == "lowp" else case.reference()
        module = module.to(parameter.device, parameter.dtype)
        with torch.no_grad():
            for own, other in zip(module.parameters(), reference.parameters(), strict=True):
                own.copy_(other)
        if self.library != "torchao":
            return module
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(self.torchao)
        return convert_to_float8_training(nn.Sequential(module), config=config)


def _under(recipe: Recipe | None, module: nn.Module, x: Tensor) -> Any:
    with lowp.autocast(enabled=recipe is not None, recipe=recipe):
        return module(x)


def _at(boundary: Boundary, function: Callable[[Tensor], Any], x: Tensor) -> Any:
    with lowp.compile_boundary(boundary) if boundary != "operation" else contextlib.nullcontext():
        return function(x)


def make_variants(recipes: dict[str, Recipe], *, cuda: bool) -> list[Variant]:
    """All variants of a case.

    Args:
        recipes: that lowp runs.
        cuda: whether it runs on a GPU: `mode="reduce-overhead"` is then one of the variants.
    """
    variants = [
        Variant(name=HOST_BASELINE, library="torch"),
        Variant(name=BASELINE, library="torch", compiled=True),
        Variant(name="lowp bf16 eager", library="lowp"),
        Variant(name="lowp bf16 compiled", library="lowp", compiled=True),
    ]
    for name, recipe in recipes.items():
        variants += [
            Variant(name=f"lowp {name} eager", library="lowp", recipe=recipe),
            Variant(name=f"lowp {name} compiled, operations", library="lowp", recipe=recipe, compiled=True),
            Variant(
                name=f"lowp {name} compiled, kernels", library="lowp", recipe=recipe, compiled=True, boundary="kernel"
            ),
        ]
    if cuda:
        mode = "reduce-overhead"
        variants.append(Variant(name=f"bf16 {mode}", library="torch", compiled=True, mode=mode))
        for name, recipe in recipes.items():
            variants.append(
                Variant(name=f"lowp {name} {mode}", library="lowp", recipe=recipe, compiled=True, mode=mode)
            )
    if cuda and package_version("torchao") is not None:
        current = lowp.recipe.Float8CurrentScaling()
        for name in ("tensorwise", "rowwise"):
            variants.append(
                Variant(name=f"torchao {name} compiled", library="torchao", recipe=current, compiled=True, torchao=name)
            )
    return variants
