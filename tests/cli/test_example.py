"""The demo's model and the same in torch.nn alone: equal values, and a short difference that is kept up to date."""

import difflib

import pytest
import torch

from lowp.cli.demo import model as lowp_model
from tests.scripts import ROOT, load

TORCH, LOWP = "examples/byte_model_torch.py", "src/lowp/cli/demo/model.py"
SIZE = {"layers": 2, "width": 64, "heads": 4, "hidden": 96, "sequence": 32}


def difference():
    """What byte_model.diff must hold."""
    before, after = ((ROOT / name).read_text().splitlines(keepends=True) for name in (TORCH, LOWP))
    return "".join(difflib.unified_diff(before, after, TORCH, LOWP))


def test_the_difference_is_as_filed():
    filed = (ROOT / "examples/byte_model.diff").read_text()
    assert filed == difference(), "write it again: python -m tests.cli.test_example > examples/byte_model.diff"


def test_the_difference_is_short():
    changed = [line for line in difference().splitlines()[2:] if line[0] in "+-"]
    total = len((ROOT / LOWP).read_text().splitlines())
    assert len(changed) < total / 2


def loss_and_gradients(model, bytes_BS):
    loss = model(bytes_BS)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("autocast", [False, True])
def test_it_computes_what_torch_computes(autocast, monkeypatch):
    """In fp32 but for the order of sums of up to 256 terms; in bf16, as `forward` asks for, but for a few roundings."""
    bound = 2 * torch.finfo(torch.bfloat16).eps if autocast else 32 * torch.finfo(torch.float32).eps
    if not autocast:
        real = torch.autocast
        monkeypatch.setattr(torch, "autocast", lambda device, **options: real(device, enabled=False))
    torch.manual_seed(0)
    models = load(TORCH).ByteModel(**SIZE), lowp_model.ByteModel(**SIZE)
    with torch.no_grad():
        for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            ours.copy_(theirs)
    bytes_BS = torch.randint(256, (2, 33))
    (expected, grads), (actual, own) = (loss_and_gradients(model, bytes_BS) for model in models)
    torch.testing.assert_close(actual, expected, rtol=bound, atol=0)
    for ours, theirs in zip(own, grads, strict=True):
        assert (ours - theirs).norm() <= bound * theirs.norm()


if __name__ == "__main__":
    print(difference(), end="")  # noqa: T201
