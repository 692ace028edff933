"""Specializations of the norms' kernels: the launchers' own configurations, for rows of many lengths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from lowp.kernels import norm, norm_config, norm_grad
from lowp.kernels.norm_grad_kernel import norm_grad_kernel, norm_grad_long_kernel
from lowp.kernels.norm_kernel import norm_kernel, norm_long_kernel
from tests.kernels.builds import Build

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POINTERS = {BF16: "*bf16", FP16: "*fp16", FP32: "*fp32"}
LENGTHS = (1, 21, 128, 768, 4096, 5120, 8192, 12288, 16384, 65536)
"""Below, at and between powers of two; the last one doesn't fit into registers."""


def _build(
    kernel: Any,
    K: int,
    pointers: dict[str, str | None],
    constants: tuple[Any, ...],
    warps: int,
    maxnreg: int | None = None,
) -> Build:
    """Sizes and strides are known to be 1 or multiples of 16 where K is."""
    names = kernel.arg_names
    known = dict(zip(names[len(names) - len(constants) :], constants, strict=True))
    known |= {name: None for name, kind in pointers.items() if kind is None}
    scalars = [name for name in names if name not in pointers | known]
    floats = [name for name in scalars if name in ("share", "eps")]
    types = {name: kind for name, kind in pointers.items() if kind} | dict.fromkeys(scalars, "i32")
    if K == 1:
        known |= dict.fromkeys(set(scalars) - {"M", *floats}, 1)
    types = {name: "fp32" if name in floats else kind for name, kind in types.items() if name not in known}
    aligned = types.keys() - set(scalars if K % 16 else floats)
    return Build(kernel, types, known, warps, aligned, maxnreg, label=f"K{K}")


def forward(
    K: int, layer: bool, output: bool, amax: bool, x: torch.dtype = BF16, y: torch.dtype = BF16, w: torch.dtype = BF16
) -> Build:
    """One launch of the forward pass; with a bias where there is a mean."""
    config = norm_config.config_for(K, x.itemsize, centered=layer, output=output, amax=amax)
    kernel = norm_long_kernel if isinstance(config, norm_config.LongConfig) else norm_kernel
    pointers = {
        "x_ptr": POINTERS[x],
        "w_ptr": POINTERS[w],
        "b_ptr": POINTERS[w] if layer else None,
        "y_ptr": POINTERS[y] if output else None,
        "mean_ptr": "*fp32" if layer else None,
        "rstd_ptr": "*fp32",
        "amax_ptr": "*fp32" if amax else None,
    }
    constants = norm._constants(config, K, x, not layer, y)
    build = _build(kernel, K, pointers, constants, config.num_warps, config.maxnreg)
    squeezed = layer and amax and config.maxnreg is not None  # one more program is worth a few spilled registers
    return replace(build, spills=9) if squeezed else build


def backward(
    K: int,
    layer: bool,
    grad_input: bool,
    sums: int,
    residual: bool,
    x: torch.dtype = BF16,
    dy: torch.dtype = BF16,
    w: torch.dtype = BF16,
) -> Iterator[Build]:
    """The launches of the backward pass; the second sum is that of the bias."""
    rows, columns = norm_grad.plan_for(K, grad_input=grad_input, sums=sums)
    for config, has_dx in ((rows, True), (columns, False)):
        if config is None:
            continue
        pointers = {
            "dy_ptr": POINTERS[dy],
            "x_ptr": POINTERS[x],
            "mean_ptr": "*fp32" if layer else None,
            "rstd_ptr": "*fp32",
            "w_ptr": POINTERS[w],
            "residual_ptr": POINTERS[x] if residual else None,
            "dx_ptr": POINTERS[x] if has_dx else None,
        }
        kernel = norm_grad_long_kernel
        if isinstance(config, norm_grad.Config):
            kernel, own = norm_grad_kernel, config is columns or columns is None
            pointers["dw_ptr"] = "*fp32" if own and sums >= 1 else None
            pointers["db_ptr"] = "*fp32" if own and sums == 2 else None
        constants = (not layer, config.block_k)
        if kernel is norm_grad_kernel:
            constants = norm_grad._constants(config, K, not layer)
        yield _build(kernel, K, pointers, constants, config.num_warps)


def norm_builds() -> Iterator[Build]:
    """Everything that differs in the code, each for all lengths; the other dtypes for some."""
    for K, layer in itertools.product(LENGTHS, (True, False)):
        yield forward(K, layer, True, False)
        yield forward(K, layer, (K % 5 == 0) == layer, True)
        yield from backward(K, layer, True, 1 + layer, residual=False)
        if K % 3 == 0 or K >= 16384:
            yield from backward(K, layer, True, 0, residual=True)
    for K, layer in ((768, True), (768, False), (8192, True), (8192, False), (16384, False)):
        yield forward(K, layer, True, True, x=FP32, y=FP32, w=FP32)
        yield forward(K, layer, True, not layer, x=FP32, y=BF16, w=FP32)
        yield forward(K, layer, True, True, x=FP16, y=FP16, w=FP16)
        yield from backward(K, layer, True, 1 + layer, residual=True, x=FP32, dy=FP32, w=FP32)
        yield from backward(K, layer, True, 1, residual=True, x=FP16, dy=FP16, w=FP16)
        yield from backward(K, layer, False, 1 + layer, residual=False, x=FP32, dy=BF16, w=FP32)
    yield forward(8192, True, False, False)  # statistics alone
