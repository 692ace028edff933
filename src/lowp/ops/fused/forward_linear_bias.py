"""Linear + Bias in forward: the bias is added in the GEMM's epilogue. Backward stays two operations."""

from __future__ import annotations

from lowp.ops.basic.basic_linear import BasicLinear
from lowp.ops.basic.bias import Bias
from lowp.ops.fused.linear_epilogue import ForwardLinearEpilogue, epilogue_condition
from lowp.ops.linear_args import LinearForwardArgs
from lowp.ops.plan import FusionRule, register_fusion


class ForwardLinearBias(ForwardLinearEpilogue):
    """`y = x @ w.T + b`, rounded once."""

    fuses = (BasicLinear, Bias)
    fwd_args_type = LinearForwardArgs
    replays = True


register_fusion(FusionRule("forward", ForwardLinearBias, epilogue_condition))
