"""LayerNorm: `y = (x - mean) / sqrt(var + eps) * w + b`, over the trailing axes."""

from __future__ import annotations

import torch

from lowp.ops.basic.normalization import Normalization


class LayerNorm(Normalization):
    """Layer normalization; parameters and defaults are those of torch.nn.LayerNorm.

    Args:
        normalized_shape: the trailing axes, or the size of the last one.
        eps: added to the variance, >= 0.
        elementwise_affine: whether there is a weight, and a bias if `bias`.
        bias: whether there is a bias.
        device: of the parameters.
        dtype: of the parameters.
        zero_centered_gamma: the weight is stored as its difference from 1.
        sequence_parallel: the tokens are split over ranks, so that each has a part of the parameters' gradients: they
            carry `sequence_parallel = True`, and `lowp.distributed.reduce_sequence_parallel_grads` completes them.

    Attributes:
        weight: `normalized_shape`, or None.
        bias: `normalized_shape`, or None.

    Raises:
        ValueError: a size or `eps` is negative; the input's last axes are others.
        TypeError: the input is not bf16, fp16 or fp32.

    Statistics and values are worked out in fp32; the output has torch.autocast's dtype if it is on, else the input's.
    """

    kind = "layer"

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
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
            bias=elementwise_affine and bias,
            device=device,
            dtype=dtype,
            zero_centered_gamma=zero_centered_gamma,
            sequence_parallel=sequence_parallel,
        )
