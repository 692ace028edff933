"""The recipe in force, and `autocast`, which puts one in force."""

from __future__ import annotations

from typing import Any

from lowp.recipe import Float8CurrentScaling, Recipe


class _Ambient:
    """The recipe in force, the only ambient state of the library.

    It holds in all threads: backward, and what it recomputes, runs in threads of its own for CUDA.
    """

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.amax_reduction_group: Any = None
        self.entered = False
        self.was_entered = False


_AMBIENT = _Ambient()


class autocast:  # noqa: N801  a context manager named as torch.autocast is
    """Run lowp's operations inside under a recipe, in all threads.

    Args:
        enabled: False: inside, operations run in high precision.
        recipe: the recipe; None means `Float8CurrentScaling()`.
        amax_reduction_group: process group over which recipes that need it agree on amax; no recipe needs it yet.

    Raises:
        TypeError: `recipe` is not a lowp recipe.
    """

    def __init__(self, enabled: bool = True, recipe: Recipe | None = None, amax_reduction_group: Any = None) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"autocast: enabled must be a bool, got {type(enabled).__name__}. Pass recipe=.")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"autocast: recipe must be a lowp.recipe.Recipe, got {type(recipe).__name__}.")
        self.recipe = (_DEFAULT_RECIPE if recipe is None else recipe) if enabled else None
        self.amax_reduction_group = amax_reduction_group
        self._outer: list[tuple[Recipe | None, Any, bool]] = []

    def __enter__(self) -> autocast:
        self._outer.append((_AMBIENT.recipe, _AMBIENT.amax_reduction_group, _AMBIENT.entered))
        _AMBIENT.recipe, _AMBIENT.amax_reduction_group = self.recipe, self.amax_reduction_group
        _AMBIENT.entered = _AMBIENT.was_entered = True
        return self

    def __exit__(self, *exc: object) -> None:
        _AMBIENT.recipe, _AMBIENT.amax_reduction_group, _AMBIENT.entered = self._outer.pop()


_DEFAULT_RECIPE = Float8CurrentScaling()


def current_recipe() -> Recipe | None:
    """The recipe in force; None: high precision."""
    return _AMBIENT.recipe


def autocast_is_entered() -> bool:
    """Whether an `autocast` is entered, a disabled one included."""
    return _AMBIENT.entered


def autocast_was_entered() -> bool:
    """Whether an `autocast` has ever been entered."""
    return _AMBIENT.was_entered


def current_amax_reduction_group() -> Any:
    """The process group over which amax is agreed; None: this process alone."""
    return _AMBIENT.amax_reduction_group
