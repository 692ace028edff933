"""Fusible operations, and the pipelines made of them."""

from lowp.ops import fused as _rules  # registers the fusion rules
from lowp.ops.basic import (
    ACTIVATION_CLASSES,
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    Activation,
    AddExtraInput,
    AllGather,
    AllReduce,
    BasicLinear,
    Bias,
    ClampedSwiGLU,
    ConstantScale,
    Dropout,
    Identity,
    L2Normalization,
    LayerNorm,
    MakeExtraOutput,
    Quantize,
    ReduceScatter,
    ReGLU,
    ReLU,
    Reshape,
    RMSNorm,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from lowp.ops.basic_op import BasicOperation
from lowp.ops.boundary import compile_boundary
from lowp.ops.linear import Linear
from lowp.ops.op import FusibleOperation, OperationContext
from lowp.ops.plan import FusedOperation, FusionRule, Window, register_fusion
from lowp.ops.sequential import Sequential

del _rules

__all__ = [
    "ACTIVATION_CLASSES", "GEGLU", "GELU", "GLU", "QGEGLU", "QGELU", "Activation", "AddExtraInput", "AllGather",
    "AllReduce", "BasicLinear", "BasicOperation", "Bias", "ClampedSwiGLU", "ConstantScale", "Dropout",
    "FusedOperation", "FusibleOperation", "FusionRule", "Identity", "L2Normalization", "LayerNorm", "Linear",
    "MakeExtraOutput", "OperationContext", "Quantize", "RMSNorm", "ReGLU", "ReLU", "ReduceScatter", "Reshape",
    "SReGLU", "SReLU", "Sequential", "SiLU", "SwiGLU", "Window", "compile_boundary", "register_fusion",
]  # fmt: skip
