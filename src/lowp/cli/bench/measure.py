"""How things are timed: variants take turns in rounds, and each one's time is the median of its rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lowp.cli.machine import wait

Step = Callable[[], object]
Timer = Callable[[Step, int], float]
"""`(step, iterations) -> seconds of one step`."""


class Effort(NamedTuple):
    """How much is measured.

    Attributes:
        warmup: steps before anything is timed.
        rounds: turns that every variant gets.
        iterations: steps of a turn.
    """

    warmup: int
    rounds: int
    iterations: int


DEVICE_EFFORT = Effort(warmup=5, rounds=7, iterations=10)
HOST_EFFORT = Effort(warmup=30, rounds=7, iterations=100)
QUICK_EFFORT = Effort(warmup=1, rounds=1, iterations=1)


def interleave(steps: Mapping[str, Step], timer: Timer, effort: Effort) -> dict[str, float]:
    """Time all steps in turns, so that a change of clocks or of other load meets them alike.

    Args:
        steps: name -> what to time, warm already.
        timer: measures one turn.
        effort: how much.

    Returns:
        name -> seconds of a step, median over rounds.
    """
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(effort.rounds):
        for name, step in steps.items():
            turns[name].append(timer(step, effort.iterations))
    return {name: statistics.median(times) for name, times in turns.items()}


def wall_timer(device: torch.device) -> Timer:
    """Wall time until the device is done."""

    def timer(step: Step, iterations: int) -> float:
        wait(device)
        started = time.perf_counter()
        for _ in range(iterations):
            step()
        wait(device)
        return (time.perf_counter() - started) / iterations

    return timer


def device_timer(device: torch.device) -> Timer:
    """Time between two events on a GPU's stream; wall time on a CPU."""
    if device.type != "cuda":
        return wall_timer(device)

    def timer(step: Step, iterations: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(iterations):
            step()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / iterations / 1e3

    return timer


def without_host_time(step: Step, device: torch.device) -> Step:
    """The same device work as a CUDA graph, for kernels that are shorter than their launch."""
    if device.type != "cuda":
        return step
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return _Recorded(graph, step)


@dataclass(frozen=True)
class _Recorded:
    """A step's graph, with the step, which holds the tensors that the graph reads."""

    graph: torch.cuda.CUDAGraph
    step: Step

    def __call__(self) -> None:
        self.graph.replay()
