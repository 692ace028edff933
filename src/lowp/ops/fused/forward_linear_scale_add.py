"""Linear + ConstantScale + AddExtraInput in forward: both are part of the GEMM's epilogue."""

from __future__ import annotations

from lowp.ops.basic.add_extra_input import AddExtraInput
from lowp.ops.basic.basic_linear import BasicLinear
from lowp.ops.basic.constant_scale import ConstantScale
from lowp.ops.fused.linear_epilogue import ForwardLinearEpilogue, epilogue_condition
from lowp.ops.linear_args import LinearForwardArgs
from lowp.ops.plan import FusionRule, register_fusion


class ForwardLinearScaleAdd(ForwardLinearEpilogue):
    """`y = scale * x @ w.T + extra`."""

    fuses = (BasicLinear, ConstantScale, AddExtraInput)
    fwd_args_type = LinearForwardArgs
    replays = True


register_fusion(FusionRule("forward", ForwardLinearScaleAdd, epilogue_condition))
