"""Fusible operations, and the pipelines made of them."""

from lowp.ops import fused as _rules  # registers the fusion rules
from lowp.ops.basic import BasicLinear, Bias, Identity, Quantize, Reshape
from lowp.ops.basic_op import BasicOperation
from lowp.ops.boundary import compile_boundary
from lowp.ops.op import FusibleOperation, OperationContext
from lowp.ops.plan import FusedOperation, FusionRule, Window, register_fusion
from lowp.ops.sequential import Sequential

del _rules

__all__ = [
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "FusedOperation",
    "FusibleOperation",
    "FusionRule",
    "Identity",
    "OperationContext",
    "Quantize",
    "Reshape",
    "Sequential",
    "Window",
    "compile_boundary",
    "register_fusion",
]
