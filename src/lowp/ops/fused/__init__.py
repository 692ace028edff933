"""Fused operations, one a file; importing one registers its rule."""

from lowp.ops.fused.forward_linear_bias import ForwardLinearBias

__all__ = ["ForwardLinearBias"]
