"""Matrix products of quantized and of high-precision operands, to a new tensor or into an existing one.

    scaled_gemm       y_MN = factor * (a_MC * scale_a) @ (b_NC * scale_b).T + bias_N + addend_MN
    scaled_gemm_into  out_MN (+)= (a_MC * scale_a) @ (b_NC * scale_b).T
    gemm              y_MN = factor * a_MC @ b_NC.T + bias_N + addend_MN
    gemm_into         out_MN (+)= a_MC @ b_NC.T

Shape legend: M, N = axes of the result, C = contraction axis, the last one of both operands. Sums are in fp32 and are
rounded once, bias and previous value included. On CUDA an addend is part of that sum only in a high-precision GEMM
without bias: elsewhere it is added to the rounded product in place, the bits of an add of its own.
Quantized operands are row-major and their C is padded with zeros to `CONTRACTION_ALIGNMENT`: Hopper's FP8 tensor cores
take nothing else. High-precision operands may have any strides.
Source: torch._scaled_mm, torch.addmm (cuBLASLt).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.errors import fail
from lowp.formats import FP8, HIGH_PRECISION
from lowp.kernels.cast_kernel import CONTRACTION_ALIGNMENT, pad_contraction
from lowp.registration import register

_INT32_MAX = 2**31 - 1


def scaled_gemm(
    a_MC: Tensor,
    scale_a: Tensor,
    b_NC: Tensor,
    scale_b: Tensor,
    bias_N: Tensor | None = None,
    *,
    addend_MN: Tensor | None = None,
    factor: float = 1.0,
    dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """Multiply two FP8 operands.

    Args:
        a_MC: `[M, C]` fp8, row-major, C a multiple of 16.
        scale_a: fp32, one element; multiplies to dequantize `a_MC`.
        b_NC: `[N, C]` fp8, row-major.
        scale_b: fp32, one element; multiplies to dequantize `b_NC`.
        bias_N: `[N]`, added before the result is rounded (in `dtype`, if its own is wider); None: no bias.
        addend_MN: `[M, N]` of a dtype that `dtype` holds, any strides; None: nothing is added.
        factor: of the product, not of what is added.
        dtype: fp32 | bf16 | fp16, of the result.
        fast_accumulation: keep partial sums in the tensor core (about 14 bits) instead of adding them in fp32.

    Returns:
        y_MN: `[M, N]` `dtype`, row-major.

    Raises:
        ValueError: an operand's shape, layout, alignment or dtype is not what the tensor cores take; `bias_N` or
            `addend_MN` has another shape.
    """
    _check_scaled("scaled_gemm", a_MC, b_NC, dtype)
    _check_summands("scaled_gemm", a_MC, b_NC, bias_N, addend_MN)
    return _scaled_gemm(a_MC, scale_a, b_NC, scale_b, bias_N, addend_MN, factor, dtype, fast_accumulation)


def scaled_gemm_into(
    a_MC: Tensor,
    scale_a: Tensor,
    b_NC: Tensor,
    scale_b: Tensor,
    out_MN: Tensor,
    *,
    fast_accumulation: bool,
    accumulate: bool,
) -> None:
    """Multiply two FP8 operands into `out_MN`, as `scaled_gemm` does.

    Args:
        a_MC: `[M, C]` fp8, row-major, C a multiple of 16.
        scale_a: fp32, one element.
        b_NC: `[N, C]` fp8, row-major.
        scale_b: fp32, one element.
        out_MN: `[M, N]` fp32 | bf16 | fp16; changed in place.
        fast_accumulation: keep partial sums in the tensor core.
        accumulate: add to `out_MN` instead of overwriting it.

    Raises:
        ValueError: as `scaled_gemm`; or `out_MN` has another shape.
    """
    _check_scaled("scaled_gemm_into", a_MC, b_NC, out_MN.dtype)
    _check_whole("scaled_gemm_into", a_MC, b_NC, "out_MN", out_MN)
    _scaled_gemm_into(a_MC, scale_a, b_NC, scale_b, out_MN, fast_accumulation, accumulate)


def gemm(
    a_MC: Tensor,
    b_NC: Tensor,
    bias_N: Tensor | None = None,
    *,
    addend_MN: Tensor | None = None,
    factor: float = 1.0,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply two high-precision operands.

    Args:
        a_MC: `[M, C]`, any strides.
        b_NC: `[N, C]`, the dtype of `a_MC`, any strides.
        bias_N: `[N]`, added before the result is rounded (in `dtype`, if its own is wider); None: no bias.
        addend_MN: as for `scaled_gemm`.
        factor: as for `scaled_gemm`.
        dtype: dtype of the result.

    Returns:
        y_MN: `[M, N]` `dtype`, row-major.

    Raises:
        ValueError: the operands, the bias or the addend don't fit each other.
    """
    _check_shapes("gemm", a_MC, b_NC)
    _check_summands("gemm", a_MC, b_NC, bias_N, addend_MN)
    return _gemm(a_MC, b_NC, bias_N, addend_MN, factor, dtype)


