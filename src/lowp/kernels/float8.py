"""Per-tensor FP8 quantization: the scale and the elements, for every kernel that quantizes.

    amax = max(max_P amax_P, amax_epsilon)
    multiplier = fmt.max / amax         (1 where amax is 0; at most the largest fp32; power_2_scale: mantissa cleared)
    encode(x * multiplier) = x * multiplier, clamped to +-fmt.max, to nearest even

All in fp32, with IEEE division and subnormals. NaN becomes `NAN_CODE`; Inf stays Inf where the format has it, else it
becomes NaN: what is not finite stays visible, and the rest keeps the scale of the finite elements.

The reference clamps first, since torch's casts differ between versions; PTX defines that `cvt.rn.satfinite` clamps.

Shape legend: P = parts of amax (see lowp.kernels.amax).
Source: OCP 8-bit Floating Point Specification (OFP8), rev 1.0; current scaling of NVIDIA Transformer Engine 2.20; PTX
ISA 8.7, cvt (tests/kernels/test_cast.py compares every 16-bit value, far out of range too).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowp.formats import NAN_CODE, ElementFormat
from lowp.kernels._triton import jit, tl
from lowp.quantizers import Float8CurrentScalingQuantizer


def multiplier_ref(amax_P: Tensor, spec: Float8CurrentScalingQuantizer) -> Tensor:
    """The multiplier, 0-d; full_like, because torch takes number / tensor as number * reciprocal."""
    amax = amax_P.max().clamp(min=spec.amax_epsilon)
    multiplier = torch.full_like(amax, spec.fmt.max) / amax
    multiplier = multiplier.masked_fill(amax == 0, 1.0).clamp(max=torch.finfo(torch.float32).max)
    if spec.power_2_scale:
        multiplier = (multiplier.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    return multiplier


def encode_ref(x: Tensor, multiplier: Tensor, fmt: ElementFormat) -> Tensor:
    """The codes of `x * multiplier`, as uint8."""
    scaled = x.float() * multiplier
    codes = scaled.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
    codes = codes.masked_fill(x.isnan(), NAN_CODE)
    if fmt.inf_code is None:
        return codes.masked_fill(x.isinf(), NAN_CODE)
    return torch.where(x.isinf(), fmt.inf_code | x.signbit().to(torch.uint8) << 7, codes)


@jit
def first_parts_of_amax(amax_ptr, P, BLOCK_P: tl.constexpr):
    """The first parts of amax: loaded early, they are under way while a program works its values out."""
    p = tl.arange(0, BLOCK_P)
    return tl.load(amax_ptr + p, mask=p < P, other=0.0)


@jit
def largest_part(first_P, amax_ptr, P, BLOCK_P: tl.constexpr):
    """The amax, from its first parts and all others: each program works it out for itself."""
    largest_P = first_P
    for start in range(BLOCK_P, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        largest_P = tl.maximum(largest_P, tl.load(amax_ptr + p, mask=p < P, other=0.0))
    return tl.max(largest_P)


@jit
def multiplier_of(amax, epsilon, FMT_MAX: tl.constexpr, POWER_2: tl.constexpr):
    """The multiplier."""
    amax = tl.maximum(amax, epsilon)
    multiplier = tl.where(amax == 0.0, 1.0, tl.div_rn(FMT_MAX, amax))
    multiplier = tl.minimum(multiplier, 3.4028234663852886e38)
    if POWER_2:
        multiplier = (multiplier.to(tl.int32, bitcast=True) & ~0x7FFFFF).to(tl.float32, bitcast=True)
    return multiplier


@jit
def _encode_e4m3(x, y):
    """`y` as bytes, which the instruction clamps to the range; NaN where `x` is NaN or Inf.

    Triton's own conversion lets ptxas merge two conversions into one register. Where ptxas 12.8 shares one of them
    between two words (of both copies, or of equal elements), it uses the register before it is written: the stored
    bytes are garbage, as in https://github.com/triton-lang/triton/issues/11111, or ptxas crashes. It does not merge
    halves that are put together by a shift. Remove when no supported Triton brings such a ptxas.
    """
    return tl.inline_asm_elementwise(
        "{.reg .b16 lo, hi; .reg .b32 lo32, hi32;"
        "cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;"
        "cvt.u32.u16 lo32, lo; cvt.u32.u16 hi32, hi; shl.b32 hi32, hi32, 16; or.b32 $0, hi32, lo32;}",
        "=r,f,f,f,f",
        [tl.fma(x, 0.0, y)],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@jit
def _encode_e5m2(x, y):
    """`y` as bytes, which the instruction clamps to the range; NaN where it is NaN, Inf where `x` is Inf.

    The code of Inf follows that of the largest value. The halves are put together as in `_encode_e4m3`.
    """
    return tl.inline_asm_elementwise(
        "{.reg .f32 x0, x1, x2, x3; .reg .b16 lo, hi; .reg .b32 lo32, hi32; .reg .pred i0, i1, i2, i3;"
        "cvt.rn.satfinite.e5m2x2.f32 lo, $6, $5; cvt.rn.satfinite.e5m2x2.f32 hi, $8, $7;"
        "cvt.u32.u16 lo32, lo; cvt.u32.u16 hi32, hi; shl.b32 hi32, hi32, 16; or.b32 $0, hi32, lo32;"
        "abs.f32 x0, $1; abs.f32 x1, $2; abs.f32 x2, $3; abs.f32 x3, $4;"
        "setp.eq.f32 i0, x0, 0f7F800000; setp.eq.f32 i1, x1, 0f7F800000;"
        "setp.eq.f32 i2, x2, 0f7F800000; setp.eq.f32 i3, x3, 0f7F800000;"
        "@i0 add.u32 $0, $0, 1; @i1 add.u32 $0, $0, 256; @i2 add.u32 $0, $0, 65536; @i3 add.u32 $0, $0, 16777216;}",
        "=&r,f,f,f,f,f,f,f,f",
        [x, y],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@jit
def encode(x, multiplier, FP8: tl.constexpr):
    """The FP8 elements of `x * multiplier`."""
    y = x * multiplier
    codes = _encode_e5m2(x, y) if FP8 == tl.float8e5 else _encode_e4m3(x, y)
    return codes.to(FP8, bitcast=True)
