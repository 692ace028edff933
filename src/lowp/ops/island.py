"""Runs what can't be compiled, outside of the graph. Only traced code imports this module: it imports Dynamo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lowp.ops.fuser import OperationFuser


@torch.compiler.disable
def apply_eagerly(fuser: OperationFuser, *args: Any) -> Any:
    """`fuser.apply(*args)`."""
    return fuser.apply(*args)
