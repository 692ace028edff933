"""The library's own registered operators and operations, listed before any test makes some of its own."""

from __future__ import annotations

import importlib
import pkgutil

import lowp
from lowp.ops import FusibleOperation
from lowp.registration import REGISTRY

for _module in pkgutil.walk_packages(lowp.__path__, "lowp."):
    if not _module.name.startswith("lowp.cli"):
        importlib.import_module(_module.name)

LIBRARY_OPS = tuple(REGISTRY)


def _subclasses(cls: type[FusibleOperation]) -> set[type[FusibleOperation]]:
    return {cls}.union(*[_subclasses(subclass) for subclass in cls.__subclasses__()])


OPERATIONS = tuple(sorted(_subclasses(FusibleOperation), key=str))
