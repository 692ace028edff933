"""The text: split by file name, the same for equal seeds, never the same file on both sides."""

import math
from pathlib import PurePath

import pytest
import torch

from lowp.cli.demo.data import (
    VALIDATION_SHARE,
    Batches,
    is_validation,
    load_corpus,
    source_files,
    standard_library,
    validation_batches,
)


def test_every_file_of_the_standard_library_is_on_one_side():
    files = source_files(standard_library())
    validation = {path for path in files if is_validation(path)}
    training = set(files) - validation
    assert len(files) == len(set(files))
    assert not training & validation
    share, deviation = len(validation) / len(files), math.sqrt(VALIDATION_SHARE / len(files))
    assert abs(share - VALIDATION_SHARE) < 4 * deviation


@pytest.mark.parametrize(
    ("path", "validation"),  # sha256 of the path starts with a byte below 16, or not
    [("copyreg.py", True), ("concurrent/futures/process.py", True), ("os.py", False), ("json/decoder.py", False)],
)
def test_the_split_depends_on_the_path_alone(path, validation):
    assert is_validation(PurePath(path)) == validation


def test_corpus_holds_each_file_once(tmp_path):
    names = [f"module_{index}.py" for index in range(64)]
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("installed")
    for name in names:
        (tmp_path / name).write_text(f"<{name}>")
    corpus = load_corpus(tmp_path)
    sides = [bytes(side.tolist()).decode() for side in (corpus.training, corpus.validation)]
    for name in names:
        assert [side.count(f"<{name}>") for side in sides] == ([0, 1] if is_validation(PurePath(name)) else [1, 0])
    assert corpus.training_files + corpus.validation_files == len(names)
    assert all("installed" not in side for side in sides)
    assert corpus.digest == load_corpus(tmp_path).digest


def test_no_files_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="both sides must have files"):
        load_corpus(tmp_path)


def test_equal_seeds_see_equal_batches():
    text = torch.arange(1000).to(torch.uint8)
    first, again, other = (Batches(text, 4, 16, seed) for seed in (0, 0, 1))
    batch = first.next()
    assert batch.shape == (4, 17)
    assert torch.equal(batch, again.next())
    assert not torch.equal(batch, other.next())
    assert torch.equal(batch.diff().remainder(256), torch.ones(4, 16, dtype=torch.int64))


def test_validation_windows_span_the_text():
    text = torch.arange(200).to(torch.uint8)
    batches = validation_batches(text, 6, 2, 9)
    assert [batch.shape for batch in batches] == [(2, 10)] * 3
    assert batches[0][0, 0] == 0
    assert batches[-1][-1, -1] == 199
