"""Basic operations, one a file."""

from lowp.ops.basic.add_extra_input import AddExtraInput
from lowp.ops.basic.basic_linear import BasicLinear
from lowp.ops.basic.bias import Bias
from lowp.ops.basic.collectives import AllGather, AllReduce, ReduceScatter
from lowp.ops.basic.constant_scale import ConstantScale
from lowp.ops.basic.make_extra_output import MakeExtraOutput
from lowp.ops.basic.quantize import Quantize
from lowp.ops.basic.views import Identity, Reshape

__all__ = [
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ConstantScale",
    "Identity",
    "MakeExtraOutput",
    "Quantize",
    "ReduceScatter",
    "Reshape",
]
