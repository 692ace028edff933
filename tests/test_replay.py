"""What a replay's key is made of, and what is remembered: see tests/ops/test_replay.py for pipelines."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowp.replay import Replays, forget_all, layouts


class Counted:
    """A function of tensors that counts its calls, and its replays."""

    def __init__(self, most: int = 64) -> None:
        self.replays, self.calls = Replays(most), 0

    def __call__(self, *tensors: Tensor) -> Tensor:
        def run() -> tuple[Tensor, tuple[()]]:
            self.calls += 1
            total = tensors[0] * 2
            for tensor in tensors[1:]:
                total = total + tensor
            return total, ()

        return self.replays.run(run, list(tensors), layouts(tensors))[0]


def test_the_third_call_is_a_replay():
    function = Counted()
    for _ in range(4):
        x = torch.randn(3)
        assert torch.equal(function(x), x * 2)
    assert function.calls == 2


def test_every_tensors_device_counts():
    x = torch.randn(3)
    assert layouts((x, x)) != layouts((x, x.to("meta")))
    assert layouts((x, None)) != layouts((x, x))
    assert layouts((None, x)) is not None


def test_what_has_no_layout():
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(3))
        assert layouts((torch.randn(3),)) is None, "a mode wants to see all"
    for tensors in ((), (None,), (fake,), (torch.randn(3), torch.nn.Buffer(torch.randn(3)), fake)):
        assert layouts(tensors) is None


def test_tensors_without_storage_of_their_own_have_no_layout():
    left: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        left.append(x)
        return x.sum()

    torch.func.grad(keep)(torch.randn(3))
    for tensor in (left[0], torch.eye(3).to_sparse()):
        assert layouts((tensor,)) is None


def test_hooks_of_launches_want_to_see_all():
    triton = pytest.importorskip("triton")
    chain, heard = triton.knobs.runtime.launch_enter_hook, []
    chain.add(heard.append)
    try:
        assert layouts((torch.randn(3),)) is None
    finally:
        chain.remove(heard.append)
    assert layouts((torch.randn(3),)) is not None


def test_the_layout_seen_first_makes_room():
    function = Counted(most=2)
    for size in (1, 1, 1, 2, 2, 2):
        function(torch.randn(size))
    assert function.calls == 4
    for size in (3, 3, 3, 2):
        function(torch.randn(size))
    assert function.calls == 6, "of 3, not of 2"
    function(torch.randn(1))
    assert function.calls == 7
    assert len(function.replays._known) == 2


def test_forget_all():
    function = Counted()
    for _ in range(3):
        function(torch.randn(3))
    forget_all()
    function(torch.randn(3))
    assert function.calls == 3


def test_a_tensor_given_twice():
    """It isn't recorded, and takes the program of two tensors."""
    function = Counted()
    for _ in range(4):
        x = torch.randn(3)
        assert torch.equal(function(x, x), x * 2 + x)
    assert function.calls == 4
    for _ in range(2):
        x, y = torch.randn(2, 3).unbind()
        x, y = x.clone(), y.clone()
        assert torch.equal(function(x, y), x * 2 + y)
    assert function.calls == 5
    x = torch.randn(3)
    assert torch.equal(function(x, x), x * 2 + x)
    assert function.calls == 5


def test_recording_keeps_nothing_alive():
    x, died = torch.randn(3), []

    def run() -> tuple[Tensor, tuple[()]]:
        between = x * 2
        reference = weakref.ref(between)
        result = between + 1
        del between
        died.append(reference() is None)
        return result, ()

    replays = Replays()
    for _ in range(3):
        (result, _) = replays.run(run, [x], layouts((x,)))
        assert torch.equal(result, x * 2 + 1)
    assert died == [True, True]


@pytest.mark.gpu
def test_nothing_is_recorded_while_a_graph_is_captured():
    function, x = Counted(), torch.randn(3, device="cuda")
    function(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(x)
    x.fill_(2.0)
    graph.replay()
    assert torch.equal(result, x * 2)
    function(x)
    assert function.calls == 3
    assert torch.equal(function(x), x * 2)
    assert function.calls == 3
