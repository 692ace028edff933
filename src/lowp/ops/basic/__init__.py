"""Basic operations, one a file."""

from lowp.ops.basic.basic_linear import BasicLinear
from lowp.ops.basic.bias import Bias
from lowp.ops.basic.quantize import Quantize
from lowp.ops.basic.views import Identity, Reshape

__all__ = ["BasicLinear", "Bias", "Identity", "Quantize", "Reshape"]
