"""Preparing data: splits, refused input, cleanup after failures, and memory use."""

import errno
import io
import os
import signal
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatgot.data import corpus as corpus_module
from chatgot.data.corpus import CorpusReader, SplitRule
from chatgot.data.dataset import Dataset
from chatgot.data.prepare import prepare
from chatgot.data.tokenizers.base import END_OF_DOCUMENT
from faults import injection as faults
from tensorkeep.errors import DestinationExistsError, NotACheckpointError, StoreError, UsageError
from tensorkeep.testing.cases import case
from tiers import exhaustive

TEXT = "To be, or not to be:\nthat is the question. Ünïcödé 漢字 🙂\n" * 10


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def texts(folder: Path) -> tuple[str, str]:
    dataset = Dataset.open(folder, verify=True)
    return dataset.tokenizer.decode(dataset.train), dataset.tokenizer.decode(dataset.validation)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def corpus(folder: Path, count: int) -> Path:
    for number in range(count):
        write(folder / f"{number:03d}.txt", f"document {number}\n")
    return folder


def test_stream_is_split_where_nanogpt_splits_it(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    for tokenizer in ("char", "byte", "bpe"):
        prepare(write(tmp_path / "a.txt", TEXT), tmp_path / tokenizer, tokenizer=tokenizer)
        count = int(len(TEXT) * 0.9)
        assert texts(tmp_path / tokenizer) == (TEXT[:count], TEXT[count:]), tokenizer


def test_characters_are_stored_as_nanogpt_stores_them_and_described(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    path = write(tmp_path / "a.txt", TEXT)
    prepared = prepare(path, tmp_path / "data", progress=lambda done, total: calls.append((done, total)))
    numbers = {character: number for number, character in enumerate(sorted(set(TEXT)))}
    expected = np.array([numbers[character] for character in TEXT], "<u2")
    count = int(len(TEXT) * 0.9)
    assert (tmp_path / "data" / "train.bin").read_bytes() == expected[:count].tobytes()
    assert (tmp_path / "data" / "validation.bin").read_bytes() == expected[count:].tobytes()
    about = prepared.as_dict()
    assert (about["path"], about["vocab_size"]) == (str(tmp_path / "data"), len(numbers))
    source, nbytes = about["source"], len(TEXT.encode())
    assert (source["bytes"], source["characters"]) == (nbytes, len(TEXT))
    assert (source["files"], source["documents"], source["encoding"]) == (1, None, "utf-8")
    assert (about["tokenizer"], about["dtype"], about["validation"]) == ("char", "uint16", 0.1)
    assert Dataset.open(tmp_path / "data").description == prepared.description
    # The text is read twice.
    assert calls[-1] == (2 * nbytes, 2 * nbytes)
    assert calls == sorted(calls)


@given(
    st.text(st.sampled_from("aü漢🙂\n"), min_size=10, max_size=60), st.integers(1, 7), st.sampled_from([0.1, 0.5, 0.3])
)
def test_split_of_a_stream_does_not_depend_on_its_pieces(text: str, piece: int, validation: float) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "PIECE", piece)
        prepare(write(Path(name, "a.txt"), text), Path(name, "data"), validation=validation, tokenizer="byte")
        count = int(len(text) * (1 - validation))
        assert texts(Path(name, "data")) == (text[:count], text[count:])


def test_each_document_is_in_one_split_and_empty_ones_are_skipped(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "docs", 50)
    for number in range(20):
        write(folder / f"empty{number}.txt", "")
    prepared = prepare(folder, tmp_path / "data", tokenizer="byte", validation=0.3)
    parts = [text.split(END_OF_DOCUMENT) for text in texts(tmp_path / "data")]
    assert [part.pop() for part in parts] == ["", ""]
    assert sorted(parts[0] + parts[1]) == sorted(f"document {number}\n" for number in range(50))
    counts = [prepared.description["splits"][split]["documents"] for split in ("train", "validation")]
    assert counts == [len(part) for part in parts]
    assert 5 < counts[1] < 25
    source = prepared.description["source"]
    assert (source["documents"], source["files"]) == (50, 70)


def test_documents_stay_in_their_split_when_the_corpus_grows(tmp_path: Path) -> None:
    held = []
    for count in (40, 60):
        prepare(corpus(tmp_path / "docs", count), tmp_path / str(count), tokenizer="byte", validation=0.3, seed=4)
        held.append([set(text.split(END_OF_DOCUMENT)) for text in texts(tmp_path / str(count))])
    assert held[0][0] < held[1][0]
    assert held[0][1] < held[1][1]
    # Another seed changes the split.
    names = [f"{number}.txt" for number in range(1000)]
    drawn = [[SplitRule(0.2, seed).of_document(name) for name in names] for seed in (0, 1, 0)]
    assert drawn[0] == drawn[2] != drawn[1]
    assert 150 < drawn[0].count("validation") < 250


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    prepared = prepare("-", tmp_path / "data")
    assert "".join(texts(tmp_path / "data")) == TEXT
    assert prepared.description["source"]["kind"] == "stdin"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    monkeypatch.setattr(corpus_module.tempfile, "TemporaryFile", Full)
    with pytest.raises(StoreError, match="cannot copy standard input to a temporary file: No space left"):
        prepare("-", tmp_path / "other")
    assert names(tmp_path) == ["data"]


def test_a_corpus_too_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for text in ("", "x", "\ufeff"):
        with case(repr(text)):
            with pytest.raises(UsageError, match=f"a.txt: {'is so short' if text == 'x' else 'holds no text'}"):
                prepare(write(path, text), tmp_path / "data")
            assert names(tmp_path) == ["a.txt"]
    # Two characters can be split.
    prepare(write(path, "xy"), tmp_path / "data", validation=0.5)
    assert texts(tmp_path / "data") == ("x", "y")
    with pytest.raises(UsageError, match="nothing is left for validation"):
        prepare(path, tmp_path / "other", validation=1e-20)
    with pytest.raises(UsageError, match=r"none of its 1 documents is for (train|validation)") as caught:
        prepare(corpus(tmp_path / "docs", 1), tmp_path / "other")
    assert "another fraction or seed" in str(caught.value.remedy)
    write(tmp_path / "none" / "a.txt", "")
    with pytest.raises(UsageError, match="holds no text"):
        prepare(tmp_path / "none", tmp_path / "other")


def test_invalid_arguments_and_bad_input_leave_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", TEXT)
    invalid: list[dict[str, Any]] = [
        *({"validation": each} for each in (0.0, 1.0, float("nan"))),
        *({"seed": each} for each in (-1, 1 << 64, 0.5)),
        {"tokenizer": "words"},
        {"vocab_size": 300},
        {"encoding": "utf-9"},
    ]
    for arguments in invalid:
        with case(arguments), pytest.raises(UsageError):
            prepare(path, tmp_path / "data", **arguments)
    path.write_bytes(TEXT.encode() * 10_000 + b"\xff")
    with pytest.raises(UsageError, match="is not utf-8"):
        prepare(path, tmp_path / "data", tokenizer="byte")
    with pytest.raises(NotACheckpointError):
        prepare(tmp_path / "b.txt", tmp_path / "data")
    assert names(tmp_path) == ["a.txt"]
    # It may have another encoding.
    path.write_bytes(("grüße " * 20).encode("latin-1"))
    prepare(path, tmp_path / "data", encoding="latin-1", validation=0.5)
    assert "".join(texts(tmp_path / "data")) == "grüße " * 20


def test_only_prepared_data_is_replaced(tmp_path: Path) -> None:
    path, out = write(tmp_path / "a.txt", TEXT), tmp_path / "data"
    prepare(path, out)
    with pytest.raises(DestinationExistsError, match="exists already"):
        prepare(path, out)
    opened = Dataset.open(out)
    write(path, TEXT[::-1])
    prepare(path, out, overwrite=True)
    assert "".join(texts(out)) == TEXT[::-1]
    # Data that is open stays.
    assert opened.tokenizer.decode(opened.train) == TEXT[: int(len(TEXT) * 0.9)]
    write(out / "notes.md", "mine")
    with pytest.raises(DestinationExistsError, match=r"also holds 'notes.md'"):
        prepare(path, out, overwrite=True)
    for other in (tmp_path / "a.txt", corpus(tmp_path / "docs", 1), tmp_path):
        with pytest.raises(DestinationExistsError, match="is not prepared data"):
            prepare(path, other, overwrite=True)
    assert names(tmp_path) == ["a.txt", "data", "docs"]


def test_corpus_that_changes_between_the_passes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "a.txt", CorpusReader.documents
    for change in ("X" * 50, "", TEXT[::-1]):
        later = iter((TEXT, change))
        monkeypatch.setattr(CorpusReader, "documents", lambda it, later=later: (write(path, next(later)), real(it))[1])
        with case(change[:5]), pytest.raises(StoreError, match="changed while it was read"):
            prepare(write(path, TEXT), tmp_path / "data")
        assert names(tmp_path) == ["a.txt"]


def test_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    line = TEXT.replace("\n", " ").encode()  # one single line
    with (tmp_path / "a.txt").open("wb") as file:
        for _ in range(13):
            file.write(line * (1_000_000 // len(line)))
    nbytes = (tmp_path / "a.txt").stat().st_size
    assert nbytes > 12_000_000
    for tokenizer in ("char", "byte"):
        tracemalloc.start()
        try:
            prepared = prepare(tmp_path / "a.txt", tmp_path / tokenizer, tokenizer=tokenizer)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert prepared.description["source"]["bytes"] == nbytes
        assert peak < 9_000_000, (tokenizer, peak)


@pytest.fixture
def counted(tmp_path: Path) -> tuple[Path, int]:
    """Return a text, and how many operations it takes to prepare it."""
    path = write(tmp_path / "a.txt", TEXT)
    count = faults.count_operations(lambda: prepare(path, tmp_path / "count", tokenizer="byte"))
    assert count > 8
    return path, count


def test_disk_error_leaves_nothing_and_a_short_write_is_finished(tmp_path: Path, counted: tuple[Path, int]) -> None:
    path, count = counted
    for number in (errno.ENOSPC, errno.EIO):
        met = set()
        for index in range(count):
            folder = tmp_path / f"{number} at {index}"
            folder.mkdir()
            with faults.broken(fail_at=index, action=faults.raise_error(number)) as broken:
                try:
                    prepare(path, folder / "data", tokenizer="byte")
                except StoreError as error:
                    met.add(broken.seen[index])
                    assert os.strerror(number) in error.message
            # If only the sync of the new name failed, the error was raised and the prepared data is complete.
            if names(folder):
                assert names(folder) == ["data"]
                assert "".join(texts(folder / "data")) == TEXT
        assert {"mkdir", "open", "pwrite", "fsync", "renameat2"} <= met
    for index in range(count):
        with faults.broken(fail_at=index, action=faults.write_short):
            prepare(path, tmp_path / str(index), tokenizer="byte")
        assert "".join(texts(tmp_path / str(index))) == TEXT


@pytest.mark.parametrize("every", [pytest.param(5, marks=pytest.mark.integration), *exhaustive(1)])
def test_a_kill_at_operations_leaves_all_data_or_none(tmp_path: Path, counted: tuple[Path, int], every: int) -> None:
    path, count = counted
    met = set()
    for index in reversed(range(count - 1, -1, -every)):  # the last one among them
        folder = tmp_path / str(index)
        folder.mkdir()

        def work(folder: Path = folder, index: int = index) -> None:
            with faults.broken(fail_at=index, action=faults.die):
                prepare(path, folder / "data", tokenizer="byte")

        assert faults.in_child(work) == signal.SIGKILL
        met.add((folder / "data").exists())
        if (folder / "data").exists():
            assert "".join(texts(folder / "data")) == TEXT
        prepare(path, folder / "data", tokenizer="byte", overwrite=True)
        assert names(folder) == ["data"]
    assert met == {True, False}


def test_the_tokenizer_of_a_prepared_folder_is_learned_from_all_documents(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = tmp_path / "docs"
    for number in range(40):
        write(folder / f"{number}.txt", f"def function_{number}(argument):\n    return argument\n")
    prepared = prepare(folder, tmp_path / "data", tokenizer="bpe", vocab_size=300)
    assert prepared.description["vocab_size"] <= 300
    train, validation = texts(tmp_path / "data")
    assert (train + validation).count(END_OF_DOCUMENT) == 40
    assert Dataset.open(tmp_path / "data").tokenizer.encode("argument").size == 1
