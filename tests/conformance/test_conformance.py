"""What every registered operator of the library keeps to, on every sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lowp.dynamo import custom_op
from lowp.formats import HIGH_PRECISION, ElementFormat
from lowp.kernels.amax import PARTIALS
from lowp.ops.op import DIRECTIONS, says_it_replays
from lowp.registration import REGISTRY
from lowp.replay import forget_all
from tests import oracle
from tests.conformance.layers import LAYERS
from tests.conformance.samples import SAMPLES, SUMS, Draw
from tests.library_ops import LIBRARY_OPS, OPERATIONS
from tests.ops.pipelines import without_replays

ROWS = 7
FP8 = [fmt.dtype for fmt in ElementFormat]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SAMPLES |= LAYERS
CALLS = [pytest.param(name, label, id=f"{name}-{label}") for name in SAMPLES for label in SAMPLES[name]]

device_and_sample = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize(("name", "label"), CALLS)]


def over_samples(test: Callable[..., None]) -> Callable[..., None]:
    """Run `test` for each device, operator and sample."""
    for mark in device_and_sample:
        test = mark(test)
    return test


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def make(name: str, label: str, device: str, rows: int = ROWS, exact: bool = False) -> tuple[Any, ...]:
    return SAMPLES[name][label].make(Draw(device, exact), rows)


def run(call: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor | None]:
    """The results, lists flattened, then the tensors among the arguments, as the call leaves copies of them.

    Random operators draw the same numbers each time.
    """
    args = mapped(copy, args)
    torch.manual_seed(0)
    results = call(*args)
    return [*flat(results), *tensors(args)]


def tensors(args: Any) -> list[Tensor]:
    """The tensors among the arguments, those of lists too."""
    return [x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, Tensor)]


def mapped(change: Callable[[Tensor], Tensor], args: Any) -> Any:
    """The arguments, with each tensor changed."""
    if isinstance(args, (tuple, list)):
        return type(args)([mapped(change, arg) for arg in args])
    return change(args) if isinstance(args, Tensor) else args


def copy(x: Tensor) -> Tensor:
    """A copy with the same strides, gaps included."""
    storage = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage().clone())
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


def flat(results: Any) -> list[Tensor | None]:
    if results is None or isinstance(results, Tensor):
        return [results]
    return [item for result in results for item in flat(result)]


def assert_same(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    """Equal bit for bit, in shape, dtype, strides and device too, Nones at the same places."""
    assert [describe(x) for x in actual] == [describe(x) for x in expected]
    for position, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if a is not None and b is not None:
            assert torch.equal(bits(a), bits(b)), f"result {position}"


def describe(x: Tensor | None) -> tuple[Any, ...] | None:
    """What a fake tensor says of a real one. A stride that is never used (of one element, of none) doesn't count."""
    if x is None:
        return None
    strides = tuple(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1) if x.numel() else ()
    return tuple(x.shape), x.dtype, strides, x.device.type


def bits(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def compiled(name: str, **options: Any) -> Callable[..., Any]:
    overload = REGISTRY[name].overload

    def call(*args: Any) -> Any:
        return overload(*args)

    return torch.compile(call, fullgraph=True, **{"backend": "aot_eager", **options})


def direct(name: str, device: str) -> Callable[..., Any]:
    """The kernel of a device, without the dispatcher."""
    return REGISTRY[name].ref if device == "cpu" else REGISTRY[name].launch


# ---- the table


def test_every_operator_has_samples():
    assert sorted(SAMPLES) == sorted(LIBRARY_OPS)


@pytest.mark.parametrize(("name", "label"), CALLS)
def test_samples_fit_the_schema(name, label):
    arguments = REGISTRY[name].overload._schema.arguments
    args = make(name, label, "cpu")
    assert len(args) == len(arguments)
    for position in SAMPLES[name][label].row_major:
        assert "Tensor" in str(arguments[position].type)


# ---- torch's own checks


@over_samples
@torch.no_grad()
def test_opcheck(name, label, device):
    args = make(name, label, device)
    utils = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(x.dtype in FP8 for x in tensors(args)):
        utils.remove("test_schema")  # its harness can't compare fp8 tensors
    torch.library.opcheck(REGISTRY[name].overload, args, test_utils=utils)


# ---- one result, whichever way it is called


@over_samples
@torch.no_grad()
def test_the_dispatcher_calls_the_kernel(name, label, device):
    args = make(name, label, device)
    assert_same(run(REGISTRY[name].overload, args), run(direct(name, device), args))


@over_samples
@torch.no_grad()
def test_torch_autocast_changes_nothing(name, label, device):
    args = make(name, label, device)
    expected = run(REGISTRY[name].overload, args)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype=dtype):
            assert_same(run(REGISTRY[name].overload, args), expected)


