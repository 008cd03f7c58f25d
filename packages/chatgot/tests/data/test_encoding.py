"""Encoding in several processes: equal tokens, errors of processes, one reading, and bounded memory."""

import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import forked
from chatgot.data import encoding
from chatgot.data.batches import Batches, EvaluationWindows
from chatgot.data.corpus import CorpusReader
from chatgot.data.encoding import TextPiece, default_processes, encoded
from chatgot.data.prepare import prepare
from chatgot.data.tokenizers.bpe import BpeTokenizer
from chatgot.data.tokenizers.char import ByteTokenizer
from tensorkeep.errors import OutOfMemoryError, StoreError, UsageError
from tensorkeep.testing.cases import case
from tiers import exhaustive

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

LINES = [f"def function_{number}(argument):\n    return argument * {number}  # ünï 漢字\n" for number in range(600)]


@pytest.fixture(scope="module")
def pairs() -> BpeTokenizer:
    pytest.importorskip("tokenizers")
    return BpeTokenizer.learn(iter([iter(LINES)]), True, vocab_size=400)


def documents(folder: Path) -> Path:
    """Write documents of very different lengths, empty ones among them."""
    texts = ["".join(LINES[: number * number % 400]) for number in range(40)]
    (folder / "d.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder / "d.jsonl"


def content(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("train.bin", "validation.bin", "data.json")]


@pytest.mark.parametrize(
    ("tokenizer", "source", "counts"),
    [("bpe", "documents", [2]), *exhaustive(*product(("bpe", "byte"), ("documents", "stream"), ([2, 3],)))],
)
def test_tokens_do_not_depend_on_the_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, tokenizer: str, counts: list[int]
) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(encoding, "_JOB", 5000)
    path = documents(tmp_path)
    if source == "stream":
        path = tmp_path / "a.txt"
        path.write_text("".join(LINES))
    for count in (1, *counts):
        prepare(path, tmp_path / str(count), tokenizer=tokenizer, processes=count, validation=0.3)
        assert content(tmp_path / str(count)) == content(tmp_path / "1"), count


def test_pieces_come_back_in_order_with_few_jobs_at_once(pairs: BpeTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_JOB", 1)
    drawn: list[TextPiece] = []

    def pieces() -> Iterator[TextPiece]:
        for number, text in enumerate(LINES):
            drawn.append(TextPiece("train", text, bool(number % 2)))
            yield drawn[-1]

    found = encoded(pairs, pieces(), 2)
    first = next(found)
    assert len(drawn) <= 8
    whole = [first, *found]
    assert [piece for piece, _ in whole] == drawn
    assert len(whole) == len(LINES)
    assert all(pairs.decode(tokens) == piece.text for piece, tokens in whole)


def test_a_small_corpus_and_simple_tokens_are_encoded_here_and_one_process_is_needed(
    tmp_path: Path, pairs: BpeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding.machine, "usable_processors", lambda: range(7))
    assert [default_processes(pairs, nbytes) for nbytes in (1 << 20, 1 << 30)] == [1, 7]
    assert default_processes(ByteTokenizer(documents=True), 1 << 30) == 1
    with pytest.raises(UsageError, match="processes is 0"):
        prepare(documents(tmp_path), tmp_path / "data", processes=0)


def test_a_process_that_ends_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(encoding, "_JOB", 2000)
    real, path = encoding._Worker.encode, documents(tmp_path)
    for number, error, message in (
        (signal.SIGKILL, OutOfMemoryError, "was killed, probably because memory ran out"),
        (signal.SIGTERM, StoreError, "ended with status -15"),
    ):

        def encode(worker: encoding._Worker, texts: list[str], number: int = number) -> object:
            os.kill(worker._process.pid, number)
            worker._process.wait()
            return real(worker, texts)

        monkeypatch.setattr(encoding._Worker, "encode", encode)
        with case(number), pytest.raises(error, match=message):
            prepare(path, tmp_path / "data", tokenizer="bpe", processes=2)
        assert [each.name for each in tmp_path.iterdir()] == ["d.jsonl"]


def test_no_process_is_left(pairs: BpeTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*args: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(real(*args, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)

    def pieces() -> Iterator[TextPiece]:
        yield TextPiece("train", "a" * encoding._JOB, True)
        raise UsageError("the source ends with an error")

    with pytest.raises(UsageError, match="ends with an error"):
        list(encoded(pairs, pieces(), 2))
    assert [process.returncode for process in started] == [0, 0]


def test_documents_are_read_once_unless_the_tokenizer_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = documents(tmp_path), CorpusReader.documents
    for tokenizer, readings in (("byte", 1), ("char", 2)):
        found, calls = [], []
        monkeypatch.setattr(CorpusReader, "documents", lambda reading, found=found: (found.append(1), real(reading))[1])
        prepare(path, tmp_path / tokenizer, tokenizer=tokenizer, progress=lambda *each, calls=calls: calls.append(each))
        assert len(found) == readings
        assert calls[-1] == (readings * path.stat().st_size,) * 2


def limit(megabytes: int) -> None:
    """Limit the memory that this process may allocate from now on."""
    status = Path("/proc/self/status").read_text()
    used = int(status.split("VmData:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + (megabytes << 20),) * 2)


def use_more_than_the_limit() -> None:
    limit(20)
    np.ones(40 << 20, np.uint8)


def prepare_a_large_table(source: Path, data: Path) -> None:
    import pyarrow.parquet  # noqa: F401  (takes memory of its own)

    limit(40)
    prepared = prepare(source, data, tokenizer="byte")
    assert prepared.description["source"]["characters"] > 45_000_000


def draw_from_many_tokens(file: Path) -> None:
    # A hole in the file takes no disk.
    tokens = np.memmap(file, np.uint16, mode="w+", shape=(150_000_000,)).view(np.ndarray)
    limit(32)
    for order in ("random", "shuffled"):
        batches = Batches(tokens, context_length=512, batch_size=32, seed=1, order=order)  # type: ignore[arg-type]
        for _ in range(20):
            next(batches)
    for _ in EvaluationWindows(tokens, 512, most=51_200).batches(16):
        pass


@pytest.mark.exhaustive
def test_a_table_and_tokens_larger_than_memory_are_read(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = "".join(LINES)[:4000]
    # One row group: 48 MB of text.
    table = pa.table({"text": [f"{number} {text}" for number in range(12_000)]})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    output = tmp_path / "output"
    refused = forked.start(use_more_than_the_limit, output=output)
    large = forked.start(prepare_a_large_table, tmp_path / "a.parquet", tmp_path / "data", output=output)
    drawn = forked.start(draw_from_many_tokens, tmp_path / "sparse.bin", output=output)
    assert [forked.ended(each) for each in (refused, large, drawn)] == [1, 0, 0], output.read_text()


def test_a_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_PATIENCE", 0.1)
    tokenizer = ByteTokenizer(documents=True)
    for end in (encoding._Worker.close, encoding._Worker._ended):
        worker = encoding._Worker(json.dumps(tokenizer.as_dict()).encode(), tokenizer)
        os.kill(worker._process.pid, signal.SIGSTOP)
        found = end(worker)
        assert worker._process.returncode == -signal.SIGKILL
    assert isinstance(found, StoreError) and "hung" in str(found)