def gemm_into(a_MC: Tensor, b_NC: Tensor, out_MN: Tensor, *, accumulate: bool) -> None:
    """Multiply two high-precision operands into `out_MN`, as `gemm` does.

    Args:
        a_MC: `[M, C]`, any strides.
        b_NC: `[N, C]`, the dtype of `a_MC`, any strides.
        out_MN: `[M, N]`, any dtype; changed in place.
        accumulate: add to `out_MN` instead of overwriting it.

    Raises:
        ValueError: the operands don't fit each other or `out_MN`.
    """
    _check_shapes("gemm_into", a_MC, b_NC)
    _check_whole("gemm_into", a_MC, b_NC, "out_MN", out_MN)
    _gemm_into(a_MC, b_NC, out_MN, accumulate)


def _check_shapes(op: str, a_MC: Tensor, b_NC: Tensor) -> None:
    if not (a_MC.ndim == 2 and b_NC.ndim == 2 and a_MC.shape[1] == b_NC.shape[1]):
        fail(op, "operands must be [M, C] and [N, C]", got=(tuple(a_MC.shape), tuple(b_NC.shape)))


def _check_scaled(op: str, a_MC: Tensor, b_NC: Tensor, dtype: torch.dtype) -> None:
    _check_shapes(op, a_MC, b_NC)
    for x in (a_MC, b_NC):
        if x.dtype not in FP8:
            fail(op, "operands must be fp8", got=x.dtype)
        if not x.is_contiguous():
            fail(op, "operands must be row-major", got=f"strides {x.stride()}", hint="Pass the transposed copy.")
    if a_MC.shape[1] % CONTRACTION_ALIGNMENT:
        rule = f"the contraction axis must be padded to a multiple of {CONTRACTION_ALIGNMENT}"
        fail(op, rule, got=a_MC.shape[1], hint="lowp.kernels.cast pads it.")
    if dtype not in HIGH_PRECISION:
        fail(op, "the result must be fp32, bf16 or fp16", got=dtype)


def _check_summands(op: str, a_MC: Tensor, b_NC: Tensor, bias_N: Tensor | None, addend_MN: Tensor | None) -> None:
    if bias_N is not None and bias_N.shape != (b_NC.shape[0],):
        fail(op, "bias_N must have one element for each row of b_NC", got=tuple(bias_N.shape))
    if addend_MN is not None:
        _check_whole(op, a_MC, b_NC, "addend_MN", addend_MN)


def _check_whole(op: str, a_MC: Tensor, b_NC: Tensor, name: str, x_MN: Tensor) -> None:
    if x_MN.shape != (a_MC.shape[0], b_NC.shape[0]):
        fail(op, f"{name} must be [{a_MC.shape[0]}, {b_NC.shape[0]}]", got=tuple(x_MN.shape))


def _product_ref(a_MC: Tensor, b_NC: Tensor) -> Tensor:
    """The product in fp32. torch._scaled_mm on a CPU is 1000 times slower, and returns garbage for C = 0."""
    wide = torch.promote_types(a_MC.dtype, torch.float32) if a_MC.dtype not in FP8 else torch.float32
    return a_MC.to(wide) @ b_NC.to(wide).t()


def _sum_ref(y_MN, bias_N, addend_MN, dtype):
    """Add in the dtype of `y_MN`, then round."""
    for summand in (bias_N, addend_MN):
        y_MN = y_MN if summand is None else y_MN + summand
    return y_MN.to(dtype)


def _scaled_gemm_ref(a_MC, scale_a, b_NC, scale_b, bias_N, addend_MN, factor, dtype, fast_accumulation):
    y_MN = _product_ref(a_MC, b_NC) * (scale_a * factor * scale_b)
    return _sum_ref(y_MN, bias_N, addend_MN, dtype)


def _scaled_gemm_into_ref(a_MC, scale_a, b_NC, scale_b, out_MN, fast_accumulation, accumulate):
    _store_ref(_product_ref(a_MC, b_NC) * (scale_a * scale_b), out_MN, accumulate)


def _gemm_ref(a_MC, b_NC, bias_N, addend_MN, factor, dtype):
    if a_MC.dtype == dtype and addend_MN is None and factor == 1.0:
        return F.linear(a_MC, b_NC, None if bias_N is None else bias_N.to(dtype))
    return _sum_ref(_product_ref(a_MC, b_NC) * factor, bias_N, addend_MN, dtype)


def _gemm_into_ref(a_MC, b_NC, out_MN, accumulate):
    _store_ref(_product_ref(a_MC, b_NC), out_MN, accumulate)


def _store_ref(y_MN, out_MN, accumulate):
    if accumulate:
        out_MN.add_(y_MN)
    else:
        out_MN.copy_(y_MN)


