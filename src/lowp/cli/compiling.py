"""torch.compile as the command line uses it: which backend this machine has, and how many graphs it was handed."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters


class Backend(NamedTuple):
    """A backend of torch.compile.

    Attributes:
        name: "inductor" or "aot_eager".
        reason: why this one, as a phrase.
    """

    name: str
    reason: str


def pick_backend(device: torch.device, wanted: str = "auto", patience_s: float = math.inf) -> Backend:
    """Inductor where it can generate code on this machine, else aot_eager: the same graphs, run op by op.

    Args:
        device: where the code will run.
        wanted: "auto" tries Inductor on one addition; anything else is taken as it is.
        patience_s: seconds that the addition may take to compile.
    """
    started = time.perf_counter()
    if wanted != "auto":
        return Backend(wanted, "asked for")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Inductor says when it is first imported
            torch.compile(_add_one, backend="inductor")(torch.zeros(8, device=device))
    except Exception as error:  # any failure means that there is no compiler to use
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Backend("aot_eager", f"Inductor finds no working compiler ({lines[0][:100]})")
    seconds = time.perf_counter() - started
    if seconds > patience_s:
        return Backend("aot_eager", f"Inductor's compiler took {seconds:.0f} s for one addition")
    return Backend("inductor", "it found a compiler")


def _add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class CountingBackend:
    """A backend that counts the graphs that Dynamo hands to it.

    Args:
        name: of the backend that compiles them.

    Attributes:
        graphs: how many so far; a training and an inference graph count as two, a recompilation as one more.
    """

    def __init__(self, name: str) -> None:
        self._compile: Callable[..., Any] = lookup_backend(name)
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
        """Count, and compile."""
        self.graphs += 1
        return self._compile(graph, example_inputs, **kwargs)


def forget_compiled() -> None:
    """Drop all compiled code and zero Dynamo's counters."""
    torch._dynamo.reset()
    counters.clear()


def graph_breaks() -> int:
    """Graph breaks that Dynamo counted since `forget_compiled`."""
    return sum(counters["graph_break"].values())
