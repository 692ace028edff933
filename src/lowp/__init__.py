"""Fused transformer building blocks for PyTorch in low precision."""

from lowp import distributed, ops, recipe
from lowp.ambient import autocast, current_recipe
from lowp.errors import Unsupported
from lowp.modules import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from lowp.ops import compile_boundary
from lowp.ops.quantized_output import QuantizedOutput
from lowp.quantization import Quantized, quantize
from lowp.support import recipe_support

__version__ = "0.1.0"

__all__ = [
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "Quantized",
    "QuantizedOutput",
    "RMSNorm",
    "Unsupported",
    "autocast",
    "compile_boundary",
    "current_recipe",
    "distributed",
    "ops",
    "quantize",
    "recipe",
    "recipe_support",
]
