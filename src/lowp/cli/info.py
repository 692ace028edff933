"""`lowp info`: versions, devices, and what each recipe does on them."""

from __future__ import annotations

import torch
from rich.table import Table

from lowp.cli.machine import describe, make_console
from lowp.cli.recipes import RECIPES
from lowp.support import recipe_support

_STYLES = {"native": "green", "emulated": "yellow", "unavailable": "red"}


def devices() -> list[torch.device]:
    """The devices of this machine that the library has kernels for."""
    return [*(torch.device("cuda", index) for index in range(torch.cuda.device_count())), torch.device("cpu")]


def _versions() -> Table:
    table = Table("version", "", title="Versions", title_justify="left")
    facts = describe(torch.device("cpu"))
    for name in ("lowp", "torch", "triton", "python"):
        table.add_row(name, facts[name] or "not installed")
    table.add_row("cuda", torch.version.cuda or "this torch is built without it")
    return table


def _devices() -> Table:
    table = Table("device", "name", "capability", title="Devices", title_justify="left")
    for device in devices():
        facts = describe(device)
        table.add_row(str(device), facts["device"], facts["capability"] or f"{facts['cores']} cores")
    return table


def _recipes() -> Table:
    table = Table("recipe", "device", "runs", "why", title="Recipes", title_justify="left")
    for name, recipe in RECIPES.items():
        for device in devices():
            status, reason = recipe_support(recipe, device)
            table.add_row(f"{name}: {recipe}", str(device), f"[{_STYLES[status]}]{status}[/]", reason)
    return table


def info() -> None:
    """Print versions, devices, and whether each recipe runs natively, emulated or not at all, and why."""
    console = make_console()
    for table in (_versions(), _devices(), _recipes()):
        console.print(table)
