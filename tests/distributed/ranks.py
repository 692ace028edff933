"""Processes that run functions for the tests: two, all tests of a session in the same, or more.

    with Ranks("gloo") as ranks:
        results = ranks(function, *args, **kwargs)      one result a rank; functions are imported by name over there

Inside a function `world()` is the group of all ranks, `alone()` the group of this rank only, `device()` its device.
A rank that raises fails the test with its traceback; ranks that hang are ended after `TIMEOUT` seconds.
"""

from __future__ import annotations

import datetime as dt
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD_SIZE = 2
"""Of the processes that most tests share."""
TIMEOUT = 240
"""Seconds that one function may take, on a busy machine."""
COLLECTIVE_TIMEOUT = 120
"""Seconds after which a collective that not all ranks joined raises."""
_GRACE = 10
_IGNORED = {
    "`torch.jit.script_method`": DeprecationWarning,
    "<class 'torch.autograd.function.Function'>": DeprecationWarning,
    "The .grad attribute of a Tensor that is not a leaf": UserWarning,
}
"""Torch's own warnings at compile time: those that pyproject.toml lists, and Dynamo's on an input with a history."""

_groups: dict[str, dist.ProcessGroup] = {}
_device = torch.device("cpu")


def world() -> dist.ProcessGroup:
    """The group of all ranks."""
    return _groups["world"]


def alone() -> dist.ProcessGroup:
    """A group of this rank only."""
    return _groups["alone"]


def rank() -> int:
    """This process's place among all ranks."""
    return dist.get_rank()


def device() -> torch.device:
    """This rank's device."""
    return _device


def message(function: Callable[..., Any], *args: Any) -> str:
    """The text of the exception that a call raises."""
    try:
        function(*args)
    except (ValueError, NotImplementedError, torch._dynamo.exc.Unsupported) as error:
        return str(error)
    return "nothing was raised"


class Ranks:
    """The processes, started at the first call and again after a failure that may have left one waiting."""

    def __init__(self, backend: str, world_size: int = WORLD_SIZE) -> None:
        self.backend, self.world_size = backend, world_size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder = ""

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        for connection in self._connections:
            connection.send(None)
        self._end(patience=_GRACE)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `function` on all ranks; its arguments and results cross as pickles of plain values.

        Raises:
            AssertionError: a rank raised, with its traceback, or did not answer in time.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args, kwargs))
        answers = self._answers()
        failures = [f"rank {index}: {answer[1]}" for index, answer in enumerate(answers) if answer[0] != "ok"]
        if failures:
            self._end(patience=0)
            raise AssertionError("\n".join(failures))
        return [answer[1] for answer in answers]

    def _answers(self) -> list[tuple[str, Any]]:
        answers: list[tuple[str, Any]] = [("hung", f"no answer after {TIMEOUT} s")] * self.world_size
        waiting = {connection: index for index, connection in enumerate(self._connections)}
        deadline = time.monotonic() + TIMEOUT
        while waiting and time.monotonic() < deadline:
            for ready in wait(list(waiting), max(0.0, deadline - time.monotonic())):
                index = waiting.pop(ready)  # type: ignore[call-overload]
                try:
                    answers[index] = ready.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[index] = ("died", "the process ended")
                if answers[index][0] != "ok":
                    deadline = min(deadline, time.monotonic() + _GRACE)  # the others may wait for this one
        return answers

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.mkdtemp()
        store = Path(self._folder) / "store"
        for index in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = theirs, index, self.world_size, str(store), self.backend
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def _end(self, patience: float) -> None:
        for process in self._processes:
            process.join(patience)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(connection: Connection, index: int, world_size: int, store: str, backend: str) -> None:
    global _device
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for text, category in _IGNORED.items():
        warnings.filterwarnings("ignore", text, category)
    if backend == "nccl":
        _device = torch.device("cuda", index)
        torch.cuda.set_device(_device)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),
        rank=index,
        world_size=world_size,
        timeout=dt.timedelta(seconds=COLLECTIVE_TIMEOUT),
        device_id=_device if backend == "nccl" else None,
    )
    _groups["world"] = dist.group.WORLD
    _groups["alone"] = [dist.new_group([one]) for one in range(world_size)][index]
    while (call := connection.recv()) is not None:
        function, args, kwargs = call
        torch.manual_seed(0)
        try:
            connection.send(("ok", function(*args, **kwargs)))
        except Exception:
            connection.send(("raised", traceback.format_exc()))
        finally:
            torch.compiler.reset()
    dist.destroy_process_group()
