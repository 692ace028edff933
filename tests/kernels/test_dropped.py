from __future__ import annotations

import math

import pytest
import torch

from lowp.formats import HIGH_PRECISION
from lowp.kernels.dropped import Dropped, dropped, philox_ref, words_ref
from lowp.kernels.materialize import materialize
from tests.kernels.layouts import bits

KNOWN = [
    (["00000000"] * 4, ["00000000"] * 2, ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]),
    (["ffffffff"] * 4, ["ffffffff"] * 2, ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]),
    (
        ["243f6a88", "85a308d3", "13198a2e", "03707344"],
        ["a4093822", "299f31d0"],
        ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"],
    ),
]
"""Counter, key and words: known answers of Philox4x32-10, from the test vectors of Random123 (Salmon et al.)."""


def seeds(seed: int = 1234, offset: int = 0, device: str = "cpu") -> torch.Tensor:
    return torch.tensor([seed, offset], device=device)


def tensors(words: list[str]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in words)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert [f"{int(word):08x}" for word in philox_ref(tensors(counter), tensors(key))] == words


@pytest.mark.parametrize("seed", [0, 1, -1, 2**32 + 7, -(2**63), 2**63 - 1])
def test_rows_columns_seed_and_offset_make_the_counter(seed):
    words = words_ref(torch.tensor([seed, seed]), 5, 3)
    low, high = torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32 & 0xFFFFFFFF)
    counter = (torch.tensor(2), torch.tensor(4), low, high)
    assert torch.equal(words[4, 2], torch.stack(philox_ref(counter, (low, high))))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_share_that_is_kept(device, p):
    x = torch.ones(500, 401, device=device)
    y = materialize(dropped(x, seeds(device=device), p))
    kept = (y != 0).sum().item()
    n = x.numel()
    assert abs(kept - n * (1 - p)) <= 6 * math.sqrt(n * p * (1 - p))
    assert (y[y != 0] == torch.tensor(1 / (1 - p))).all()


@pytest.mark.parametrize("dtype", HIGH_PRECISION)
def test_everything_or_nothing(device, dtype):
    x = torch.randn(20, 30).to(device, dtype)
    assert torch.equal(materialize(dropped(x, seeds(device=device), 0.0)), x)
    assert not materialize(dropped(x, seeds(device=device), 1.0)).any()
    assert materialize(dropped(x, seeds(device=device), 1 - 2.0**-53)).isfinite().all()


def test_the_threshold_is_that_of_real_numbers():
    assert Dropped(dtype=torch.float32, p=0.25).threshold == 2**30
    assert Dropped(dtype=torch.float32, p=2.0**-40).threshold == 1
    assert Dropped(dtype=torch.float32, p=1.0).threshold == 2**32 - 1


def test_the_same_seed_gives_the_same_elements(device):
    x, dy = (torch.randn(40, 50, device=device) for _ in range(2))
    y, dx = (materialize(dropped(t, seeds(5, 6, device), 0.4)) for t in (x, dy))
    assert torch.equal(y == 0, dx == 0)
    part = materialize(dropped(x[:30, :20], seeds(5, 6, device), 0.4))
    assert torch.equal(part, y[:30, :20])
    for other in (seeds(5, 7, device), seeds(6, 6, device), seeds(5 + 2**40, 6, device), seeds(5, 6 + 2**40, device)):
        assert not torch.equal(materialize(dropped(x, other, 0.4)) == 0, y == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (1000, 129)])
@pytest.mark.parametrize("seed", [0, 2**40 + 5, -3])
def test_cuda_is_cpu(shape, seed):
    x = torch.randn(shape).bfloat16()
    on_gpu = materialize(dropped(x.cuda(), seeds(seed, seed, "cuda"), 0.3))
    assert torch.equal(bits(on_gpu), bits(materialize(dropped(x, seeds(seed, seed), 0.3))))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: dropped(torch.zeros(2, 3), seeds(), 1.5), r"Dropped: p must be from 0 to 1, got 1.5"),
        (lambda: dropped(torch.zeros(2, 3), seeds(), math.nan), r"Dropped: p must be from 0 to 1, got nan"),
        (lambda: dropped(torch.zeros(2, 3), seeds()[:1], 0.5), r"materialize: seed must be two int64, .* got .*\(1,\)"),
        (lambda: dropped(torch.zeros(2, 3), seeds().int(), 0.5), r"seed must be two int64, .* got \(torch.int32"),
        (lambda: dropped(torch.zeros(2), seeds(), 0.5), r"x_MK must be 2-D, got \(2,\)"),
    ],
)
def test_errors(make, text):
    with pytest.raises(ValueError, match=text):
        materialize(make())
