"""Fused operations, one a file; importing one registers its rule."""

from lowp.ops.fused.backward_bias_activation import BackwardBiasActivation
from lowp.ops.fused.backward_linear_add import BackwardLinearAdd
from lowp.ops.fused.backward_linear_scale import BackwardLinearScale
from lowp.ops.fused.backward_norm_add import BackwardNormAdd
from lowp.ops.fused.forward_linear_add import ForwardLinearAdd
from lowp.ops.fused.forward_linear_bias import ForwardLinearBias
from lowp.ops.fused.forward_linear_bias_add import ForwardLinearBiasAdd
from lowp.ops.fused.forward_linear_scale_add import ForwardLinearScaleAdd

__all__ = [
    "BackwardBiasActivation",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "BackwardNormAdd",
    "ForwardLinearAdd",
    "ForwardLinearBias",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
]
