"""Peak memory of one step, above the resting state: what torch's own allocators hand out, on either device.

On a GPU the caching allocator keeps the peak. On a CPU torch's profiler records each allocation and each release of
one step, and the peak is the largest running sum: it leaves out what libraries allocate on their own, and the
interpreter.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

MIB = 2**20


def peak_memory(step: Callable[[], object], device: torch.device) -> float:
    """Run `step` once and measure it.

    Args:
        step: what to run; it must have run before, so that nothing is compiled in it.
        device: where it allocates.

    Returns:
        The largest amount of memory held at one time during the step beyond what was held before it, in MiB.
    """
    return _peak_cuda(step, device) if device.type == "cuda" else _peak_cpu(step)


def _peak_cuda(step: Callable[[], object], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    resting = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - resting) / MIB


def _peak_cpu(step: Callable[[], object]) -> float:
    with _quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        step()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / MIB


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Keep out the lines that torch's profiler (2.13) writes to file descriptor 2 whatever its log level."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123  a device, not a path
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
