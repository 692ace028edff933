"""Inputs for which quantizers, sums and results are exact in every dtype, so that float64 gives the same numbers.

Every tensor has an amax of 1.75 times a power of two (448 / 1.75 and 57344 / 1.75 are powers of two), and few small
elements besides.
"""

from __future__ import annotations

import torch
from torch import Tensor


def exact(
    *shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", power: int = 0, requires_grad: bool = False
) -> Tensor:
    """Elements -1, 0 and 1, and one of 1.75, all times 2^power."""
    values = torch.randint(-1, 2, shape).double() * torch.randint(0, 2, shape)
    if values.numel():
        values.view(-1)[int(torch.randint(values.numel(), ()))] = 1.75
    return (values * 2.0**power).to(device, dtype).requires_grad_(requires_grad)


def exact_(parameter: Tensor, power: int = 0) -> None:
    """Fill a parameter."""
    with torch.no_grad():
        parameter.copy_(exact(*parameter.shape, power=power))


def same_as_double(result: Tensor, reference: Tensor) -> bool:
    """Whether `result` is `reference`, which must be exact in the dtype of `result`."""
    assert torch.equal(reference.to(result.dtype).double(), reference), "the inputs of this test are not exact"
    return torch.equal(result.double(), reference)
