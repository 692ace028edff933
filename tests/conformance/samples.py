"""Arguments for every registered operator of the library. An operator without samples fails the suite.

Shape legend: M = rows, K = features, N = out features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowp.dynamo.schema import ArgumentSchema
from lowp.formats import E4M3, E5M2
from lowp.kernels.activated import activated, activation_gradient
from lowp.kernels.amax import amax
from lowp.kernels.dropped import dropped
from lowp.kernels.normalized import normalized
from lowp.kernels.sources import PLAIN, Source
from lowp.ops.basic.add_extra_input import AddExtraInputArgs
from lowp.ops.basic.bias import BiasBackwardArgs, BiasForwardArgs
from lowp.ops.basic.collectives import CollectiveArgs
from lowp.ops.basic.constant_scale import ConstantScaleArgs
from lowp.ops.basic.make_extra_output import MakeExtraOutputBackwardArgs
from lowp.ops.basic.quantize import QuantizeArgs
from lowp.ops.linear_args import LinearBackwardArgs, LinearForwardArgs
from lowp.quantization import Quantized, quantize_operand
from lowp.quantizers import Float8CurrentScalingQuantizer

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FORWARD = Float8CurrentScalingQuantizer()
GRADIENT = Float8CurrentScalingQuantizer(fmt=E5M2)
POWER_2 = Float8CurrentScalingQuantizer(fmt=E4M3, power_2_scale=True, amax_epsilon=0.5)

K, N = 32, 24
ODD_K, ODD_N = 21, 5
MANY = 16 * 1024 + 21  # columns of more values than a cast finds the amax of in its own launch


class Draw:
    """Makes tensors on a device.

    Args:
        device: of the tensors.
        exact: draw multiples of 1/2 up to 1, and one 3.5, which a quantizer keeps: sums of products are exact, and of
            up to 32 of them, which are multiples of 1/4 below 64, also in bf16.
    """

    def __init__(self, device: str, exact: bool) -> None:
        self.device = device
        self.exact = exact
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        if self.exact:
            x = torch.randint(-2, 3, shape, generator=self.generator) * 0.5
            x.reshape(-1)[:1] = 3.5
        else:
            x = torch.randn(shape, generator=self.generator) * 0.37
        return x.to(self.device, dtype)

    def quantized(
        self, rows: int, columns: int, spec: Float8CurrentScalingQuantizer = FORWARD, *, row: bool, column: bool
    ) -> Quantized:
        return quantize_operand(self(rows, columns), spec, row=row, column=column)


@dataclass(frozen=True)
class Sample:
    """One way to call an operator.

    Attributes:
        make: `(draw, M) -> arguments`.
        row_major: positions of the tensors that must be row-major; the others may have any strides.
        one_step: whether a CPU and a GPU may differ by one step of bf16, or of FP8: there are transcendentals.
    """

    make: Callable[[Draw, int], tuple[Any, ...]]
    row_major: tuple[int, ...] = ()
    one_step: bool = False


def _source(x: Tensor | Source) -> tuple[list[Tensor], str]:
    """The two arguments that a source crosses as."""
    return (list(x.tensors), x.spec.bundle) if isinstance(x, Source) else ([x], PLAIN[x.dtype].bundle)


def _cast(
    x: Tensor | Source, spec: Float8CurrentScalingQuantizer, row: bool, column: bool, *more: Any, found: bool = False
) -> tuple[Any, ...]:
    """Arguments of a cast; the amax is found by it, or given: of a source one that all devices agree on."""
    largest = torch.full((1,), 1.75, device=x.device) if isinstance(x, Source) else amax(x)
    largest = None if found else largest
    return *_source(x), largest, spec.bundle, row, column, *more


def _rms(draw: Draw, m: int, dtype: torch.dtype) -> Source:
    return normalized(draw(m, ODD_K), None, draw(m, dtype=FP32).abs(), draw(ODD_K), zero_centered=True, dtype=dtype)


def _layer_norm(draw: Draw, m: int, dtype: torch.dtype) -> Source:
    x, mean, rstd = draw(m, ODD_K, dtype=FP32), draw(m, dtype=FP32), draw(m, dtype=FP32).abs()
    return normalized(x, mean, rstd, draw(ODD_K), draw(ODD_K, dtype=FP32), dtype=dtype)


def _dropped(draw: Draw, m: int) -> Source:
    return dropped(draw(m, ODD_K), torch.tensor([3, 5], device=draw.device), 0.25)


def _gradient(draw: Draw, m: int, name: str, dtype: torch.dtype = BF16) -> Source:
    """The gradient of a gated activation."""
    return activation_gradient(draw(m, ODD_K), draw(m, 2 * ODD_K, dtype=dtype), name)


def _scaled(
    draw: Draw, m: int, n: int, a: Float8CurrentScalingQuantizer = FORWARD
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *draw.quantized(m, ODD_K, a, row=True, column=False).row, *draw.quantized(
        n, ODD_K, row=True, column=False
    ).row


def _norm(
    draw: Draw,
    m: int,
    k: int,
    kind: str,
    *,
    bias: Tensor | None = None,
    x_dtype: torch.dtype = BF16,
    dtype: torch.dtype = BF16,
    output: bool = True,
    amax: bool = False,
) -> tuple[Any, ...]:
    """Layer and rms norms, with a zero-centered fp32 weight."""
    return draw(m, k, dtype=x_dtype), draw(k, dtype=FP32), bias, kind, 1e-5, True, dtype, output, amax


def _norm_grad(
    draw: Draw,
    m: int,
    k: int,
    kind: str,
    *,
    mean: Tensor | None = None,
    residual: Tensor | None = None,
    grad_input: bool = True,
    grad_weight: bool = True,
    bias_dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """Any numbers may stand for the statistics: then sums of exact inputs are exact."""
    options = (kind, True, grad_input, grad_weight, bias_dtype)
    return draw(m, k), draw(m, k), mean, draw(m, dtype=FP32), draw(k, dtype=FP32), residual, *options


def _linear_forward(**fields: Any) -> Sample:
    """BasicLinear's forward; `input(draw, M)`, `weight_dtype`, `with_bias`, and fields of the arguments."""
    make_input = fields.pop("input", lambda draw, m: draw(m, K))
    make_addend = fields.pop("addend", lambda draw, m: None)
    weight_dtype, with_bias = fields.pop("weight_dtype", BF16), fields.pop("with_bias", False)
    args = LinearForwardArgs(
        input=None,
        weight=None,
        bias=None,
        group=None,
        parallel_mode=None,
        sequence_parallel=False,
        dtype=BF16,
        input_quantizer=None,
        weight_quantizer=None,
        fast_accumulation=False,
        keep_column=False,
        keep_row=False,
    )
    args = replace(args, **fields)

    def make(draw: Draw, m: int) -> tuple[Any, ...]:
        weight = draw(N, K, dtype=weight_dtype)
        bias = draw(N, dtype=weight_dtype) if with_bias else None
        return _flat(replace(args, input=make_input(draw, m), weight=weight, bias=bias, addend=make_addend(draw, m)))

    return Sample(make, row_major=(1,))


