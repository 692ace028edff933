"""Basic operations, one a file."""

from lowp.ops.basic.activation import (
    ACTIVATION_CLASSES,
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    Activation,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from lowp.ops.basic.add_extra_input import AddExtraInput
from lowp.ops.basic.basic_linear import BasicLinear
from lowp.ops.basic.bias import Bias
from lowp.ops.basic.collectives import AllGather, AllReduce, ReduceScatter
from lowp.ops.basic.constant_scale import ConstantScale
from lowp.ops.basic.dropout import Dropout
from lowp.ops.basic.l2_normalization import L2Normalization
from lowp.ops.basic.layer_norm import LayerNorm
from lowp.ops.basic.make_extra_output import MakeExtraOutput
from lowp.ops.basic.quantize import Quantize
from lowp.ops.basic.rms_norm import RMSNorm
from lowp.ops.basic.views import Identity, Reshape

__all__ = [
    "ACTIVATION_CLASSES", "GEGLU", "GELU", "GLU", "QGEGLU", "QGELU", "Activation", "AddExtraInput", "AllGather",
    "AllReduce", "BasicLinear", "Bias", "ClampedSwiGLU", "ConstantScale", "Dropout", "Identity", "L2Normalization",
    "LayerNorm", "MakeExtraOutput", "Quantize", "RMSNorm", "ReGLU", "ReLU", "ReduceScatter", "Reshape", "SReGLU",
    "SReLU", "SiLU", "SwiGLU",
]  # fmt: skip