@over_samples
@torch.no_grad()
def test_compiled_equals_eager(name, label, device):
    args = make(name, label, device)
    expected = run(REGISTRY[name].overload, args)
    call = compiled(name)
    assert_same(run(call, args), expected)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_same(run(call, args), expected)


REPLAYED = tuple(f"{cls.__name__}_{way}" for cls in OPERATIONS if says_it_replays(cls) for way in DIRECTIONS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "label"), [call for call in CALLS if call.values[0].startswith(REPLAYED)])
@torch.no_grad()
def test_what_is_replayed_equals_an_ordinary_run(name, label, device, monkeypatch):
    """On other values each time. What leaves wgrad for later, or talks to other ranks, isn't replayed."""
    seen, replayed = [], custom_op._replayed
    monkeypatch.setattr(custom_op, "_replayed", lambda known, *args: seen.append(known) or replayed(known, *args))
    forget_all()
    given = make(name, label, device)
    for factor in (1.0, -1.0, 0.5, 2.0):
        args = mapped(lambda x, by=factor: x * by if x.dtype in HIGH_PRECISION and x.ndim > 1 else x, given)
        with without_replays():
            expected = run(direct(name, device), args)
        assert_same(run(REGISTRY[name].overload, args), expected)
    programs = [program for known in seen for program, _ in known._known.values()]
    assert any(programs) != (label.startswith("delayed") or name.endswith("collective"))


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_one_graph_serves_all_numbers_of_rows(name, device):
    label = list(SAMPLES[name])[-1]
    graphs = CompileCounter()
    call = compiled(name, dynamic=True, backend=graphs)
    for rows in (37, 2, 16, 33):  # neither the first one nor what is padded to it equals another size
        args = make(name, label, device, rows)
        assert_same(run(call, args), run(REGISTRY[name].overload, args))
        assert graphs.frame_count == 1
    for rows in (1, 0):
        args = make(name, label, device, rows)
        assert_same(run(call, args), run(REGISTRY[name].overload, args))
    assert graphs.frame_count <= 3


@pytest.mark.parametrize("name", ["cast", "BasicLinear_forward", "BasicLinear_backward_inplace"])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_inductor_equals_eager(name, device):
    args = make(name, list(SAMPLES[name])[1], device)
    assert_same(run(compiled(name, backend="inductor"), args), run(REGISTRY[name].overload, args))


# ---- inputs and outputs


@over_samples
@torch.no_grad()
def test_strided_inputs(name, label, device):
    sample, exact = SAMPLES[name][label], any(part in name for part in SUMS)
    args = make(name, label, device, exact=exact)
    expected = run(REGISTRY[name].overload, args)
    for layout in (every_other, last_axis_outermost):
        moved = [arg if position in sample.row_major else mapped(layout, arg) for position, arg in enumerate(args)]
        actual = run(REGISTRY[name].overload, tuple(moved))
        assert_same([row_major(x, exact) for x in actual], [row_major(x, exact) for x in expected])


def row_major(x: Tensor | None, sums: bool) -> Tensor | None:
    """In one layout; a sum that is 0 may be so with either sign: which GEMM runs follows from the strides."""
    if x is None:
        return None
    x = x.clone(memory_format=torch.contiguous_format)
    return x.add_(0.0) if sums and x.dtype in HIGH_PRECISION else x