def _linear_backward(**fields: Any) -> Sample:
    """BasicLinear's backward; `grad_output(draw, M)`, `input(draw, M)`, `main_grad`, and fields of the arguments."""
    make_grad = fields.pop("grad_output", lambda draw, m: draw(m, N))
    make_input = fields.pop("input", lambda draw, m: draw(m, K))
    make_addend = fields.pop("addend", lambda draw, m: None)
    main_dtype, delayed = fields.pop("main_dtype", None), fields.pop("delayed", False)
    leading = fields.pop("leading", lambda m: (m,))
    args = LinearBackwardArgs(
        grad_output=None,
        input=None,
        weight=None,
        weight_statistics=None,
        main_grad=None,
        ticket=None,
        leading=(),
        group=None,
        parallel_mode=None,
        sequence_parallel=False,
        dtype=BF16,
        input_dtype=BF16,
        weight_shape=(N, K),
        weight_dtype=BF16,
        weight_quantizer=None,
        grad_output_quantizer=None,
        override=None,
        input_quantizer=None,
        input_statistics=None,
        fast_dgrad=False,
        fast_wgrad=False,
        input_requires_grad=True,
        weight_requires_grad=True,
        accumulate=True,
        placeholder_grad=False,
    )
    args = replace(args, **fields)

    def make(draw: Draw, m: int) -> tuple[Any, ...]:
        weight, input_ = draw(N, K), make_input(draw, m)
        return _flat(
            replace(
                args,
                grad_output=make_grad(draw, m),
                input=input_,
                input_statistics=None if args.input_quantizer is None else amax(input_),
                ticket=ticket() if delayed else None,
                weight=weight,
                weight_statistics=None if args.weight_quantizer is None else amax(weight),
                main_grad=None if main_dtype is None else draw(N, K, dtype=main_dtype),
                leading=leading(m),
                addend=make_addend(draw, m),
            )
        )

    return Sample(make, row_major=(1, 3, 6, 8))


