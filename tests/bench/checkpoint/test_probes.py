import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from tensorkeep.bench.checkpoint import probes
from tensorkeep.errors import StoreError
from tensorkeep.machine import peak_resident_bytes, reset_peak_resident, resident_bytes, storage

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
SIZE = 8 * 1024**2


@pytest.fixture
def checkpoint(tmp_path):
    """Return a directory with two files and one below."""
    path = tmp_path / "ckpt"
    (path / "below").mkdir(parents=True)
    for name, size in (("a", SIZE), ("below/b", SIZE + 1), ("empty", 0)):
        (path / name).write_bytes(bytes(size))
    return path


def needs_a_disk(path: Path) -> None:
    if storage(path)["file_system"] in MEMORY_FILE_SYSTEMS:
        pytest.skip("this folder's file system keeps its files in memory")


def test_a_warm_file_is_not_taken_for_cold(checkpoint):
    probes.warm(checkpoint)
    assert probes.resident_share(checkpoint) == 1.0
    assert probes.resident_share(checkpoint / "a") == 1.0


def test_eviction_makes_cold_and_proves_it(checkpoint):
    needs_a_disk(checkpoint)
    assert probes.make_cold(checkpoint)
    assert probes.resident_share(checkpoint) <= probes.COLD_SHARE
    probes.warm(checkpoint / "a")
    assert probes.resident_share(checkpoint) == pytest.approx(0.5, abs=0.01)
    assert not probes.resident_share(checkpoint) <= probes.COLD_SHARE


def test_pages_that_cannot_be_dropped_are_seen(checkpoint):
    needs_a_disk(checkpoint)
    path = checkpoint / "a"
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        # The kernel keeps pages that a process has mapped and looked at.
        np.add.reduce(np.frombuffer(mapped, np.uint8)[:: mmap.PAGESIZE])
        assert not probes.make_cold(path)
    assert probes.make_cold(path)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_a_file_in_memory_is_never_cold():
    path = Path("/dev/shm") / f"tensorkeep-test-{os.getpid()}"
    if storage(path.parent)["file_system"] not in MEMORY_FILE_SYSTEMS:
        pytest.skip("/dev/shm is on a disk")
    try:
        path.write_bytes(bytes(SIZE))
        assert not probes.make_cold(path)
    finally:
        path.unlink()


def test_an_empty_checkpoint_is_cold(tmp_path):
    assert probes.resident_share(tmp_path) == 0.0


def test_size_counts_every_file(checkpoint):
    assert probes.size_on_disk(checkpoint) == 2 * SIZE + 1
    assert probes.size_on_disk(checkpoint / "below" / "b") == SIZE + 1


@pytest.mark.parametrize("inside", [".", "a"])
def test_durable_includes_every_file_and_directory(checkpoint, monkeypatch, inside):
    path = checkpoint if inside == "." else checkpoint / inside
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), real(fd)))
    seconds = probes.durable_seconds(lambda: synced.clear(), path)
    below = [*checkpoint.rglob("*"), checkpoint, checkpoint.parent] if inside == "." else [path, checkpoint]
    assert sorted(synced) == sorted(found.stat().st_ino for found in below)
    assert seconds > 0


def test_the_save_is_on_the_clock():
    import time

    assert probes.seconds_of(lambda: time.sleep(0.02)) >= 0.02


def test_peak_sees_what_was_freed_and_can_be_reset():
    probes.release_memory()
    reset_peak_resident()
    before = resident_bytes()
    # A mapping of its own: the heap may have room that is resident already.
    with mmap.mmap(-1, 64 * 1024**2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        # Page by page: a large object on the heap could stay resident, too.
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1
    assert peak_resident_bytes() - before > 60 * 1024**2
    reset_peak_resident()
    assert peak_resident_bytes() - before < 30 * 1024**2


def test_room_is_checked_before_anything_is_written(tmp_path):
    probes.check_room(tmp_path, disk=1, memory=1)
    with pytest.raises(StoreError, match="of disk are needed"):
        probes.check_room(tmp_path, disk=2**60, memory=1)
    with pytest.raises(StoreError, match="of memory are needed"):
        probes.check_room(tmp_path, disk=1, memory=2**60)
    assert list(tmp_path.iterdir()) == []
