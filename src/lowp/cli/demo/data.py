"""The text: the source files of the running Python's own standard library, as bytes.

    file -> validation  if sha256(relative path) starts with a byte below `VALIDATION_SHARE` * 256, else training

A file's side depends on its name alone: no seed, no order, and no file on both sides.

Shape legend: B = sequences of a batch, S = bytes of a sequence.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

import torch
from torch import Tensor

from lowp.errors import require

VALIDATION_SHARE = 1 / 16
END_OF_FILE = b"\0"
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}
"""Folders left out: what was installed, and what some distributions of Python leave out too."""


@dataclass(frozen=True)
class Corpus:
    """Both sides of the text.

    Attributes:
        training: `[bytes]` uint8, all training files one after the other.
        validation: `[bytes]` uint8, likewise.
        training_files: how many files that is.
        validation_files: likewise.
        digest: of both sides, so that two results can be told to be of the same text.
    """

    training: Tensor
    validation: Tensor
    training_files: int
    validation_files: int
    digest: str


def standard_library() -> Path:
    """Where the running Python keeps its own source files.

    Raises:
        ValueError: they are not there as files.
    """
    folders = [Path(path) for path in (sysconfig.get_path("stdlib"), str(Path(os.__file__).parent)) if path]
    found = next((folder for folder in folders if any(folder.glob("*.py"))), None)
    require(found is not None, "demo", "the standard library must be there as .py files", got=[str(f) for f in folders])
    return found  # type: ignore[return-value]


def source_files(root: Path) -> list[PurePath]:
    """The .py files under `root` that are part of the text, as sorted relative paths."""
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(path for path in files if not _SKIPPED & set(path.parts))


def is_validation(path: PurePath) -> bool:
    """Whether a file is on the validation side, from its relative path alone."""
    return hashlib.sha256(path.as_posix().encode()).digest()[0] < VALIDATION_SHARE * 256


@functools.cache
def load_corpus(root: Path | None = None) -> Corpus:
    """Read the text.

    Args:
        root: folder of source files; the standard library's by default.

    Raises:
        ValueError: one side has no files.
    """
    root = root or standard_library()
    files = source_files(root)
    validation = [path for path in files if is_validation(path)]
    training = [path for path in files if not is_validation(path)]
    require(bool(validation and training), "demo", "both sides must have files", got=(len(training), len(validation)))
    sides = [_read(root, side) for side in (training, validation)]
    return Corpus(
        _as_tensor(sides[0]),
        _as_tensor(sides[1]),
        len(training),
        len(validation),
        hashlib.sha256(b"".join(sides)).hexdigest()[:16],
    )


def _read(root: Path, files: Iterable[PurePath]) -> bytes:
    return b"".join((root / path).read_bytes() + END_OF_FILE for path in files)


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Batches:
    """Training batches: windows at random places, the same for equal seeds.

    Args:
        text: `[bytes]` uint8.
        batch: B.
        sequence: S.
        seed: of the places.
    """

    def __init__(self, text: Tensor, batch: int, sequence: int, seed: int) -> None:
        self._text = text
        self._batch = batch
        self._sequence = sequence
        self._places = torch.Generator().manual_seed(seed)

    def next(self) -> Tensor:
        """One batch: `[B, S + 1]` int64, inputs and targets overlapping by S - 1."""
        starts = torch.randint(len(self._text) - self._sequence, (self._batch,), generator=self._places)
        return _windows(self._text, starts, self._sequence)


def validation_batches(text: Tensor, windows: int, batch: int, sequence: int) -> list[Tensor]:
    """The fixed validation set: `windows` windows, evenly spaced over the text.

    Args:
        text: `[bytes]` uint8.
        windows: how many; a multiple of `batch`.
        batch: B.
        sequence: S.

    Returns:
        Batches of `[B, S + 1]` int64.
    """
    starts = torch.linspace(0, len(text) - sequence - 1, windows, dtype=torch.float64).long()
    return list(_windows(text, starts, sequence).split(batch))


def _windows(text: Tensor, starts: Tensor, sequence: int) -> Tensor:
    return text[starts[:, None] + torch.arange(sequence + 1)].long()
