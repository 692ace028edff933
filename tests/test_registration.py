"""Registered operators: which way a call takes, autocast, devices, names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowp.registration import REGISTRY, register
from tests.library_ops import LIBRARY_OPS

CALLS: list[tuple[str, bool]] = []
"""Kernels that ran, and whether torch.autocast was on inside."""


def _ref(x: Tensor, scale: float) -> Tensor:
    CALLS.append(("ref", torch.is_autocast_enabled("cpu")))
    return x * scale


def _launch(x: Tensor, scale: float) -> Tensor:
    CALLS.append(("launch", torch.is_autocast_enabled("cuda")))
    return x * scale


def _allocate(x: Tensor, scale: float) -> Tensor:
    CALLS.append(("allocate", False))
    return torch.empty_like(x)


def _sum(tensors: list[Tensor], scale: float) -> Tensor:
    CALLS.append(("sum", torch.is_autocast_enabled("cpu")))
    return torch.stack(list(tensors)).sum(0) * scale


toy_sum = register("toy_sum(Tensor[] xs, float scale) -> Tensor", ref=_sum, launch=_sum, allocate=_sum)
toy_scale = register("toy_scale(Tensor x, float scale) -> Tensor", ref=_ref, launch=_launch, allocate=_allocate)


class Recorder(TorchDispatchMode):
    """The operators that went through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], bool]:
    """Whether a call of `toy_scale` goes through the dispatcher."""
    seen = []
    call = torch._ops.OpOverload.__call__
    monkeypatch.setattr(torch._ops.OpOverload, "__call__", lambda self, *args: seen.append(self) or call(self, *args))

    def dispatched(x: Tensor) -> bool:
        seen.clear()
        toy_scale(x, 2.0)
        return REGISTRY["toy_scale"].overload in seen

    return dispatched


def test_a_call_without_gradients_goes_straight_to_the_kernel(dispatched):
    x = torch.ones(3)
    assert dispatched(x)
    with torch.no_grad():
        assert not dispatched(x)
        assert not dispatched(torch.nn.Parameter(x))
    with torch.inference_mode():
        assert not dispatched(x)
    assert [name for name, _ in CALLS] == ["ref"] * 4


@torch.no_grad()
def test_dispatch_modes_see_the_operator():
    with Recorder() as recorder:
        toy_scale(torch.ones(3), 2.0)
    assert "lowp.toy_scale.default" in recorder.seen


@torch.no_grad()
def test_fake_tensors_run_the_fake_kernel():
    with FakeTensorMode():
        y = toy_scale(torch.ones(3, 4), 2.0)
    assert y.shape == (3, 4)
    assert CALLS == [("allocate", False)]


class Wrapper(torch.Tensor):
    """A tensor around another one, which notes the operators that are called on it."""

    inner: Tensor
    seen: list[str]

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        self.inner, self.seen = inner, []
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args[0].seen.append(str(func))
        return func(*[arg.inner if isinstance(arg, Wrapper) else arg for arg in args], **(kwargs or {}))


@torch.no_grad()
def test_tensor_subclasses_see_the_operator():
    x = Wrapper(torch.ones(3))
    assert torch.equal(toy_scale(x, 2.0), torch.full((3,), 2.0))
    assert x.seen == ["lowp.toy_scale.default"]


@torch.no_grad()
def test_transforms_see_the_operator():
    y = torch.func.functionalize(lambda x: toy_scale(x, 2.0))(torch.ones(3))
    assert torch.equal(y, torch.full((3,), 2.0))


@pytest.mark.parametrize("grad", [True, False])
def test_meta_tensors_run_the_fake_kernel(grad):
    with torch.set_grad_enabled(grad):
        y = toy_scale(torch.ones(3, 4, device="meta"), 2.0)
    assert y.shape == (3, 4)
    assert y.is_meta
    assert CALLS == [("allocate", False)]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_kernels_run_with_torch_autocast_off(grad, compiled):
    torch.compiler.reset()
    call = toy_scale
    if compiled:
        call = torch.compile(toy_scale, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16):
        y = call(torch.ones(3), 2.0)
    assert y.dtype == torch.float32
    assert CALLS[-1] == ("ref", False)


# ---- lists of tensors


def test_a_list_of_tensors_goes_straight_to_the_kernel(dispatched):
    xs = (torch.ones(3), torch.nn.Parameter(torch.ones(3)))
    with torch.no_grad():
        assert torch.equal(toy_sum(xs, 2.0), torch.full((3,), 4.0))
        with Recorder() as recorder:
            toy_sum(xs, 2.0)
    assert "lowp.toy_sum.default" in recorder.seen
    assert len(CALLS) == 2


@torch.no_grad()
def test_a_subclass_in_a_list_sees_the_operator():
    class Seen(Wrapper):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            inner = [x.inner if isinstance(x, Wrapper) else x for x in args[0]]
            return func(inner, *args[1:])

    assert torch.equal(toy_sum((torch.ones(3), Seen(torch.ones(3))), 2.0), torch.full((3,), 4.0))


@pytest.mark.parametrize("grad", [True, False])
def test_a_list_of_tensors_under_torch_autocast(grad):
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16):
        toy_sum((torch.ones(3), torch.ones(3)), 2.0)
    assert CALLS == [("sum", False)]


def test_a_list_of_tensors_comes_first():
    kernels = {"ref": _sum, "launch": _sum, "allocate": _sum}
    with pytest.raises(ValueError, match=r"^lowp::toy_last: a list of tensors must be the first argument, got"):
        register("toy_last(Tensor x, Tensor[] xs) -> Tensor", **kernels)
    assert "toy_last" not in REGISTRY


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match=r"^register: each operator has its own name, got lowp::toy_scale again\. "):
        register("toy_scale(Tensor x, float scale) -> Tensor", ref=_ref, launch=_launch, allocate=_allocate)


@pytest.mark.parametrize("name", ["mode", "_mutable_op", "_all_bases"])
def test_names_that_functionalization_uses_are_refused_in_mutating_operators(name):
    kernels = {"ref": _ref, "launch": _launch, "allocate": _allocate}
    with pytest.raises(ValueError, match=rf"^lowp::toy_reserved: arguments .*, got \['{name}'\]"):
        register(f"toy_reserved(Tensor(a!) x, float {name}) -> ()", **kernels)
    assert "toy_reserved" not in REGISTRY
    register(f"toy_reads_{name}(Tensor x, float {name}) -> Tensor", **kernels)


def test_the_registry_holds_every_operator_of_the_namespace():
    names = {
        schema.name.removeprefix("lowp::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("lowp::")
    }
    assert set(LIBRARY_OPS) <= names
    assert names == set(REGISTRY)
