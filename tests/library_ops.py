"""The library's own registered operators, listed before any test registers operations of its own."""

from __future__ import annotations

import importlib
import pkgutil

import lowp
from lowp.registration import REGISTRY

for _module in pkgutil.walk_packages(lowp.__path__, "lowp."):
    if not _module.name.startswith("lowp.cli"):
        importlib.import_module(_module.name)

LIBRARY_OPS = tuple(REGISTRY)
