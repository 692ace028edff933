"""L2Normalization: `y = x / sqrt(sum(x^2) + eps)`, over the last axis."""

from __future__ import annotations

from lowp.ops.basic.normalization import Normalization


class L2Normalization(Normalization):
    """Scales the last axis, of any size, to length 1; there are no parameters.

    Args:
        eps: added to the sum of squares, >= 0.

    Raises:
        ValueError: `eps` is negative; the input has no axis.
        TypeError: the input is not bf16, fp16 or fp32.
    """

    kind = "l2"

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__(None, eps, weight=False, bias=False)
