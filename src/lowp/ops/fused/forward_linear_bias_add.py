"""Linear + Bias + AddExtraInput in forward: both are added in the GEMM's epilogue."""

from __future__ import annotations

from lowp.ops.basic.add_extra_input import AddExtraInput
from lowp.ops.basic.basic_linear import BasicLinear
from lowp.ops.basic.bias import Bias
from lowp.ops.fused.linear_epilogue import ForwardLinearEpilogue, epilogue_condition
from lowp.ops.linear_args import LinearForwardArgs
from lowp.ops.plan import FusionRule, register_fusion


class ForwardLinearBiasAdd(ForwardLinearEpilogue):
    """`y = x @ w.T + b + extra`."""

    fuses = (BasicLinear, Bias, AddExtraInput)
    fwd_args_type = LinearForwardArgs
    replays = True


register_fusion(FusionRule("forward", ForwardLinearBiasAdd, epilogue_condition))