def _scaled_gemm_launch(a_MC, scale_a, b_NC, scale_b, bias_N, addend_MN, factor, dtype, fast_accumulation):
    M, N = a_MC.shape[0], b_NC.shape[0]
    if M == 0 or N == 0 or a_MC.shape[1] == 0:
        return _sum_ref(torch.zeros(M, N, dtype=dtype, device=a_MC.device), bias_N, addend_MN, dtype)
    padding = pad_contraction(N) - N
    if padding:  # cuBLASLt takes multiples of 16 only
        b_NC = F.pad(b_NC.view(torch.uint8), (0, 0, 0, padding)).view(b_NC.dtype)
        bias_N = None if bias_N is None else F.pad(bias_N, (0, padding))
    epilogue = bias_N is not None and dtype != torch.float32  # cuBLASLt has no bias for fp32 results
    y_MN = torch._scaled_mm(
        a_MC,
        b_NC.t(),
        scale_a=scale_a if factor == 1.0 else scale_a * factor,
        scale_b=scale_b,
        bias=bias_N.to(dtype) if epilogue else None,
        out_dtype=dtype,
        use_fast_accum=fast_accumulation,
    )
    if bias_N is not None and not epilogue:
        y_MN += bias_N
    y_MN = y_MN[:, :N].contiguous() if padding else y_MN
    return y_MN if addend_MN is None else y_MN.add_(addend_MN)


def _scaled_gemm_into_launch(a_MC, scale_a, b_NC, scale_b, out_MN, fast_accumulation, accumulate):
    dtype = torch.float32 if accumulate else out_MN.dtype
    y_MN = _scaled_gemm_launch(a_MC, scale_a, b_NC, scale_b, None, None, 1.0, dtype, fast_accumulation)
    _store_ref(y_MN, out_MN, accumulate)


def _gemm_launch(a_MC, b_NC, bias_N, addend_MN, factor, dtype):
    if max(a_MC.numel(), b_NC.numel()) > _INT32_MAX:
        a_MC = a_MC.contiguous()  # cuBLAS gives zeros for two transposed operands of this size (seen with CUDA 13.0)
    if a_MC.dtype == dtype:
        if addend_MN is None and factor == 1.0:
            return F.linear(a_MC, b_NC, None if bias_N is None else bias_N.to(dtype))
        return _addmm(a_MC, b_NC, bias_N, addend_MN, factor)
    if dtype == torch.float32:
        y_MN = torch.mm(a_MC, b_NC.t(), out_dtype=torch.float32)
        y_MN = y_MN if factor == 1.0 else y_MN.mul_(factor)
        y_MN = y_MN if bias_N is None else y_MN.add_(bias_N)
        return y_MN if addend_MN is None else y_MN.add_(addend_MN)
    return _gemm_ref(a_MC, b_NC, bias_N, addend_MN, factor, dtype)


def _addmm(a_MC, b_NC, bias_N, addend_MN, factor):
    """`torch.addmm` takes one summand; with two, the second is added to the rounded sum."""
    first = addend_MN if bias_N is None else bias_N
    if first is None:
        return torch.addmm(a_MC.new_empty(1), a_MC, b_NC.t(), beta=0, alpha=factor)
    y_MN = torch.addmm(first.to(a_MC.dtype), a_MC, b_NC.t(), alpha=factor)
    return y_MN if addend_MN is None or bias_N is None else y_MN.add_(addend_MN)


def _gemm_into_launch(a_MC, b_NC, out_MN, accumulate):
    wide = torch.promote_types(out_MN.dtype, torch.float32) if accumulate else out_MN.dtype
    _store_ref(_gemm_launch(a_MC, b_NC, None, None, 1.0, wide), out_MN, accumulate)


def _scaled_gemm_allocate(a_MC, scale_a, b_NC, scale_b, bias_N, addend_MN, factor, dtype, fast_accumulation):
    return a_MC.new_empty(a_MC.shape[0], b_NC.shape[0], dtype=dtype)


def _gemm_allocate(a_MC, b_NC, bias_N, addend_MN, factor, dtype):
    return a_MC.new_empty(a_MC.shape[0], b_NC.shape[0], dtype=dtype)


def _nothing(*args: object) -> None:
    """What a kernel that only changes its arguments returns."""


_scaled_gemm = register(
    "scaled_gemm(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor? bias, Tensor? addend, float factor,"
    " ScalarType dtype, bool fast) -> Tensor",
    ref=_scaled_gemm_ref,
    launch=_scaled_gemm_launch,
    allocate=_scaled_gemm_allocate,
)
_scaled_gemm_into = register(
    "scaled_gemm_into(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor(a!) out, bool fast, bool accumulate)"
    " -> ()",
    ref=_scaled_gemm_into_ref,
    launch=_scaled_gemm_into_launch,
    allocate=_nothing,
)
_gemm = register(
    "gemm(Tensor a, Tensor b, Tensor? bias, Tensor? addend, float factor, ScalarType dtype) -> Tensor",
    ref=_gemm_ref,
    launch=_gemm_launch,
    allocate=_gemm_allocate,
)
_gemm_into = register(
    "gemm_into(Tensor a, Tensor b, Tensor(a!) out, bool accumulate) -> ()",
    ref=_gemm_into_ref,
    launch=_gemm_into_launch,
    allocate=_nothing,
)
