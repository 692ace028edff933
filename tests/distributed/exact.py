"""Inputs whose quantization, products and sums are exact, whole and in shards.

Elements are -1, 0 and 1, with 1.75 in every quarter, so that every half of a tensor along either axis (or, where asked
for, every smaller part) has an amax of 1.75: the multipliers (448 or 57344 over it) are powers of two. Where the 1.75s
are is chosen so that no product of two of them enters a sum: sums are quarters below 2^6, which bf16 holds.

Shape legend: M = tokens, N = out features, K = in features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

M, N, K = 8, 32, 48


def exact(rows: int, columns: int, seed: int, *, odd_rows: bool, odd_columns: bool, parts: int = 2) -> Tensor:
    """A float64 matrix; its 1.75s are in odd or even rows and columns, one in each of `parts` times `parts` blocks."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-1, 2, (rows, columns), generator=generator).double()
    values *= torch.rand(rows, columns, generator=generator) < 0.5
    for row in range(0, rows, rows // parts):
        for column in range(0, columns, columns // parts):
            values[row + odd_rows, column + odd_columns] = 1.75
    return values


class Problem(NamedTuple):
    """A linear layer's operands and results, in float64; the whole of each."""

    x: Tensor
    w: Tensor
    b: Tensor
    dy: Tensor
    y: Tensor
    dx: Tensor
    dw: Tensor
    db: Tensor


def problem(*, bias: bool, seed: int = 0, k: int = K, parts: int = 2) -> Problem:
    """`y = x @ w.T + b` and its gradients for `dy`, of `k` in features, for up to `parts` ranks."""
    x = exact(M, k, seed, odd_rows=False, odd_columns=False, parts=parts)
    w = exact(N, k, seed + 1, odd_rows=False, odd_columns=True, parts=parts)
    b = exact(2, N, seed + 2, odd_rows=False, odd_columns=False)[0]
    dy = exact(M, N, seed + 3, odd_rows=True, odd_columns=True, parts=parts)
    return Problem(x, w, b, dy, x @ w.T + (b if bias else 0), dy @ w, dy.T @ x, dy.sum(0))


def check_equal(result: Tensor, reference: Tensor, what: str) -> None:
    """`result` is `reference`, which its dtype can hold."""
    reference = reference.to(result.device)
    assert torch.equal(reference.to(result.dtype).double(), reference), f"{what}: the inputs are not exact"
    assert torch.equal(result.double(), reference), f"{what}: {(result.double() - reference).abs().max()} off"
