"""Basic operations, one a file."""

from lowp.ops.basic.basic_linear import BasicLinear
from lowp.ops.basic.bias import Bias
from lowp.ops.basic.collectives import AllGather, AllReduce, ReduceScatter
from lowp.ops.basic.quantize import Quantize
from lowp.ops.basic.views import Identity, Reshape

__all__ = ["AllGather", "AllReduce", "BasicLinear", "Bias", "Identity", "Quantize", "ReduceScatter", "Reshape"]
