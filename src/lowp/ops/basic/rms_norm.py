"""RMSNorm: `y = x / sqrt(mean(x^2) + eps) * w`, over the trailing axes."""

from __future__ import annotations

import torch

from lowp.ops.basic.normalization import Normalization


class RMSNorm(Normalization):
    """Root mean square normalization; parameters are those of torch.nn.RMSNorm.

    Args:
        normalized_shape: the trailing axes, or the size of the last one.
        eps: added to the mean square, >= 0.
        elementwise_affine: whether there is a weight.
        device: of the weight.
        dtype: of the weight.
        zero_centered_gamma: as for `LayerNorm`.
        sequence_parallel: as for `LayerNorm`.

    Attributes:
        weight: `normalized_shape`, or None.

    Raises:
        ValueError: a size or `eps` is negative; the input's last axes are others.
        TypeError: the input is not bf16, fp16 or fp32.

    Statistics and values are worked out in fp32; the output has torch.autocast's dtype if it is on, else the input's.
    """

    kind = "rms"

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            weight=elementwise_affine,
            bias=False,
            device=device,
            dtype=dtype,
            zero_centered_gamma=zero_centered_gamma,
            sequence_parallel=sequence_parallel,
        )
