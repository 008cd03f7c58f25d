"""Objects are written from many threads, in parts whose memory counts within the budget until it was sent."""

import gc
import itertools
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tensorkeep.errors import StoreError
from tensorkeep.paths import StorePath
from tensorkeep.storage import object_store, parallel, store_requests
from tensorkeep.storage.buffers import BufferPool
from tensorkeep.storage.object_store import Upload
from tensorkeep.storage.parallel import Cancellation, Cancelled
from tensorkeep.testing.cases import case

obstore = pytest.importorskip("obstore")
pytestmark = pytest.mark.usefixtures("memory")

MIB = 1024**2
PATH = StorePath("s3://bucket/object")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Use a store in the memory of this process."""
    store = obstore.store.MemoryStore()
    monkeypatch.setattr(store_requests, "_connect", lambda *arguments: store)
    return store


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[BufferPool]:
    """Return a pool of 64 MiB; parts have 1 MiB."""
    monkeypatch.setattr(object_store, "_PART_BYTES", MIB)
    with BufferPool(64 * MIB) as pool:
        yield pool


def some_bytes(count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(count).integers(0, 256, count, np.uint8)


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, MIB + 1, 9 * MIB + 12345])
@pytest.mark.parametrize("in_buffers", [False, True])
def test_many_threads_write_pieces_of_any_size(memory: Any, pool: BufferPool, size: int, in_buffers: bool) -> None:
    draw = random.Random(size)
    cuts = sorted({0, size, *(draw.randint(0, size) for _ in range(20))})
    data = some_bytes(size)
    cancellation = Cancellation()
    upload = Upload(PATH, pool, cancellation, most_bytes=size)

    def write(start: int, stop: int) -> None:
        if not in_buffers:
            upload.write(start, data[start:stop])
            return
        buffer = pool.acquire(stop - start)
        with buffer as array:
            array[: stop - start] = data[start:stop]
            upload.write(start, array[: stop - start], buffer)

    parallel.run([partial(write, *each) for each in itertools.pairwise(cuts)], 4, cancellation)
    upload.finish(size)
    assert bytes(obstore.get(memory, PATH.key).bytes()) == data.tobytes()


class Held:
    """A stand-in for `store_requests.put_pieces` that keeps every piece until it may continue."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.may_end = threading.Event()

    def __call__(self, path: StorePath, pieces: Any, **_: Any) -> None:
        self.pieces.extend(pieces)
        self.may_end.wait()
        self.pieces.clear()


