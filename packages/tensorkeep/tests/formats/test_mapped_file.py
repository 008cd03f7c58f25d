"""Objects of stores as memory: what is used is fetched once, in few requests, and given back over a budget."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tensorkeep.errors import StoreError
from tensorkeep.formats import mapped_file
from tensorkeep.formats.mapped_file import FetchedFile, FetchedParts
from tensorkeep.state.leaf import Bytes
from tensorkeep.storage.object_store import StoreFile

PIECE = 16 * 1024


class Source(StoreFile):
    """A file in memory, whose reads are noted."""

    def __init__(self, size: int) -> None:
        self.path = Path("s3:/bucket/x")
        self.size = size
        self.bytes = np.random.default_rng(1).integers(0, 256, size, np.uint8)
        self.reads: list[tuple[int, int]] = []
        self.failing = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.begun = threading.Semaphore(0)

    def read_into(self, offset: int, out: Bytes) -> None:
        self.reads.append((offset, len(out)))
        self.begun.release()
        assert self.go_on.wait(60)
        if self.failing.is_set():
            raise StoreError("no answer", path=self.path)
        out[:] = self.bytes[offset : offset + len(out)]

    @property
    def moved(self) -> int:
        return sum(count for _, count in self.reads)


def use(file: FetchedFile, source: Source, start: int, stop: int) -> None:
    with file.needed(start, stop):
        assert np.array_equal(file.content[start:stop], source.bytes[start:stop])


def test_what_is_used_is_fetched_once_and_a_large_range_by_several_requests() -> None:
    source = Source(100 * PIECE + 7)
    file = FetchedFile(source, FetchedParts(10**9))
    assert source.reads == []
    use(file, source, 3 * PIECE + 5, 3 * PIECE + 9)
    assert source.reads == [(3 * PIECE, PIECE)]
    use(file, source, PIECE, 5 * PIECE)
    assert source.reads[1:] == [(PIECE, 2 * PIECE), (4 * PIECE, PIECE)]
    use(file, source, 0, source.size)
    assert source.moved == source.size
    view = file.content[8 : 8 + 400].view(np.float32).reshape(10, 10)[3:5, ::2]
    with file.needed_by(view), file.needed_by(view[:0]):
        pass
    with file.stream(PIECE, source.size) as stream:
        stream.seek(-7, 2)
        assert stream.read() == source.bytes[-7:].tobytes()
    assert source.moved == source.size
    file = FetchedFile(Source(0), FetchedParts(0))
    with file.stream() as stream:
        assert stream.read() == b""
    large = Source(20 * 1024**2)
    file = FetchedFile(large, FetchedParts(10**9))
    use(file, large, 0, large.size)
    assert [count for _, count in large.reads] == [8 * 1024**2, 8 * 1024**2, 4 * 1024**2]


def test_threads_share_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file, "_MOST_PIECES", 8)
    source = Source(40 * PIECE)
    source.go_on.clear()
    file = FetchedFile(source, FetchedParts(10**9))
    with ThreadPoolExecutor(8) as threads:
        uses = [threads.submit(use, file, source, 0, source.size) for _ in range(8)]
        for _ in range(5):
            assert source.begun.acquire(timeout=60)
        source.go_on.set()
        for each in uses:
            each.result()
    assert (source.moved, len(source.reads)) == (source.size, 5)


def test_over_the_budget_the_oldest_is_given_back() -> None:
    source = Source(100 * PIECE)
    file = FetchedFile(source, FetchedParts(10 * PIECE))
    for start in range(0, 100, 5):
        use(file, source, start * PIECE, (start + 5) * PIECE)
    assert (source.moved, np.count_nonzero(file._states)) == (source.size, 10)
    assert not file.content[: 90 * PIECE].any()
    use(file, source, 90 * PIECE, 100 * PIECE)
    assert source.moved == source.size
    use(file, source, 0, PIECE)
    assert source.moved == source.size + PIECE
    with file.needed(20 * PIECE, 40 * PIECE):
        # Nothing in use is given back.
        use(file, source, 50 * PIECE, 90 * PIECE)
        assert np.array_equal(file.content[20 * PIECE : 40 * PIECE], source.bytes[20 * PIECE : 40 * PIECE])


def test_the_memory_of_collected_files_counts_no_more() -> None:
    source, parts = Source(8 * PIECE), FetchedParts(10 * PIECE)
    use(FetchedFile(source, parts), source, 0, source.size)
    gc.collect()
    file = FetchedFile(source, parts)
    moved = source.moved
    use(file, source, 0, source.size)
    use(file, source, 0, PIECE)
    assert source.moved == moved + source.size, "nothing was given back"


def test_what_ctrl_c_has_interrupted_is_fetched_again() -> None:
    class Interrupted(Source):
        def read_into(self, offset: int, out: Bytes) -> None:
            super().read_into(offset, out)
            if len(self.reads) == 2:
                raise KeyboardInterrupt

    source = Interrupted(20 * 1024**2)
    file = FetchedFile(source, FetchedParts(10**9))
    with pytest.raises(KeyboardInterrupt), file.needed(0, source.size):
        pass
    with ThreadPoolExecutor(1) as thread:
        thread.submit(use, file, source, 0, source.size).result(60)
    assert [offset for offset, _ in source.reads] == [0, 8 * 1024**2, 8 * 1024**2, 16 * 1024**2]


def test_a_failure_is_raised_in_all_threads_and_forgotten() -> None:
    source = Source(40 * PIECE)
    source.failing.set()
    source.go_on.clear()
    file = FetchedFile(source, FetchedParts(10**9))
    with ThreadPoolExecutor(3) as threads:
        uses = [threads.submit(use, file, source, 0, 4 * PIECE) for _ in range(3)]
        while not (source.reads and file._users[0] == 3):
            time.sleep(0.001)
        source.go_on.set()
        for each in uses:
            with pytest.raises(StoreError, match="no answer"):
                each.result()
        assert len(source.reads) == 1
        source.failing.clear()
        use(file, source, 0, source.size)
