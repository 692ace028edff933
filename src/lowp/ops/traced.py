"""What traced code alone uses. Nothing else imports this module: it imports Dynamo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowp.torch_compat import backward_is_running

if TYPE_CHECKING:
    from lowp.ops.fuser import OperationFuser


@torch.compiler.disable
def apply_eagerly(fuser: OperationFuser, *args: Any) -> Any:
    """`fuser.apply(*args)`."""
    return fuser.apply(*args)


@torch.compiler.assume_constant_result
def traced_in_backward() -> bool:
    """`backward_is_running()`, as it is while the code is traced."""
    return backward_is_running()
