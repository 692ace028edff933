"""Device time of a call, without the host's: from replays of a CUDA graph of several calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CALLS = 10
ROUNDS = 30


def device_ms(*calls: Callable[[], Any]) -> list[float]:
    """Median milliseconds of each call; they take turns, so that clocks and heat are the same for all."""
    graphs = [_captured(call) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for graph, measured in zip(graphs, times, strict=True):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            measured.append(start.elapsed_time(stop) / CALLS)
    return [sorted(measured)[len(measured) // 2] for measured in times]


def _captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):  # compiled; recorded and replayed, where eager calls are
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph
