"""Where a recipe runs: natively, emulated, or not at all.

status(recipe, device) = the first of these that holds
    emulated     on a CPU: operands are quantized, then dequantized and multiplied in fp32
    unavailable  the device is missing, is no NVIDIA GPU, or lacks Triton; it is older than the recipe needs
    native       its tensor cores multiply the recipe's quantized operands
"""

from __future__ import annotations

import importlib.util
from typing import Literal, NamedTuple

import torch

from lowp.errors import require
from lowp.recipe import Recipe

Status = Literal["native", "emulated", "unavailable"]


class RecipeSupport(NamedTuple):
    """Whether a device runs a recipe.

    Attributes:
        status: "native": its tensor cores multiply the quantized operands. "emulated": the same quantized values,
            multiplied in high precision. "unavailable": it doesn't run.
        reason: why, as one sentence for people.
    """

    status: Status
    reason: str


def recipe_support(recipe: Recipe, device: torch.device | str | None = None) -> RecipeSupport:
    """Whether `device` runs `recipe`: natively, emulated, or not at all, and why.

    Args:
        recipe: a recipe of `lowp.recipe`.
        device: a device or its name; torch's default device by default.

    Returns:
        status, reason.

    Raises:
        TypeError: `recipe` is not a lowp recipe.
    """
    got = type(recipe).__name__
    require(
        isinstance(recipe, Recipe), "recipe_support", "recipe must be a lowp.recipe.Recipe", got=got, error=TypeError
    )
    first = recipe.first_capability
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type == "cpu":
        return RecipeSupport("emulated", "a CPU multiplies dequantized operands in fp32")
    missing = _missing(device)
    if missing is not None:
        return RecipeSupport("unavailable", missing)
    capability = torch.cuda.get_device_capability(device)
    has = f"capability {capability[0]}.{capability[1]}"
    needs = f"{first[0]}.{first[1]} or newer"
    if capability < first:
        return RecipeSupport("unavailable", f"{has}; its tensor cores need {needs}")
    return RecipeSupport("native", f"{has}; its tensor cores need {needs}")


def _missing(device: torch.device) -> str | None:
    """Why no recipe runs on this device that is not a CPU; None: nothing is missing."""
    if device.type != "cuda":
        return f"there are no kernels for devices of type {device.type}"
    if torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs"
    if not torch.cuda.is_available():
        return "this torch finds no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "Triton, which compiles the kernels, is not installed"
    return None
