"""The page cache, the size of a checkpoint, and the check that a measurement fits."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from tensorkeep.errors import StoreError
from tensorkeep.machine import peak_resident_bytes, reset_peak_resident, resident_bytes, storage
from tensorkeep_bench.checkpoint import files

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
SIZE = 8 * 1024**2


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a directory with two files and one below."""
    path = tmp_path / "ckpt"
    (path / "below").mkdir(parents=True)
    for name, size in (("a", SIZE), ("below/b", SIZE + 1), ("empty", 0)):
        (path / name).write_bytes(bytes(size))
    return path


def test_warm_file_is_not_cold(checkpoint: Path) -> None:
    assert files.cached_fraction(checkpoint / "empty") == 0.0
    files.warm(checkpoint)
    assert files.cached_fraction(checkpoint) == files.cached_fraction(checkpoint / "a") == 1.0


def test_evicted_checkpoint_is_cold(checkpoint: Path) -> None:
    if storage(checkpoint)["file_system"] in MEMORY_FILE_SYSTEMS:
        pytest.skip("this folder's file system keeps its files in memory")
    assert files.make_cold(checkpoint)
    assert files.cached_fraction(checkpoint) <= files.COLD_FRACTION
    files.warm(checkpoint / "a")
    assert files.cached_fraction(checkpoint) == pytest.approx(0.5, abs=0.01)
    assert not files.cached_fraction(checkpoint) <= files.COLD_FRACTION
    # Mapped pages are not cold.
    path = checkpoint / "a"
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        # The kernel keeps pages that a process has mapped and looked at.
        np.add.reduce(np.frombuffer(mapped, np.uint8)[:: mmap.PAGESIZE])
        assert not files.make_cold(path)
    assert files.make_cold(path)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_file_on_tmpfs_is_never_cold() -> None:
    path = Path("/dev/shm") / f"tensorkeep-test-{os.getpid()}"
    if storage(path.parent)["file_system"] not in MEMORY_FILE_SYSTEMS:
        pytest.skip("/dev/shm is on a disk")
    try:
        path.write_bytes(bytes(SIZE))
        assert not files.make_cold(path)
    finally:
        path.unlink()


@pytest.mark.parametrize("inside", [".", "a"])
def test_sync_includes_every_file_and_directory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    path = checkpoint if inside == "." else checkpoint / inside
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), real(fd)))
    files.sync_tree(path)
    below = [*checkpoint.rglob("*"), checkpoint, checkpoint.parent] if inside == "." else [path, checkpoint]
    assert sorted(synced) == sorted(found.stat().st_ino for found in below)


def test_peak_includes_freed_memory_and_can_be_reset() -> None:
    files.release_memory()
    reset_peak_resident()
    before = resident_bytes()
    # A separate mapping, because free memory of the heap may already be resident.
    with mmap.mmap(-1, 64 * 1024**2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        # Page by page: a large object on the heap could stay resident, too.
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1
    assert peak_resident_bytes() - before > 60 * 1024**2
    reset_peak_resident()
    assert peak_resident_bytes() - before < 30 * 1024**2


def test_capacity_check_writes_nothing(tmp_path: Path) -> None:
    files.check_capacity(tmp_path, disk=1, memory=1)
    for disk, memory, where in ((2**60, 1, "on the disk"), (1, 2**60, "of memory")):
        with pytest.raises(StoreError, match=where):
            files.check_capacity(tmp_path, disk=disk, memory=memory)
    assert list(tmp_path.iterdir()) == []
