"""What the two passes of a norm read; the fields are the schemas of its registered operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowp.kernels.sources import SourceSpec
from lowp.ops.handover import Handover


@dataclass(kw_only=True)
class NormalizationForwardArgs(Handover):
    """What the forward pass reads.

    Attributes:
        input: `[..., *normalized_shape]`.
        weight, bias: `normalized_shape`.
        axes: how many are normalized.
        kind: "layer", "rms" or "l2".
        eps: added under the root.
        spec: of the normalized values.
    """

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    axes: int
    kind: str
    eps: float
    spec: SourceSpec


@dataclass
class NormalizationBackwardArgs:
    """What the backward pass reads.

    Attributes:
        grad_output: as the output; None: only an extra output before the operation was used.
        input, weight, axes, kind: as in forward.
        mean, rstd: `[M]`, the statistics of forward.
        residual: as the input, added to its gradient.
        zero_centered: whether the weight is stored as its difference from 1.
        input_requires_grad, weight_requires_grad: whether these gradients are worked out.
        bias_dtype: of the bias's gradient; None: it isn't worked out.
    """

    grad_output: Tensor | None
    input: Tensor
    weight: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    residual: Tensor | None
    axes: int
    kind: str
    zero_centered: bool
    input_requires_grad: bool
    weight_requires_grad: bool
    bias_dtype: torch.dtype | None
