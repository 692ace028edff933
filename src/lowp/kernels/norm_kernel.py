"""The Triton kernels of the norms: see lowp.kernels.norm, whose formulas they compute.

A sum over K is multiplied by `share`: 1 / K makes it a mean, 1 leaves it a sum. The mean is exact where a row is
constant; the variance is that of the deviations from the mean, so that a large mean takes nothing from it.

Shape legend: M = rows (tokens), K = features; R = rows of a tile, L = parts of a row.
Source: Chan et al., Algorithms for Computing the Sample Variance (1983), for rows that don't fit into registers.
"""

from __future__ import annotations

from lowp.kernels._triton import constexpr, jit, tl
from lowp.kernels.amax import PARTIALS
from lowp.kernels.normalized import normalize, scale_and_shift, standardize

_PARTIALS = constexpr(PARTIALS)


@jit
def columns_of(x_ptr, BLOCK_K: tl.constexpr):
    """The columns, `[1, BLOCK_K]`, with the hint that a thread takes no more neighbours at once than 16 bytes of x.

    Without it, Triton gives a thread as many as the narrowest of all elements allow, and adds a row up in an order that
    follows from that: statistics would depend on the dtype of y, and on whether y is written.
    """
    of_x: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    at_once: tl.constexpr = of_x if of_x < BLOCK_K else BLOCK_K
    return tl.max_contiguous(tl.arange(0, BLOCK_K)[None, :], [1, at_once])


@jit
def mean_of_rows(mean_RL, count_RL, share):
    """The mean of rows, from means and counts of their parts."""
    near = tl.sum(mean_RL * count_RL, 1, keep_dims=True) * share
    return near + tl.sum((mean_RL - near) * count_RL, 1, keep_dims=True) * share


