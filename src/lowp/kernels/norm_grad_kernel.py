"""The Triton kernels of the norms' gradients: see lowp.kernels.norm_grad, whose formulas they compute.

Shape legend: M = rows (tokens), K = features.
"""

from __future__ import annotations

from lowp.kernels._triton import jit, tl
from lowp.kernels.normalized import normalize


@jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@jit
def _store_dx(dx_ptr, offset, dx, present, residual_ptr, residual_offset):
    """Round, add, round again: as if the addition were a kernel of its own."""
    dx = dx.to(dx_ptr.dtype.element_ty)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + residual_offset, mask=present, other=0.0)
        dx = (dx.to(tl.float32) + residual.to(tl.float32)).to(dx.dtype)
    tl.store(dx_ptr + offset, dx, mask=present)


@jit
def norm_grad_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    w_ptr,
    residual_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    M,
    K,
    stride_dy,
    stride_x,
    stride_residual,
    share,
    ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    KEEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program has its rows in turn: whole ones if dx is wanted, else BLOCK_K of their columns. KEEP: as above."""
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    in_row = tl.full([1, BLOCK_K], True, tl.int1) if EVEN else k < K
    w = tl.load(w_ptr + k, mask=in_row, other=0.0) if KEEP and (w_ptr is not None) else None
    dw = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    db = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    r = tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
    for start in tl.range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=STAGES):
        m = start + r
        inside = tl.full([1, 1], True, tl.int1) if BLOCK_M == 1 else m < M
        present = in_row & inside
        dy = tl.load(dy_ptr + m * stride_dy + k, mask=present, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + m * stride_x + k, mask=present, other=0.0)
        mean = tl.load(mean_ptr + m, mask=inside, other=0.0) if mean_ptr is not None else None
        rstd = tl.load(rstd_ptr + m, mask=inside, other=0.0)
        xhat = normalize(x, mean, rstd, None, None, False)
        if dw_ptr is not None:
            dw += dy * xhat
        if db_ptr is not None:
            db += dy
        if dx_ptr is not None:
            if KEEP:
                g = normalize(dy, None, 1.0, w, None, ZERO)
            else:
                w_now = tl.load(w_ptr + k, mask=in_row, other=0.0) if w_ptr is not None else None
                g = normalize(dy, None, 1.0, w_now, None, ZERO)
            if mean is None:
                dx = g - xhat * (tl.sum(g * xhat, 1, keep_dims=True) * share)
            else:
                along, level = tl.reduce((g * xhat, g), 1, _add_pairs, keep_dims=True)
                dx = g - xhat * (along * share) - level * share
            _store_dx(dx_ptr, m * K + k, dx * rstd, present, residual_ptr, m * stride_residual + k)
    partial = tl.program_id(0).to(tl.int64) * K + k
    if dw_ptr is not None:
        tl.store(dw_ptr + partial, tl.sum(dw, 0, keep_dims=True), mask=in_row)
    if db_ptr is not None:
        tl.store(db_ptr + partial, tl.sum(db, 0, keep_dims=True), mask=in_row)


@jit
def norm_grad_long_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    w_ptr,
    residual_ptr,
    dx_ptr,
    K,
    stride_dy,
    stride_x,
    stride_residual,
    share,
    ZERO: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows that don't fit into registers: read once for the sums over them, and once for dx."""
    m = tl.full([1, 1], tl.program_id(0), tl.int64)
    mean = tl.load(mean_ptr + m) if mean_ptr is not None else None
    rstd = tl.load(rstd_ptr + m)
    along = tl.zeros([1, BLOCK_K], tl.float32)
    level = tl.zeros([1, BLOCK_K], tl.float32)
    for turn in tl.static_range(2):
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)[None, :]
            dy = tl.load(dy_ptr + m * stride_dy + k, mask=k < K, other=0.0)
            x = tl.load(x_ptr + m * stride_x + k, mask=k < K, other=0.0)
            w = tl.load(w_ptr + k, mask=k < K, other=0.0) if w_ptr is not None else None
            g = normalize(dy, None, 1.0, w, None, ZERO)
            xhat = normalize(x, mean, rstd, None, None, False)
            if turn == 0:
                along += g * xhat
                level += g
            else:
                dx = (g - xhat * along - level) * rstd
                _store_dx(dx_ptr, m * K + k, dx, k < K, residual_ptr, m * stride_residual + k)
        if turn == 0:
            along = tl.sum(along, 1, keep_dims=True) * share
            level = tl.sum(level, 1, keep_dims=True) * share if mean is not None else 0.0
