"""Arguments for the registered operators of norms, activations and dropout, and of their fusions.

Shape legend: M = rows, N = features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowp.kernels.activated import Activated, ActivationGradient
from lowp.kernels.dropped import Dropped
from lowp.kernels.normalized import Normalized
from lowp.ops.basic.activation import ActivationBackwardArgs, ActivationForwardArgs
from lowp.ops.basic.dropout import DropoutArgs
from lowp.ops.fused.backward_bias_activation import BiasActivationBackwardArgs
from lowp.ops.normalization_args import NormalizationBackwardArgs, NormalizationForwardArgs
from tests.conformance.samples import BF16, FORWARD, FP16, FP32, GRADIENT, Draw, N, Sample
from tests.conformance.samples import _simple as simple

QUANTIZED_INPUT: dict[str, Any] = {"quantizer": FORWARD, "row": True, "column": True}
QUANTIZED_GRADIENT: dict[str, Any] = {"quantizer": GRADIENT, "row": True, "column": True}


def _norm(
    kind: str, *leading: int, bias: bool = False, zero_centered: bool = False, dtype: torch.dtype = BF16, **fields: Any
) -> Sample:
    weight = kind != "l2"
    spec = Normalized(dtype=dtype, mean=kind == "layer", weight=weight, bias=bias, zero_centered=zero_centered)
    return simple(
        lambda draw, m: NormalizationForwardArgs(
            input=draw(*leading, m, N),
            weight=draw(N) if weight else None,
            bias=draw(N, dtype=FP32) if bias else None,
            axes=1,
            kind=kind,
            eps=0.5,
            spec=spec,
            **fields,
        )
    )


def _norm_backward(kind: str, *leading: int, residual: bool = False, used: bool = True, **fields: Any) -> Sample:
    def make(draw: Draw, m: int) -> NormalizationBackwardArgs:
        shape = (*leading, m, N)
        rows = torch.Size(shape[:-1]).numel()
        return NormalizationBackwardArgs(
            grad_output=draw(*shape) if used else None,
            input=draw(*shape),
            weight=draw(N),
            mean=draw(rows, dtype=FP32) if kind == "layer" else None,
            rstd=torch.full((rows,), 0.5, device=draw.device),
            residual=draw(*shape) if residual else None,
            axes=1,
            kind=kind,
            zero_centered=False,
            input_requires_grad=True,
            weight_requires_grad=True,
            bias_dtype=FP32 if kind == "layer" else None,
        )

    return simple(make)


def _activation(activation: str, factor: int, dtype: torch.dtype = BF16, **fields: Any) -> Sample:
    spec = Activated(dtype=dtype, activation=activation)
    return _in_one_step(
        lambda draw, m: ActivationForwardArgs(input=draw(2, m, factor * N, dtype=dtype), spec=spec, **fields)
    )


def _activation_backward(activation: str, factor: int, kind: Any = ActivationBackwardArgs, **fields: Any) -> Sample:
    spec = ActivationGradient(dtype=BF16, activation=activation)
    return _in_one_step(lambda draw, m: kind(grad_output=draw(m, N), input=draw(m, factor * N), spec=spec, **fields))


def _in_one_step(args: Callable[[Draw, int], Any]) -> Sample:
    return replace(simple(args), one_step=True)


def _dropout(**fields: Any) -> Sample:
    spec = Dropped(dtype=BF16, p=0.25)
    return simple(lambda draw, m: DropoutArgs(value=draw(2, m, N), seed=_seed(draw), spec=spec, **fields))


def _seed(draw: Draw) -> Tensor:
    return torch.tensor([3, 5], device=draw.device)


LAYERS: dict[str, dict[str, Sample]] = {
    "draw_seed": {"any": Sample(lambda draw, m: (draw(m, N),))},
    "Normalization_forward": {
        "layer": _norm("layer", 2, bias=True),
        "rms, quantized": _norm("rms", zero_centered=True, **QUANTIZED_INPUT),
        "layer, quantized": _norm("layer", 2, bias=True, **QUANTIZED_INPUT),
        "l2 to fp16": _norm("l2", dtype=FP16),
    },
    "Normalization_backward": {
        "layer": _norm_backward("layer", 2),
        "rms": _norm_backward("rms"),
    },
    "BackwardNormAdd_backward": {
        "both": _norm_backward("rms", 2, residual=True),
        "extra output unused": _norm_backward("layer"),
        "extra output alone": _norm_backward("rms", residual=True, used=False),
    },
    "Activation_forward": {
        "gelu": _activation("gelu", 1),
        "swiglu": _activation("swiglu", 2),
        "reglu, quantized": _activation("reglu", 2, **QUANTIZED_INPUT),
        "sreglu, fp32": _activation("sreglu", 2, FP32),
    },
    "Activation_backward": {
        "silu": _activation_backward("silu", 1),
        "geglu": _activation_backward("geglu", 2),
        "reglu, quantized": _activation_backward("reglu", 2, **QUANTIZED_GRADIENT),
    },
    "BackwardBiasActivation_backward": {
        label: _activation_backward(
            activation, factor, BiasActivationBackwardArgs, bias_dtype=dtype, input_requires_grad=wanted, **fields
        )
        for label, activation, factor, dtype, wanted, fields in (
            ("relu, quantized", "relu", 1, FP32, True, QUANTIZED_GRADIENT),
            ("reglu", "reglu", 2, BF16, True, {}),
            ("bias alone", "relu", 1, BF16, False, {}),
            ("frozen bias", "relu", 1, None, True, QUANTIZED_GRADIENT),
        )
    },
    "Dropout_forward": {"values": _dropout(), "quantized": _dropout(**QUANTIZED_INPUT)},
    "Dropout_backward": {"quantized": _dropout(**QUANTIZED_GRADIENT), "values": _dropout()},
}
