"""LayerNorm and RMSNorm: torch.nn's, for any feature size, planned together with operations around them."""

from __future__ import annotations

import torch
from torch import nn

from lowp import ops
from lowp.modules.options import factory_of
from lowp.ops.group import OperationGroup


class LayerNorm(OperationGroup, nn.LayerNorm):
    """Layer normalization: an nn.LayerNorm, whose state_dict it shares.

    Args:
        normalized_shape: the trailing axes, or the size of the last one.
        eps: added to the variance, >= 0.
        elementwise_affine: whether there is a weight, and a bias if `bias`.
        bias: whether there is a bias.
        device: of the parameters.
        dtype: of the parameters.
        params_dtype: another name of `dtype`.
        zero_centered_gamma: the weight is stored as its difference from 1.
        sequence_parallel: tokens are split over ranks: the parameters carry `sequence_parallel = True`, and
            `lowp.distributed.reduce_sequence_parallel_grads` completes their gradients.

    Attributes:
        weight: `normalized_shape`, or None.
        bias: `normalized_shape`, or None.

    Raises:
        ValueError: as for `lowp.ops.LayerNorm`, or two dtypes that differ.
        TypeError: the input is not bf16, fp16 or fp32.
    """

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        factory = factory_of("LayerNorm", device, dtype, params_dtype)
        norm = ops.LayerNorm(
            normalized_shape,
            eps,
            elementwise_affine,
            bias,
            factory.device,
            factory.dtype,
            zero_centered_gamma=zero_centered_gamma,
            sequence_parallel=sequence_parallel,
        )
        super().__init__([norm])
        self.normalized_shape = norm.normalized_shape or ()
        self.eps, self.elementwise_affine = eps, elementwise_affine
        norm.bind(self, weight="weight", bias="bias")


class RMSNorm(OperationGroup, nn.RMSNorm):
    """Root mean square normalization: an nn.RMSNorm, whose state_dict it shares.

    Args:
        normalized_shape: the trailing axes, or the size of the last one.
        eps: added to the mean square, >= 0.
        elementwise_affine: whether there is a weight.
        device: of the weight.
        dtype: of the weight.
        params_dtype: another name of `dtype`.
        zero_centered_gamma: as for `LayerNorm`.
        sequence_parallel: as for `LayerNorm`.

    Attributes:
        weight: `normalized_shape`, or None.

    Raises:
        ValueError: as for `lowp.ops.RMSNorm`, or two dtypes that differ.
        TypeError: the input is not bf16, fp16 or fp32.
    """

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        factory = factory_of("RMSNorm", device, dtype, params_dtype)
        norm = ops.RMSNorm(
            normalized_shape,
            eps,
            elementwise_affine,
            factory.device,
            factory.dtype,
            zero_centered_gamma=zero_centered_gamma,
            sequence_parallel=sequence_parallel,
        )
        super().__init__([norm])
        self.normalized_shape = norm.normalized_shape or ()
        self.eps, self.elementwise_affine = eps, elementwise_affine
        norm.bind(self, weight="weight")
