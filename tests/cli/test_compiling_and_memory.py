"""Peak memory of a step on a CPU, and what the compiler was handed."""

import pytest
import torch

from lowp.cli.compiling import CountingBackend, forget_compiled, graph_breaks, pick_backend
from lowp.cli.memory import MIB, peak_memory

CPU = torch.device("cpu")


def test_peak_counts_what_is_held_at_one_time():
    def step():
        a = torch.empty(2 * MIB, dtype=torch.uint8)
        b = torch.empty(3 * MIB, dtype=torch.uint8)
        del a
        c = torch.empty(MIB, dtype=torch.uint8)
        del b, c

    assert peak_memory(step, CPU) == pytest.approx(5.0, abs=0.01)


def test_peak_is_above_the_resting_state():
    held = torch.empty(8 * MIB, dtype=torch.uint8)
    assert peak_memory(lambda: held.add_(1), CPU) < 0.01


def test_profiling_leaves_stderr_alone(capfd):
    peak_memory(lambda: torch.empty(1), CPU)
    assert capfd.readouterr().err == ""


def test_graphs_are_counted():
    forget_compiled()
    backend = CountingBackend("aot_eager")
    function = torch.compile(lambda x: x * 2, backend=backend, fullgraph=True, dynamic=False)
    for size in (2, 2, 3):
        function(torch.zeros(size))
    assert backend.graphs == 2
    assert graph_breaks() == 0


def test_graph_breaks_are_counted():
    forget_compiled()

    @torch.compile(backend="aot_eager")
    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    broken(torch.zeros(2))
    assert graph_breaks() == 1
    forget_compiled()
    assert graph_breaks() == 0


@pytest.mark.parametrize(("patience_s", "name"), [(60.0, "inductor"), (-1.0, "aot_eager")])
def test_a_slow_compiler_means_aot_eager(monkeypatch, patience_s, name):
    monkeypatch.setattr(torch, "compile", lambda function, backend: function)
    assert pick_backend(CPU, "auto", patience_s).name == name


def test_no_compiler_means_aot_eager(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", fail)
    picked = pick_backend(CPU)
    assert picked.name == "aot_eager"
    assert "no compiler here" in picked.reason