def ticket() -> Tensor:
    """Of no store: nothing is kept."""
    return torch.tensor([-1, 0])


def _flat(args: Any) -> tuple[Any, ...]:
    fields = getattr(type(args), "GRAD_OUTPUT_FIELDS", ())
    return tuple(ArgumentSchema(type(args), fields).flatten(args))


def _simple(args: Callable[[Draw, int], Any]) -> Sample:
    return Sample(lambda draw, m: _flat(args(draw, m)))


QUANTIZED_FORWARD: dict[str, Any] = {"input_quantizer": FORWARD, "weight_quantizer": FORWARD, "keep_column": True}
QUANTIZED_BACKWARD: dict[str, Any] = {
    "weight_quantizer": FORWARD,
    "grad_output_quantizer": GRADIENT,
    "input": lambda draw, m: draw.quantized(m, K, row=False, column=True),
}
MAIN_GRAD: dict[str, Any] = {"main_dtype": FP32}

_LINEAR_FORWARDS = {
    "high precision": _linear_forward(),
    "bf16 in, fp32 weight": _linear_forward(weight_dtype=FP32, input=lambda draw, m: draw(2, m, K)),
    "quantized": _linear_forward(**QUANTIZED_FORWARD, fast_accumulation=True),
    "original kept": _linear_forward(**{**QUANTIZED_FORWARD, "keep_column": False}, keep_statistics=True),
    "dequantized backward": _linear_forward(**{**QUANTIZED_FORWARD, "keep_column": False}, keep_row=True),
    "quantized input": _linear_forward(
        **{**QUANTIZED_FORWARD, "input_quantizer": None},
        input=lambda draw, m: draw.quantized(m, K, row=True, column=True),
    ),
}

