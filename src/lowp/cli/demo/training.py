"""One recipe's model: compile it, train it from a seed, validate it, and count what torch.compile did."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowp.cli.compiling import CountingBackend, graph_breaks
from lowp.cli.demo.data import Batches, Corpus, validation_batches
from lowp.cli.demo.model import ByteModel
from lowp.cli.demo.plan import Size
from lowp.cli.machine import wait
from lowp.cli.memory import peak_memory
from lowp.recipe import Recipe

BF16 = "bf16"
"""The name of the run without a recipe."""

_CHUNK = 10  # steps timed together: a GPU is only waited for between chunks
_WARMUP = 0.1  # of all steps, the learning rate rises


@dataclass(frozen=True)
class Setting:
    """What all runs of one demo share."""

    size: Size
    corpus: Corpus
    device: torch.device
    backend: str


@dataclass
class Run:
    """What training one recipe's model from one seed gave.

    Attributes:
        recipe: its name.
        seed: of parameters and batches.
        losses: training loss of each step, bits per byte.
        bits_per_byte: validation loss; NaN if there is none.
        ms_per_step: median over chunks of steps, forward to optimizer.
    """

    recipe: str
    seed: int
    losses: list[float] = field(default_factory=list)
    bits_per_byte: float = math.nan
    ms_per_step: float = math.nan

    @property
    def finite(self) -> bool:
        """Whether every loss is a finite number."""
        return all(math.isfinite(loss) for loss in (*self.losses, self.bits_per_byte))


class Trainer:
    """A model under one recipe, compiled once and trained from any number of seeds.

    Args:
        name: of the recipe.
        recipe: of the linear layers; None: bf16.
        setting: what all runs share.

    Attributes:
        error: what torch.compile refused; empty: nothing.
        graph_breaks: that Dynamo counted; under `fullgraph=True` one ends the run.
        graphs: that the backend was handed so far: one, for training, which validation reuses, unless it recompiled.
        compile_s: seconds of the first step.
        step_s: seconds of a later step.
        peak_mib: torch's allocations in one forward and backward, above parameters.
    """

    def __init__(self, name: str, recipe: Recipe | None, setting: Setting) -> None:
        self.name = name
        self.error = ""
        self.graph_breaks = 0
        self.compile_s = self.step_s = self.peak_mib = math.nan
        self._setting = setting
        self._backend = CountingBackend(setting.backend)
        self._model = ByteModel(**setting.size.model, recipe=recipe).to(setting.device)
        self._compiled: Callable[[Tensor], Tensor] = torch.compile(self._model, backend=self._backend, fullgraph=True)

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return self._backend.graphs

    def compile(self) -> None:
        """Compile, and measure one step's time and memory. A refusal of torch.compile's ends up in `error`."""
        size, device = self._setting.size, self._setting.device
        text = self._setting.corpus.validation
        batch = validation_batches(text, size.batch, size.batch, size.sequence)[0].to(device)

        def step() -> None:
            self._compiled(batch).backward()
            self._model.zero_grad(set_to_none=True)
            wait(device)

        breaks = graph_breaks()
        try:
            self.compile_s = _seconds(step)
            self.step_s = min(_seconds(step) for _ in range(3))
            self.peak_mib = peak_memory(step, device)
        except torch._dynamo.exc.TorchDynamoException as error:
            self.error = f"{type(error).__name__}: {error}"
            self.graph_breaks = int(isinstance(error, torch._dynamo.exc.Unsupported))
        self.graph_breaks = max(self.graph_breaks, graph_breaks() - breaks)

    def train(self, seed: int, steps: int, progress: Callable[[int, float], None]) -> Run:
        """Train from a seed, and validate.

        Args:
            seed: of parameters and batches; equal seeds see equal data.
            steps: how many.
            progress: called with the number of steps done and the latest loss in bits per byte.
        """
        run = Run(self.name, seed)
        torch.manual_seed(seed)
        self._model.load_state_dict(ByteModel(**self._setting.size.model, recipe=None).state_dict())
        self._steps(run, steps, progress)
        run.bits_per_byte = self._validate()
        return run

    def _steps(self, run: Run, steps: int, progress: Callable[[int, float], None]) -> None:
        """Fill in the losses and the time of a step."""
        size = self._setting.size
        batches = Batches(self._setting.corpus.training, size.batch, size.sequence, run.seed)
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate(step, steps))
        chunk_ms: list[float] = []
        while len(run.losses) < steps:
            chunk = min(_CHUNK, steps - len(run.losses))
            started = time.perf_counter()
            losses = []
            for _ in range(chunk):
                loss = self._compiled(batches.next().to(self._setting.device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                schedule.step()
                losses.append(loss.detach())
            run.losses += [bits(loss) for loss in losses]
            chunk_ms.append((time.perf_counter() - started) / chunk * 1e3)
            progress(len(run.losses), run.losses[-1])
        run.ms_per_step = statistics.median(chunk_ms)

    def _validate(self) -> float:
        """Bits per byte on the fixed validation set, through the training graph: a second one costs its compilation."""
        size, device = self._setting.size, self._setting.device
        text = self._setting.corpus.validation
        batches = validation_batches(text, size.validation_windows, size.batch, size.sequence)
        return bits(torch.stack([self._compiled(batch.to(device)).detach() for batch in batches]).mean())


def _seconds(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth; as a share of the largest."""
    warmup = max(1, int(steps * _WARMUP))
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def bits(loss: Tensor) -> float:
    """Nats as bits."""
    return float(loss) / math.log(2)
