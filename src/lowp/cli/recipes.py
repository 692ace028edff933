"""The recipes that the command line runs: one line each, read by `demo`, `bench` and `info`."""

from __future__ import annotations

from lowp import recipe
from lowp.errors import require
from lowp.recipe import Recipe

RECIPES: dict[str, Recipe] = {
    "current": recipe.Float8CurrentScaling(),
}
"""Name on the command line -> recipe."""


def select_recipes(names: list[str] | None) -> dict[str, Recipe]:
    """The recipes of these names, in the table's order.

    Args:
        names: of `RECIPES`; None or empty: all of them.

    Raises:
        ValueError: there is no recipe of a name.
    """
    unknown = sorted(set(names or ()) - set(RECIPES))
    require(not unknown, "recipes", f"a recipe must be one of {', '.join(RECIPES)}", got=", ".join(unknown))
    return {name: value for name, value in RECIPES.items() if not names or name in names}
