"""Encoding in several processes: equal tokens, errors of processes, one reading, and bounded memory."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tensorkeep.errors import OutOfMemoryError, StoreError, UsageError
from tensorkeep.train.data import encoding
from tensorkeep.train.data.documents import Reading
from tensorkeep.train.data.encoding import Piece, default_processes, encoded
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.data.tokenizers.bpe import BpeTokenizer
from tensorkeep.train.data.tokenizers.char import ByteTokenizer

LINES = [f"def function_{number}(argument):\n    return argument * {number}  # ünï 漢字\n" for number in range(600)]


@pytest.fixture(scope="module")
def pairs() -> BpeTokenizer:
    pytest.importorskip("tokenizers")
    return BpeTokenizer.learn(iter([iter(LINES)]), True, vocab_size=400)


def documents(folder: Path) -> Path:
    """Write documents of very different lengths, empty ones among them."""
    texts = ["".join(LINES[: number * number % 400]) for number in range(60)]
    (folder / "d.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder / "d.jsonl"


def content(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("train.bin", "validation.bin", "data.json")]


@pytest.mark.parametrize("source", ["documents", "stream"])
@pytest.mark.parametrize("tokenizer", ["bpe", "byte"])
def test_tokens_do_not_depend_on_the_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, tokenizer: str
) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(encoding, "_JOB", 5000)
    path = documents(tmp_path)
    if source == "stream":
        path = tmp_path / "a.txt"
        path.write_text("".join(LINES) * 3)
    for count in (1, 2, 3):
        prepare(path, tmp_path / str(count), tokenizer=tokenizer, processes=count, validation=0.3)
    assert content(tmp_path / "1") == content(tmp_path / "2") == content(tmp_path / "3")


def test_pieces_come_back_in_order(pairs: BpeTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_JOB", 100)
    pieces = [Piece("train", text, bool(number % 2)) for number, text in enumerate(LINES)]
    found = list(encoded(pairs, iter(pieces), 2))
    assert [piece for piece, _ in found] == pieces
    assert all(pairs.decode(tokens) == piece.text for piece, tokens in found)


def test_few_jobs_are_in_memory(pairs: BpeTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_JOB", 1)
    drawn = 0

    def pieces() -> object:
        nonlocal drawn
        for text in LINES:
            drawn += 1
            yield Piece("train", text, True)

    found = encoded(pairs, pieces(), 2)  # type: ignore[arg-type]
    next(found)
    assert drawn <= 8
    found.close()


def test_a_small_corpus_and_simple_tokens_are_encoded_here(
    pairs: BpeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "usable_processors", lambda: range(7))
    assert [default_processes(pairs, nbytes) for nbytes in (1 << 20, 1 << 30)] == [1, 7]
    assert default_processes(ByteTokenizer(documents=True), 1 << 30) == 1


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (signal.SIGKILL, OutOfMemoryError, "was killed, probably because memory ran out"),
        (signal.SIGTERM, StoreError, "ended with status -15"),
    ],
)
def test_a_process_that_ends_early_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], message: str
) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(encoding, "_JOB", 2000)
    real, path = encoding._Worker.encode, documents(tmp_path)

    def encode(worker: encoding._Worker, texts: list[str]) -> object:
        os.kill(worker._process.pid, number)
        worker._process.wait()
        return real(worker, texts)

    monkeypatch.setattr(encoding._Worker, "encode", encode)
    with pytest.raises(error, match=message):
        prepare(path, tmp_path / "data", tokenizer="bpe", processes=2)
    assert [each.name for each in tmp_path.iterdir()] == ["d.jsonl"]


def test_no_process_is_left(pairs: BpeTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*args: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(real(*args, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)

    def pieces() -> object:
        yield Piece("train", "a" * encoding._JOB, True)
        raise UsageError("the source ends with an error")

    with pytest.raises(UsageError, match="ends with an error"):
        list(encoded(pairs, pieces(), 2))  # type: ignore[arg-type]
    assert [process.returncode for process in started] == [0, 0]


@pytest.mark.parametrize(("tokenizer", "readings"), [("byte", 1), ("char", 2)])
def test_documents_are_read_once_unless_the_tokenizer_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str, readings: int
) -> None:
    path, found = documents(tmp_path), []
    real = Reading.documents
    monkeypatch.setattr(Reading, "documents", lambda reading: (found.append(1), real(reading))[1])
    calls: list[tuple[int, int]] = []
    prepare(path, tmp_path / "data", tokenizer=tokenizer, progress=lambda done, total: calls.append((done, total)))
    assert len(found) == readings
    assert calls[-1] == (readings * path.stat().st_size,) * 2


def test_number_of_processes_has_a_bound(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="processes is 0"):
        prepare(documents(tmp_path), tmp_path / "data", processes=0)


_LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
from tensorkeep.train.data.batches import Batches
from tensorkeep.train.evaluate import EvaluationWindows
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.data.prepare import prepare

def limit(megabytes):
    status = Path("/proc/self/status").read_text()
    used = int(status.split("VmData:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + (megabytes << 20),) * 2)
"""


def limited(script: str, *arguments: object) -> None:
    """Run Python code in a process with a function that limits the memory that it may allocate from now on."""
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED + script, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_table_larger_than_memory_is_prepared(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = "".join(LINES)[:20_000]
    # One row group: 160 MB of text.
    table = pa.table({"text": [f"{number} {text}" for number in range(8000)]})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    script = """
limit(int(sys.argv[3]))
prepared = prepare(sys.argv[1], sys.argv[2], tokenizer="byte")
assert prepared.description["source"]["characters"] > 150_000_000
"""
    limited(script, tmp_path / "a.parquet", tmp_path / "data", 100)


def test_tokens_larger_than_memory_are_trained_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 100)
    prepare(tmp_path / "a.txt", tmp_path / "data", tokenizer="byte")
    # A hole in the file takes no disk.
    layout = json.loads((tmp_path / "data" / "data.json").read_text())["body"]["splits"]["train"]["tokens"]
    assert layout == np.fromfile(tmp_path / "data" / "train.bin", "<u2").size
    script = """
tokens = np.memmap(sys.argv[1], np.uint16, mode="w+", shape=(150_000_000,)).view(np.ndarray)
limit(32)
for order in ("random", "shuffled"):
    batches = Batches(tokens, context_length=512, batch_size=32, seed=1, order=order)
    for _ in range(300):
        next(batches)
for _ in EvaluationWindows(tokens, 512, most=51_200).batches(16):
    pass
"""
    limited(script, tmp_path / "sparse.bin")


def test_a_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_PATIENCE", 0.1)
    tokenizer = ByteTokenizer(documents=True)
    for end in (encoding._Worker.close, encoding._Worker._ended):
        worker = encoding._Worker(json.dumps(tokenizer.as_dict()).encode(), tokenizer)
        os.kill(worker._process.pid, signal.SIGSTOP)
        found = end(worker)
        assert worker._process.returncode == -signal.SIGKILL
    assert isinstance(found, StoreError) and "hung" in str(found)