def test_a_buffer_is_not_used_again_before_it_was_sent(pool: BufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    monkeypatch.setattr(store_requests, "put_pieces", held)
    upload = Upload(PATH, pool, Cancellation(), most_bytes=100 * MIB)
    buffer = pool.acquire(40 * MIB)
    with buffer as array:
        array[: 40 * MIB] = 7
        upload.write(0, array[: 40 * MIB], buffer)
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(Cancelled):
        pool.acquire(40 * MIB, cancellation)  # would wait
    end = threading.Thread(target=lambda: upload.finish(40 * MIB), daemon=True)
    end.start()
    try:
        while not upload._pieces.exhausted:
            time.sleep(0.001)
        assert sum(len(piece) for piece in held.pieces) == 40 * MIB
        assert all((piece == 7).all() for piece in held.pieces)
    finally:
        held.may_end.set()
    end.join()
    gc.collect()
    with pool.acquire(60 * MIB):
        assert pool.peak_bytes <= 64 * MIB


@pytest.mark.parametrize("threads", [1, 4])
def test_an_object_larger_than_the_budget(pool: BufferPool, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[bytes] = []
    # As a store far away: the memory of a piece is free once it was sent.
    monkeypatch.setattr(store_requests, "put_pieces", lambda path, pieces, **_: received.extend(map(bytes, pieces)))
    size, step = 90 * MIB, 3 * MIB + 100
    cancellation = Cancellation()
    upload = Upload(PATH, pool, cancellation, most_bytes=size)

    def write(start: int) -> None:
        buffer = pool.acquire(20 * MIB if threads == 1 else 10 * MIB)
        with buffer as array:
            count = min(step, size - start)
            array[:count] = start // step % 251
            upload.write(start, array[:count], buffer)

    parallel.run([partial(write, start) for start in range(0, size, step)], threads, cancellation)
    upload.finish(size)
    assert pool.peak_bytes <= 64 * MIB
    found = np.frombuffer(b"".join(received), np.uint8)
    assert len(found) == size
    assert (found[::step] == np.arange(len(found[::step])) % 251).all()


def test_the_error_of_the_store_is_raised_and_memory_is_free(pool: BufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: StorePath, pieces: Any, **_: Any) -> None:
        next(pieces)
        raise StoreError("cannot write it: SlowDown", path=path)

    monkeypatch.setattr(store_requests, "put_pieces", fails)
    upload = Upload(PATH, pool, Cancellation(), most_bytes=60 * MIB)
    with pytest.raises(StoreError, match="SlowDown"):
        for start in range(0, 60 * MIB, 4 * MIB):
            buffer = pool.acquire(4 * MIB)
            with buffer as array:
                upload.write(start, array[: 4 * MIB], buffer)
        upload.finish(60 * MIB)
    upload.close()
    pool.acquire(64 * MIB).release()


@pytest.mark.parametrize("cancel", [False, True])
def test_an_upload_that_does_not_end_leaves_nothing(pool: BufferPool, cancel: bool) -> None:
    cancellation = Cancellation()
    upload = Upload(PATH, pool, cancellation, most_bytes=3 * MIB)
    upload.write(0, some_bytes(2 * MIB + 5))
    if cancel:
        cancellation.cancel()
        with pytest.raises(Cancelled):
            upload.finish(2 * MIB + 5)
    upload.close()
    upload.close()
    pool.acquire(64 * MIB).release()
    assert not store_requests.objects(PATH.parent)


def test_progress_counts_what_was_sent(pool: BufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    may_take = threading.Semaphore(0)

    def slow(path: StorePath, pieces: Any, **_: Any) -> None:
        for _piece in pieces:
            may_take.acquire()

    monkeypatch.setattr(store_requests, "put_pieces", slow)
    done: list[int] = []
    upload = Upload(PATH, pool, Cancellation(), most_bytes=9 * MIB, progress=done.append)
    for number in range(3):
        upload.write(3 * number * MIB, some_bytes(3 * MIB), counts=100)
    assert not done
    may_take.release(9)
    upload.finish(9 * MIB)
    assert sum(done) == 300


def test_parts_grow_with_the_object() -> None:
    assert object_store.part_bytes(0) == 8 * MIB
    for size in (79 * 1024**3, 400 * 1024**3, 5 * 1024**4):
        assert 0 <= object_store.part_bytes(size) * 10_000 - size <= 10_000 * MIB


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "answer lost"])
def test_only_an_object_of_the_save_is_taken_for_it(pool: Any, monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    def refused(path: StorePath, pieces: Any, **options: Any) -> None:
        content = b"".join(map(bytes, pieces))
        if lost:
            store_requests.put(path, content)
        raise StoreError("cannot write it", path=path)

    monkeypatch.setattr(store_requests, "put_pieces", refused)
    named = PATH.with_name("model-0123456789abcdef.safetensors")
    if not lost:
        store_requests.put(PATH, bytes(3 * MIB))  # an older object of the same size
    for path in (PATH, named):
        with case(path):
            upload = Upload(path, pool, Cancellation(), most_bytes=3 * MIB)
            upload.write(0, some_bytes(3 * MIB))
            if lost and path is named:
                upload.finish(3 * MIB)
                assert bytes(store_requests.get(path)) == some_bytes(3 * MIB).tobytes()
            else:
                with pytest.raises(StoreError, match="cannot write it"):
                    upload.finish(3 * MIB)