@jit
def inverse_root(squares_RL, share, eps):
    """1 / sqrt(sum * share + eps), each step to nearest."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares_RL, 1, keep_dims=True) * share + eps))


@jit
def _halves(x_RK):
    """Each element's neighbours, in two tensors of half the length."""
    return tl.split(tl.reshape(x_RK, [x_RK.shape[0], x_RK.shape[1] // 2, 2]))


@jit
def _sum_of_neighbours(x_RK, LEVELS: tl.constexpr):
    """Sums of 2**LEVELS neighbours, which a thread holds: a sum over a row then has less to do."""
    for _ in tl.static_range(LEVELS):
        even, odd = _halves(x_RK)
        x_RK = even + odd
    return x_RK


@jit
def _squares_of_neighbours(x_RK, LEVELS: tl.constexpr):
    """Sums of the squares of 2**LEVELS neighbours."""
    if LEVELS == 0:
        squares = x_RK * x_RK
    else:
        even, odd = _halves(x_RK)
        squares = _sum_of_neighbours(tl.fma(even, even, odd * odd), LEVELS - 1)
    return squares


@jit
def _mean(x_RK, present_RK, K, share, LEVELS: tl.constexpr, EXACT: tl.constexpr):
    """The mean of rows of K elements; EXACT: a sum of equal ones is (`lowp.kernels.norm.sums_of_equals_are_exact`)."""
    total = _sum_of_neighbours(x_RK, LEVELS)
    if EXACT:
        mean = tl.div_rn(tl.sum(total, 1, keep_dims=True), tl.maximum(K, 1) * 1.0)
    else:
        counts = _sum_of_neighbours(present_RK.to(tl.float32), LEVELS)
        mean = mean_of_rows(total * 0.5**LEVELS, counts, share)
    return mean


@jit
def _magnitude(y, present, OVERFLOW: tl.constexpr):
    """`|y|`, with 0 for what is not there or not finite once it is rounded."""
    magnitude = tl.abs(y)
    return tl.where(present & (magnitude < OVERFLOW), magnitude, 0.0)


@jit
def _larger(a, b):
    """The larger one, or NaN if one of them is: what isn't finite isn't lost."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def _amax_of_rows(operands, k, r, in_row, M, stride_m, step, ZERO: tl.constexpr, OVERFLOW: tl.constexpr):
    """The largest finite |y| of a program's rows, element by element, once their statistics are known."""
    x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr = operands
    amax = 0.0
    for start in range(tl.program_id(0) * r.shape[0], M, step):
        m = start + r
        present = in_row & (m < M)
        x = tl.load(x_ptr + m * stride_m + k, mask=present, other=0.0)
        mean = tl.load(mean_ptr + m, mask=m < M, other=0.0) if mean_ptr is not None else None
        rstd = tl.load(rstd_ptr + m, mask=m < M, other=0.0)
        w = tl.load(w_ptr + k, mask=in_row, other=0.0) if w_ptr is not None else None
        b = tl.load(b_ptr + k, mask=in_row, other=0.0) if b_ptr is not None else None
        amax = tl.maximum(amax, tl.max(_magnitude(normalize(x, mean, rstd, w, b, ZERO), present, OVERFLOW)))
    return amax


@jit
def _amax_of_columns(
    top, bottom, operands, k, r, in_row, M, stride_m, step, ZERO: tl.constexpr, OVERFLOW: tl.constexpr
):
    """The largest finite |y| of a program's rows, from the largest and smallest z of each column.

    In a column y follows z up or down. Without a bias `top` holds the largest |z|, which is enough.
    """
    w_ptr, b_ptr = operands[1], operands[2]
    w = tl.load(w_ptr + k, mask=in_row, other=0.0) if w_ptr is not None else None
    b = tl.load(b_ptr + k, mask=in_row, other=0.0) if b_ptr is not None else None
    largest = tl.abs(scale_and_shift(top, w, b, ZERO))
    if b_ptr is not None:
        largest = _larger(largest, tl.abs(scale_and_shift(bottom, w, b, ZERO)))
    has_rows = in_row & (top > -float("inf"))
    amax = tl.reduce(tl.where(has_rows, largest, 0.0), None, _larger)
    if not amax < OVERFLOW:  # an extreme that isn't finite hides the others of its column
        tl.debug_barrier()  # the statistics are read where they were written
        amax = _amax_of_rows(operands, k, r, in_row, M, stride_m, step, ZERO, OVERFLOW)
    return amax


@jit
def _store_amax(amax_ptr, amax, DTYPE: tl.constexpr):
    """One part for each program; the parts without a program are 0."""
    turn = tl.arange(0, _PARTIALS)
    part = tl.program_id(0) + turn * tl.num_programs(0)
    tl.store(amax_ptr + part, tl.where(turn == 0, amax.to(DTYPE).to(tl.float32), 0.0), mask=part < _PARTIALS)


@jit
def norm_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    amax_ptr,
    M,
    K,
    stride_m,
    share,
    eps,
    ZERO: tl.constexpr,
    DTYPE: tl.constexpr,
    OVERFLOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    LEVELS: tl.constexpr,
    EXACT: tl.constexpr,
    KEEP: tl.constexpr,
    PREFETCH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows that fit into registers.

    KEEP: the parameters stay there too. PREFETCH: the next tile is read early. COLUMNS: amax is found 0: element by
    element; 1 or BLOCK_M: from the extremes of z = (x - mean) * rstd in each column, of all rows or of each row of a
    tile, so that it takes the parameters once.
    """
    k = columns_of(x_ptr, BLOCK_K)
    in_row = tl.full([1, BLOCK_K], True, tl.int1) if EVEN else k < K
    w = tl.load(w_ptr + k, mask=in_row, other=0.0) if KEEP and (w_ptr is not None) else None
    b = tl.load(b_ptr + k, mask=in_row, other=0.0) if KEEP and (b_ptr is not None) else None
    r = tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
    step = tl.num_programs(0) * BLOCK_M
    if PREFETCH:
        m = tl.program_id(0) * BLOCK_M + r
        following = tl.load(x_ptr + m * stride_m + k, mask=in_row & (m < M), other=0.0)
    largest = tl.zeros([BLOCK_M, BLOCK_K // 2**LEVELS], tl.float32)
    top = tl.full([COLUMNS if COLUMNS else 1, BLOCK_K], -float("inf"), tl.float32)
    bottom = -top
    for start in range(tl.program_id(0) * BLOCK_M, M, step):
        m = start + r
        inside = tl.full([1, 1], True, tl.int1) if BLOCK_M == 1 else m < M
        present = in_row & inside
        if PREFETCH:
            x = following.to(tl.float32)
            ahead = m + step
            following = tl.load(x_ptr + ahead * stride_m + k, mask=in_row & (ahead < M), other=0.0)
        else:
            x = tl.load(x_ptr + m * stride_m + k, mask=present, other=0.0).to(tl.float32)
        mean = None
        off = x
        if mean_ptr is not None:
            mean = _mean(x, present, K, share, LEVELS, EXACT)
            tl.store(mean_ptr + m, mean, mask=inside)
            off = (x - mean) * present.to(tl.float32)
        rstd = inverse_root(_squares_of_neighbours(off, LEVELS), share, eps)
        tl.store(rstd_ptr + m, rstd, mask=inside)
        z = standardize(x, mean, rstd)
        if (y_ptr is not None) or ((amax_ptr is not None) and COLUMNS == 0):
            w_now = w if KEEP or w_ptr is None else tl.load(w_ptr + k, mask=in_row, other=0.0)
            b_now = b if KEEP or b_ptr is None else tl.load(b_ptr + k, mask=in_row, other=0.0)
            y = scale_and_shift(z, w_now, b_now, ZERO)
            if y_ptr is not None:
                tl.store(y_ptr + m * K + k, y.to(DTYPE), mask=present)
            if (amax_ptr is not None) and COLUMNS == 0:
                magnitude = tl.reshape(_magnitude(y, present, OVERFLOW), [BLOCK_M, BLOCK_K // 2**LEVELS, 2**LEVELS])
                largest = tl.maximum(largest, tl.max(magnitude, 2))
        if (amax_ptr is not None) and COLUMNS > 0:
            z = z if BLOCK_M == 1 else tl.where(inside, z, float("nan"))  # which no maximum takes
            upper = z if b_ptr is not None else tl.abs(z)
            top = tl.maximum(top, upper if COLUMNS == BLOCK_M else tl.max(upper, 0, keep_dims=True))
            if b_ptr is not None:
                bottom = tl.minimum(bottom, z if COLUMNS == BLOCK_M else tl.min(z, 0, keep_dims=True))
    if amax_ptr is not None:
        if COLUMNS == 0:
            amax = tl.max(largest)
        else:
            operands = (x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr)
            amax = _amax_of_columns(top, bottom, operands, k, r, in_row, M, stride_m, step, ZERO, OVERFLOW)
        _store_amax(amax_ptr, amax, DTYPE)


@jit
def norm_long_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    amax_ptr,
    M,
    K,
    stride_m,
    share,
    eps,
    ZERO: tl.constexpr,
    DTYPE: tl.constexpr,
    OVERFLOW: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows that don't: read once for the statistics of every BLOCK_K-th element, which are merged, and once for y."""
    lane = columns_of(x_ptr, BLOCK_K).to(tl.int64)
    largest = tl.zeros([1, BLOCK_K], tl.float32)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        m = tl.full([1, 1], row, tl.int64)
        means = tl.zeros([1, BLOCK_K], tl.float32)
        squares = tl.zeros([1, BLOCK_K], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + lane
            x = tl.load(x_ptr + m * stride_m + k, mask=k < K, other=0.0).to(tl.float32)
            off = x
            if mean_ptr is not None:
                off = tl.where(k < K, x - means, 0.0)
                means += off * tl.div_rn(1.0, (start // BLOCK_K + 1) * 1.0)
            squares += off * (x - means)
        mean = None
        if mean_ptr is not None:
            counts = tl.cdiv(K - lane, BLOCK_K).to(tl.float32)
            mean = mean_of_rows(means, counts, share)
            tl.store(mean_ptr + m, mean)
            squares += (means - mean) * (means - mean) * counts
        rstd = inverse_root(squares, share, eps)
        tl.store(rstd_ptr + m, rstd)
        for start in range(0, K, BLOCK_K):
            k = start + lane
            x = tl.load(x_ptr + m * stride_m + k, mask=k < K, other=0.0)
            w = tl.load(w_ptr + k, mask=k < K, other=0.0) if w_ptr is not None else None
            b = tl.load(b_ptr + k, mask=k < K, other=0.0) if b_ptr is not None else None
            y = normalize(x, mean, rstd, w, b, ZERO)
            if y_ptr is not None:
                tl.store(y_ptr + m * K + k, y.to(DTYPE), mask=k < K)
            largest = tl.maximum(largest, _magnitude(y, k < K, OVERFLOW))
    if amax_ptr is not None:
        _store_amax(amax_ptr, tl.max(largest), DTYPE)
