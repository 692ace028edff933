"""The modules of a transformer: facades that own parameters with familiar names and run pipelines of operations."""

from lowp.modules.layernorm_linear import LayerNormLinear
from lowp.modules.layernorm_mlp import LayerNormMLP
from lowp.modules.linear import Linear
from lowp.modules.norms import LayerNorm, RMSNorm

__all__ = ["LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm"]