def every_other(x: Tensor) -> Tensor:
    """The values of `x`, with gaps between the elements of every axis and before the first."""
    wide = torch.full([2 * size + 1 for size in x.shape], 99.0, device=x.device).to(x.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    return view.copy_(x)


def last_axis_outermost(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).contiguous().movedim(0, -1) if x.ndim > 1 else x


@over_samples
@pytest.mark.parametrize("rows", [0, 1])
@torch.no_grad()
def test_few_rows(name, label, device, rows):
    args = make(name, label, device, rows)
    expected = run(direct(name, device), args)
    assert_same(run(REGISTRY[name].overload, args), expected)
    assert_same(run(compiled(name, backend="eager"), args), expected)
    for x in expected:
        assert x is None or x.float().isfinite().all()


@over_samples
@pytest.mark.parametrize("rows", [ROWS, 0])
@torch.no_grad()
def test_every_byte_of_the_outputs_is_written(name, label, device, rows, monkeypatch):
    args = make(name, label, device, rows)
    expected = run(direct(name, device), args)
    for byte in (0xFF, 0x7C):
        with monkeypatch.context() as patch, without_replays():
            poison(patch, byte)
            actual = run(direct(name, device), args)
        assert_same(actual, expected)


def poison(patch: pytest.MonkeyPatch, byte: int) -> None:
    """Fill all memory that Python code allocates with `byte`."""
    empty = torch.empty

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            x = allocate(*args, **kwargs)
            empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).fill_(byte)
            return x

        return call

    for owner, names in (
        (torch, ("empty", "empty_like", "empty_strided", "empty_permuted")),
        (Tensor, ("new_empty", "new_empty_strided")),
    ):
        for function in names:
            patch.setattr(owner, function, poisoned(getattr(owner, function)))


@over_samples
@pytest.mark.parametrize("rows", [ROWS, 1, 0])
@torch.no_grad()
def test_the_fake_kernel_tells_shape_dtype_strides_and_device(name, label, device, rows):
    args = make(name, label, device, rows)
    with FakeTensorMode() as mode:
        fakes = mapped(mode.from_tensor, args)
        results = flat(REGISTRY[name].overload(*fakes))
    assert all(x is None or isinstance(x, FakeTensor) for x in results)
    real = flat(REGISTRY[name].overload(*args))
    assert [describe(x) for x in results] == [describe(x) for x in real]


@over_samples
@torch.no_grad()
def test_results_are_fresh_and_only_what_the_schema_says_is_changed(name, label, device):
    overload, args = REGISTRY[name].overload, make(name, label, device)
    before = mapped(copy, args)
    results = [x for x in flat(overload(*args)) if x is not None and x.numel()]
    storages = [x.untyped_storage().data_ptr() for x in results]
    assert len(set(storages)) == len(storages)
    for declared, arg, old in zip(overload._schema.arguments, args, before, strict=True):
        for x, x_before in zip(tensors([arg]), tensors([old]), strict=True):
            assert x.untyped_storage().data_ptr() not in storages
            changed = not torch.equal(bits(x), bits(x_before))
            assert changed == (declared.alias_info is not None and declared.alias_info.is_write)


# ---- the other device


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "label"), CALLS)
@pytest.mark.parametrize("rows", [ROWS, 300, 1, 0])
@torch.no_grad()
def test_cuda_equals_cpu(name, label, rows):
    if torch.Tag.nondeterministic_seeded in REGISTRY[name].overload.tags:
        return  # each device has a generator of its own
    sums = any(part in name for part in SUMS)
    actual, expected = (
        [agreed_amax(x) for x in run(REGISTRY[name].overload, make(name, label, device, rows, exact=sums))]
        for device in ("cuda", "cpu")
    )
    one_step = SAMPLES[name][label].one_step
    for a, b in zip(actual, expected, strict=True):
        if (sums or one_step) and a is not None and a.dtype in HIGH_PRECISION:  # cuBLAS may round a sum twice
            step = torch.bfloat16 if one_step else a.dtype
            bounds = {"rtol": torch.finfo(step).eps, "atol": 0.0}
            if "norm" in name.lower() and a.dtype == torch.float32 and a.shape in ((rows,), (2 * rows,)):
                bounds = {"rtol": STATISTICS, "atol": STATISTICS * 3.5}
            torch.testing.assert_close(a, b, **bounds)
        elif one_step and a is not None and a.dtype in FP8:
            assert (oracle.steps(a.view(torch.uint8), b.view(torch.uint8)) <= 1).all()
        else:
            assert_same([a], [b])


STATISTICS = torch.finfo(torch.float32).eps * (32 + 16)
"""Of means, and of 1 / std: what sums of up to 32 values, of up to 3.5, may differ by in another order, and the steps
after them."""


def agreed_amax(x: Tensor | None) -> Tensor | None:
    """On the CPU; partial maxima, of which each device makes its own number, as one."""
    if x is not None and x.dtype == torch.float32 and x.shape in ((PARTIALS,), (1,)):
        x = x.max().reshape(1)
    return None if x is None else x.cpu()
