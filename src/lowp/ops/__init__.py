"""Fusible operations, and the pipelines made of them."""

from lowp.ops import fused as _rules  # registers the fusion rules
from lowp.ops.basic import (
    AddExtraInput,
    AllGather,
    AllReduce,
    BasicLinear,
    Bias,
    ConstantScale,
    Identity,
    MakeExtraOutput,
    Quantize,
    ReduceScatter,
    Reshape,
)
from lowp.ops.basic_op import BasicOperation
from lowp.ops.boundary import compile_boundary
from lowp.ops.linear import Linear
from lowp.ops.op import FusibleOperation, OperationContext
from lowp.ops.plan import FusedOperation, FusionRule, Window, register_fusion
from lowp.ops.sequential import Sequential

del _rules

__all__ = [
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ConstantScale",
    "FusedOperation",
    "FusibleOperation",
    "FusionRule",
    "Identity",
    "Linear",
    "MakeExtraOutput",
    "OperationContext",
    "Quantize",
    "ReduceScatter",
    "Reshape",
    "Sequential",
    "Window",
    "compile_boundary",
    "register_fusion",
]
