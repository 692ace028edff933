"""A recorded function and its program give the same results, and what can't be replayed is refused."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from lowp.kernels.amax import amax
from lowp.kernels.cast import cast
from lowp.recipe import Float8CurrentScaling
from lowp.tape import Tape, active_tape
from tests.ops.conftest import DEVICES

QUANTIZER = Float8CurrentScaling().quantizer("input")


def record(function, *tensors):
    tape = Tape(tensors)
    with torch.no_grad(), tape:
        results = function(*tensors)
    return results, tape.program(results)


def quantized(x):
    row, column, scale = cast(x, amax(x), QUANTIZER, row=True, column=True)
    return row.view(torch.uint8), column.view(torch.uint8), scale, x.t().reshape(-1)


@pytest.mark.parametrize("device", DEVICES)
def test_a_program_gives_what_the_function_gives_on_other_values(device):
    x, other = (torch.randn(33, 48, device=device, dtype=torch.bfloat16) for _ in range(2))
    results, program = record(quantized, x)
    assert program is not None
    for given in (x, other):
        with torch.no_grad():
            for found, expected in zip(program([given]), quantized(given), strict=True):
                assert torch.equal(found, expected)
                assert found.stride() == expected.stride()
    assert torch.equal(results[0], quantized(x)[0])


def test_nested_results_absent_ones_and_arguments():
    x, y = torch.ones(3), torch.zeros(3)
    _, program = record(lambda x, y: (x, None, ((x + y, []),)), x, y)
    assert program is not None
    same, none, ((total, empty),) = program([y, y + 2])
    assert same is y
    assert none is None
    assert torch.equal(total, y + 2)
    assert empty == []


def test_results_in_place_and_several_at_once():
    def function(x):
        first, second = x.split(2)
        return first.clone().add_(second).mul_(3)

    x = torch.arange(4.0)
    result, program = record(function, x)
    assert program is not None
    assert torch.equal(result, torch.tensor([6.0, 12.0]))
    assert torch.equal(program([x + 1]), torch.tensor([12.0, 18.0]))


OUTSIDE = torch.ones(3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + OUTSIDE,
        lambda x: OUTSIDE,
        lambda x: x * float(x.sum()),
        lambda x: x[x > 0],
        lambda x: {"y": x},
        lambda x: torch.ops.lowp_test_tape.twice(x) * 1,
    ],
    ids=["a tensor from outside", "another result", "a value", "a size that depends on values", "a dict", "foreign"],
)
def test_what_depends_on_more_than_layouts_is_refused(function):
    with torch.library._scoped_library("lowp_test_tape", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CPU")
        assert record(function, torch.ones(3))[1] is None


def test_a_program_holds_no_tensor_of_its_recording():
    x = torch.ones(3)
    watch = weakref.ref(x)
    result, program = record(lambda x: x * 2, x)
    made = weakref.ref(result)
    del x, result
    gc.collect()
    assert watch() is None
    assert made() is None
    assert torch.equal(program([torch.ones(3)]), torch.full((3,), 2.0))


def test_a_program_frees_what_nothing_reads_any_more():
    def function(x):
        return ((x + 1) * 2).sum()

    x = torch.ones(3)
    _, program = record(function, x)
    alive = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            alive.append(sum(watch() is not None for watch in made))
            result = func(*args, **(kwargs or {}))
            made.append(weakref.ref(result))
            return result

    made: list = []
    with Count():
        program([x])
    assert alive == [0, 1, 1]


def test_the_tape_is_active_inside_only():
    tape = Tape([])
    with tape:
        with tape:
            pass
        assert active_tape() is tape
    assert active_tape() is None


@pytest.mark.parametrize(
    "allocate",
    [
        lambda x: x.new_empty(3, 5, dtype=torch.float16),
        lambda x: torch.empty(2, 3, 4, 5, memory_format=torch.channels_last),
        lambda x: torch.empty_strided((3, 4), (1, 3), dtype=torch.uint8),
        lambda x: torch.empty_like(x.t()),
        lambda x: x.new_empty(0, 4),
        lambda x: x.new_empty((), device="meta"),
    ],
)
def test_allocations_are_those_that_were_recorded(allocate):
    x = torch.randn(4, 6)
    with (tape := Tape([x])):
        result = allocate(x)
    found, expected = tape.program(result)([x]), allocate(x)
    for fact in (torch.Tensor.size, torch.Tensor.stride, lambda t: t.dtype, lambda t: t.device):
        assert fact(found) == fact(expected)


def test_a_matrix_that_is_read_transposed_alone_is_allocated_so():
    def function(x):
        turned, read, given = torch.empty(2, 3), torch.empty(2, 3), torch.empty(2, 3)
        y = turned.t().copy_(x)
        read.fill_(1)
        z = read.t() + x
        return y, z, given, given.t().copy_(x)

    (results, program), x = record(function, torch.randn(3, 2)), torch.randn(3, 2)
    found, expected = program([x]), function(x)
    for replayed, ordinary, recorded in zip(found, expected, results, strict=True):
        assert torch.equal(replayed, ordinary)
        assert replayed.stride() == ordinary.stride() == recorded.stride()
    assert expected[0]._is_view()
    assert not found[0]._is_view()
    assert not found[2]._is_view(), "a result that was no view is none"
    assert found[3]._base is found[2]


def test_kernels_take_the_address_of_a_matrix_that_is_allocated_transposed(monkeypatch):
    monkeypatch.setattr("lowp.tape.current_cuda_stream", lambda device: 9)
    x, launches = torch.ones(3, 3), []
    tape = Tape([x])
    with tape:
        made = torch.empty(3, 3)
        tape.launched(lambda *args: launches.append(args), (), (), 0, (made, (made, x)))
        result = made.t() * 0
        tape.launched(lambda *args: launches.append(args), (), (), 0, (made,))
    assert tape.program(result)([x]).stride() == (1, 3)
    address = launches[1][1]
    assert launches == [(9, address, (address, x.data_ptr())), (9, address)]


def test_a_launch_takes_the_way_that_it_is_given(monkeypatch):
    monkeypatch.setattr("lowp.tape.current_cuda_stream", lambda device: 9)
    x, launches = torch.ones(3), []
    tape = Tape([x])
    with tape:
        tape.launched(lambda *args: launches.append(args), (2, 1, 1), (7, (4, 1)), 0, (x, (x, 3), None, 5))
    tape.program(None)([x])
    assert launches == [(2, 1, 1, 9, 7, (4, 1), x.data_ptr(), (x.data_ptr(), 3), None, 5)]


def test_facts_of_dtypes_are_constants():
    def function(x):
        return x.to(torch.promote_types(x.dtype, torch.float64))

    (result, program), x = record(function, torch.randn(3)), torch.randn(3)
    assert result.dtype == torch.float64
    assert torch.equal(program([x]), x.double())