SAMPLES: dict[str, dict[str, Sample]] = {
    "add": {
        "promoted": Sample(lambda draw, m: (draw(2, m, N), draw(2, m, N, dtype=FP32))),
        "broadcast": Sample(lambda draw, m: (draw(m, N), draw(N))),
    },
    "multiply": {
        "bf16": Sample(lambda draw, m: (draw(2, m, N), 0.3)),
        "fp32": Sample(lambda draw, m: (draw(m, N, dtype=FP32), -2.0)),
    },
    "amax": {
        "matrix": Sample(lambda draw, m: _source(draw(m, ODD_K))),
        "four axes, fp32": Sample(lambda draw, m: _source(draw(2, m, 3, 5, dtype=FP32))),
        "normalized": Sample(lambda draw, m: _source(_rms(draw, m, FP16))),
        "swiglu": Sample(lambda draw, m: _source(activated(draw(m, 2 * ODD_K), "swiglu")), one_step=True),
        "gradient of sreglu": Sample(lambda draw, m: _source(_gradient(draw, m, "sreglu"))),
    },
    "bias_grad": {
        "bf16": Sample(lambda draw, m: (*_source(draw(m, ODD_K)), BF16)),
        "fp16 to fp32": Sample(lambda draw, m: (*_source(draw(m, ODD_K, dtype=FP16)), FP32)),
        "gradient of reglu": Sample(lambda draw, m: (*_source(_gradient(draw, m, "reglu")), FP32)),
    },
    "cast": {
        "row": Sample(lambda draw, m: _cast(draw(m, ODD_K), FORWARD, True, False)),
        "column, E5M2": Sample(lambda draw, m: _cast(draw(m, ODD_K), GRADIENT, False, True)),
        "both, fp32": Sample(lambda draw, m: _cast(draw(m, ODD_K, dtype=FP32), POWER_2, True, True)),
        "normalized": Sample(lambda draw, m: _cast(_layer_norm(draw, m, BF16), FORWARD, True, True)),
        "gelu": Sample(lambda draw, m: _cast(activated(draw(m, ODD_K), "gelu"), FORWARD, True, False), one_step=True),
        "gradient of sreglu": Sample(lambda draw, m: _cast(_gradient(draw, m, "sreglu"), GRADIENT, True, True)),
        "amax found": Sample(lambda draw, m: _cast(draw(m, ODD_K), POWER_2, True, True, found=True)),
        "amax found, of many": Sample(lambda draw, m: _cast(draw(m, MANY), FORWARD, True, True, found=True)),
        "amax found, of a gradient": Sample(
            lambda draw, m: _cast(_gradient(draw, m, "sreglu"), GRADIENT, True, True, found=True)
        ),
    },
    "cast_bias_grad": {
        "amax found": Sample(lambda draw, m: _cast(draw(m, ODD_K), GRADIENT, True, True, BF16, found=True)),
        "both": Sample(lambda draw, m: _cast(draw(m, ODD_K), GRADIENT, True, True, FP32)),
        "row": Sample(lambda draw, m: _cast(draw(m, ODD_K, dtype=FP16), FORWARD, True, False, FP16)),
        "gradient of reglu": Sample(lambda draw, m: _cast(_gradient(draw, m, "reglu"), GRADIENT, True, True, BF16)),
    },
    "materialize": {
        "tensor": Sample(lambda draw, m: _source(draw(m, ODD_K))),
        "normalized": Sample(lambda draw, m: _source(_rms(draw, m, BF16))),
        "normalized, fp32": Sample(lambda draw, m: _source(_layer_norm(draw, m, FP32))),
        "dropped": Sample(lambda draw, m: _source(_dropped(draw, m))),
        "clamped_swiglu": Sample(
            lambda draw, m: _source(activated(draw(m, 2 * ODD_K), "clamped_swiglu", {"limit": 0.5})), one_step=True
        ),
        "gradient of sreglu": Sample(lambda draw, m: _source(_gradient(draw, m, "sreglu", FP32))),
    },
    "norm_forward": {
        "layer": Sample(lambda draw, m: _norm(draw, m, K, "layer", bias=draw(K), amax=True)),
        "rms, statistics and amax": Sample(lambda draw, m: _norm(draw, m, ODD_K, "rms", output=False, amax=True)),
        "l2, no parameters": Sample(lambda draw, m: (draw(m, ODD_K), None, None, "l2", 1e-6, False, BF16, True, False)),
        "rms, fp32 to fp16": Sample(lambda draw, m: _norm(draw, m, ODD_K, "rms", x_dtype=FP32, dtype=FP16)),
    },
    "norm_backward": {
        "layer": Sample(lambda draw, m: _norm_grad(draw, m, K, "layer", mean=draw(m, dtype=FP32), bias_dtype=FP32)),
        "l2, input alone": Sample(lambda draw, m: _norm_grad(draw, m, ODD_K, "l2", grad_weight=False)),
        "rms, weight alone": Sample(lambda draw, m: _norm_grad(draw, m, ODD_K, "rms", grad_input=False)),
        "rms, residual": Sample(lambda draw, m: _norm_grad(draw, m, ODD_K, "rms", residual=draw(m, ODD_K))),
    },
    "dequantize": {
        "matrix": Sample(
            lambda draw, m: (*draw.quantized(m, ODD_K, row=True, column=False).row, ODD_K, BF16), row_major=(0,)
        ),
        "three axes": Sample(
            lambda draw, m: (
                draw.quantized(2 * m, K, row=True, column=False).row[0].view(2, m, K),
                draw(dtype=FP32),
                K,
                FP32,
            ),
            row_major=(0,),
        ),
    },
    "transpose": {
        "odd": Sample(lambda draw, m: (draw.quantized(m, ODD_K, row=True, column=False).row[0], ODD_K), row_major=(0,)),
    },
    "scaled_gemm": {
        "bias": Sample(lambda draw, m: (*_scaled(draw, m, N), draw(N), None, 1.0, BF16, True), row_major=(0, 2)),
        "odd N, E5M2, fp32": Sample(
            lambda draw, m: (*_scaled(draw, m, ODD_N, GRADIENT), draw(ODD_N, dtype=FP32), None, 1.0, FP32, False),
            row_major=(0, 2),
        ),
        "fp16": Sample(lambda draw, m: (*_scaled(draw, m, N), None, None, 1.0, FP16, False), row_major=(0, 2)),
        "addend and factor": Sample(
            lambda draw, m: (*_scaled(draw, m, N), None, draw(m, N), -0.5, BF16, False), row_major=(0, 2)
        ),
        "bias, addend, odd N": Sample(
            lambda draw, m: (*_scaled(draw, m, ODD_N), draw(ODD_N), draw(m, ODD_N), 1.0, FP16, True), row_major=(0, 2)
        ),
    },
    "scaled_gemm_into": {
        "accumulate": Sample(
            lambda draw, m: (*_scaled(draw, m, N), draw(m, N, dtype=FP32), False, True), row_major=(0, 2)
        ),
        "overwrite": Sample(lambda draw, m: (*_scaled(draw, m, N), draw(m, N), True, False), row_major=(0, 2)),
    },
    "gemm": {
        "bias": Sample(lambda draw, m: (draw(m, ODD_K), draw(N, ODD_K), draw(N), None, 1.0, BF16)),
        "bf16 to fp32": Sample(lambda draw, m: (draw(m, K), draw(ODD_N, K), draw(ODD_N, dtype=FP32), None, 1.0, FP32)),
        "fp32": Sample(lambda draw, m: (draw(m, K, dtype=FP32), draw(N, K, dtype=FP32), None, None, 1.0, FP32)),
        "addend and factor": Sample(lambda draw, m: (draw(m, K), draw(N, K), None, draw(m, N), -0.5, BF16)),
        "factor": Sample(lambda draw, m: (draw(m, K), draw(N, K), None, None, 0.25, BF16)),
        "bias and addend": Sample(lambda draw, m: (draw(m, K), draw(N, K), draw(N), draw(m, N), 1.0, BF16)),
        "all to fp32": Sample(lambda draw, m: (draw(m, K), draw(N, K), draw(N), draw(m, N), 2.0, FP32)),
    },
    "gemm_into": {
        "accumulate": Sample(lambda draw, m: (draw(m, K), draw(N, K), draw(m, N, dtype=FP32), True)),
        "accumulate bf16": Sample(lambda draw, m: (draw(m, K), draw(N, K), draw(m, N), True)),
        "overwrite": Sample(lambda draw, m: (draw(m, K), draw(N, K), draw(m, N, dtype=FP32), False)),
    },
    "BasicLinear_forward": _LINEAR_FORWARDS,
    "ForwardLinearBias_forward": {
        "high precision": _linear_forward(with_bias=True),
        "quantized": _linear_forward(**QUANTIZED_FORWARD, with_bias=True),
        "three axes": _linear_forward(**QUANTIZED_FORWARD, with_bias=True, input=lambda draw, m: draw(2, m, K)),
    },
    "ForwardLinearAdd_forward": {
        "high precision": _linear_forward(addend=lambda draw, m: draw(m, N)),
        "quantized": _linear_forward(**QUANTIZED_FORWARD, addend=lambda draw, m: draw(m, N)),
    },
    "ForwardLinearBiasAdd_forward": {
        "high precision": _linear_forward(with_bias=True, addend=lambda draw, m: draw(m, N)),
        "quantized, three axes": _linear_forward(
            **QUANTIZED_FORWARD,
            with_bias=True,
            input=lambda draw, m: draw(2, m, K),
            addend=lambda draw, m: draw(2, m, N),
        ),
    },
    "ForwardLinearScaleAdd_forward": {
        "high precision": _linear_forward(factor=-0.5, addend=lambda draw, m: draw(m, N)),
        "quantized": _linear_forward(**QUANTIZED_FORWARD, factor=2.0, addend=lambda draw, m: draw(m, N)),
    },
    "BackwardLinearAdd_backward": {
        "high precision": _linear_backward(addend=lambda draw, m: draw(m, K)),
        "quantized": _linear_backward(**QUANTIZED_BACKWARD, addend=lambda draw, m: draw(m, K)),
        "extra output unused": _linear_backward(**QUANTIZED_BACKWARD),
        "extra output alone": _linear_backward(
            **QUANTIZED_BACKWARD, grad_output=lambda draw, m: None, addend=lambda draw, m: draw(m, K)
        ),
    },
    "BackwardLinearAdd_backward_inplace": {
        "high precision": _linear_backward(**MAIN_GRAD, addend=lambda draw, m: draw(m, K)),
        "quantized": _linear_backward(**QUANTIZED_BACKWARD, **MAIN_GRAD, addend=lambda draw, m: draw(m, K)),
    },
    "BackwardLinearScale_backward": {
        "high precision": _linear_backward(factor=-0.5),
        "quantized": _linear_backward(**QUANTIZED_BACKWARD, factor=2.0),
    },
    "BackwardLinearScale_backward_inplace": {
        "high precision": _linear_backward(**MAIN_GRAD, factor=-0.5),
        "quantized": _linear_backward(**QUANTIZED_BACKWARD, **MAIN_GRAD, factor=2.0),
    },
    "BasicLinear_backward": {
        "high precision": _linear_backward(),
        "quantized": _linear_backward(**QUANTIZED_BACKWARD, fast_dgrad=True),
        "quantized gradient": _linear_backward(
            **QUANTIZED_BACKWARD, grad_output=lambda draw, m: draw.quantized(m, N, GRADIENT, row=True, column=True)
        ),
        "three axes, dgrad only": _linear_backward(
            **{**QUANTIZED_BACKWARD, "input": lambda draw, m: None},
            weight_requires_grad=False,
            grad_output=lambda draw, m: draw(2, m, N),
            leading=lambda m: (2, m),
        ),
        "wgrad only": _linear_backward(input_requires_grad=False, grad_output=lambda draw, m: draw(m, N, dtype=FP32)),
        "original input": _linear_backward(
            weight_quantizer=FORWARD, grad_output_quantizer=GRADIENT, input_quantizer=FORWARD
        ),
        "original input, dequantized": _linear_backward(
            weight_quantizer=FORWARD, override="dequantized", input_quantizer=FORWARD
        ),
        "dequantized": _linear_backward(
            weight_quantizer=FORWARD,
            override="dequantized",
            input=lambda draw, m: draw.quantized(m, K, row=True, column=False),
        ),
    },
    "BasicLinear_backward_inplace": {
        "delayed": _linear_backward(**QUANTIZED_BACKWARD, delayed=True),
        "delayed, high precision": _linear_backward(delayed=True),
        "high precision": _linear_backward(**MAIN_GRAD),
        "quantized": _linear_backward(**QUANTIZED_BACKWARD, **MAIN_GRAD),
        "overwrite, no dgrad": _linear_backward(**MAIN_GRAD, accumulate=False, input_requires_grad=False),
        "dequantized": _linear_backward(
            **MAIN_GRAD,
            weight_quantizer=FORWARD,
            override="dequantized",
            input=lambda draw, m: draw.quantized(m, K, row=True, column=False),
        ),
    },
    "keep_for_wgrad": {
        "high precision": Sample(lambda draw, m: (draw(m, N), None, draw(m, K), None, ticket(), False, True)),
        "quantized": Sample(
            lambda draw, m: (
                *draw.quantized(m, N, GRADIENT, row=False, column=True).column,
                *draw.quantized(m, K, row=False, column=True).column,
                ticket(),
                True,
                False,
            )
        ),
    },
    "Bias_forward": {
        "matrix": _simple(lambda draw, m: BiasForwardArgs(draw(m, N), draw(N))),
        "promoted": _simple(lambda draw, m: BiasForwardArgs(draw(2, m, N), draw(N, dtype=FP32))),
    },
    "Bias_backward": {
        "high precision": _simple(lambda draw, m: BiasBackwardArgs(draw(2, m, N), FP32, True, None, False, False)),
        "quantized": _simple(lambda draw, m: BiasBackwardArgs(draw(m, ODD_N), BF16, True, GRADIENT, True, True)),
        "frozen": _simple(lambda draw, m: BiasBackwardArgs(draw(m, N), BF16, False, None, False, False)),
    },
    "AddExtraInput_forward": {
        "matrix": _simple(lambda draw, m: AddExtraInputArgs(draw(m, N), draw(m, N))),
        "promoted": _simple(lambda draw, m: AddExtraInputArgs(draw(2, m, N), draw(2, m, N, dtype=FP32))),
    },
    "MakeExtraOutput_backward": {
        "both": _simple(lambda draw, m: MakeExtraOutputBackwardArgs(draw(2, m, N), draw(2, m, N))),
        "output": _simple(lambda draw, m: MakeExtraOutputBackwardArgs(draw(m, N), None)),
        "extra": _simple(lambda draw, m: MakeExtraOutputBackwardArgs(None, draw(m, N))),
    },
    "ConstantScale_forward": {"matrix": _simple(lambda draw, m: ConstantScaleArgs(draw(m, N), 0.3))},
    "ConstantScale_backward": {"three axes": _simple(lambda draw, m: ConstantScaleArgs(draw(2, m, N), -2.0))},
    "Quantize_forward": {
        "rounded": _simple(lambda draw, m: QuantizeArgs(draw(2, m, ODD_K), FORWARD, False, False)),
        "handed on": _simple(lambda draw, m: QuantizeArgs(draw(2, m, ODD_K), FORWARD, True, True)),
        "passed through": _simple(lambda draw, m: QuantizeArgs(draw(m, ODD_K), None, False, False)),
    },
    "Quantize_backward": {
        "rounded": _simple(lambda draw, m: QuantizeArgs(draw(m, ODD_K), GRADIENT, False, False)),
        "column": _simple(lambda draw, m: QuantizeArgs(draw(m, ODD_K), GRADIENT, False, True)),
        "passed through": _simple(lambda draw, m: QuantizeArgs(draw(m, ODD_K), None, False, False)),
    },
}

# On one rank; tests/distributed runs them on two.
_COLLECTIVE = {"matrix": _simple(lambda draw, m: CollectiveArgs(draw(m, N), None))}
for _name in ("AllGather", "ReduceScatter", "AllReduce"):
    for _direction in ("forward", "backward"):
        SAMPLES[f"{_name}_{_direction}"] = SAMPLES[f"{_name}_{_direction}_collective"] = _COLLECTIVE
for _name in list(SAMPLES):
    if "Linear" in _name and not _name.endswith("_inplace"):
        SAMPLES[f"{_name}_collective"] = SAMPLES[_name]

SUMS = ("gemm", "Linear", "bias_grad", "Bias_backward", "norm", "Norm", "BiasActivation")
"""Parts of the names of operators whose last bits depend on the order of a sum: compared on exact values."""
