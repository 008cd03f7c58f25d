"""Parallel reads of a file, from the page cache and around it."""

import errno
import os
from pathlib import Path
from unittest import TestCase, mock

import numpy as np
import pytest

import tensorkeep
from tensorkeep.storage.buffers import ALIGNMENT, BufferPool
from tensorkeep.storage.local import LocalFile

MIB = 1024**2


@pytest.mark.parametrize("page_cache", [True, False])
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(
    ("offset", "count"), [(0, 10), (5000, 3 * MIB), (4096, 8192), (3 * MIB - 7, MIB + 7), (4 * MIB - 1, 1)]
)
def test_fetch_returns_the_right_bytes(tmp_path: Path, page_cache: bool, warm: bool, offset: int, count: int) -> None:
    content = np.random.default_rng(0).integers(0, 256, 4 * MIB, np.uint8)
    path = tmp_path / "x"
    path.write_bytes(content.tobytes())
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    if not warm:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    with LocalFile(path, page_cache=page_cache) as file, BufferPool().acquire(count + 2 * ALIGNMENT) as scratch:
        assert np.array_equal(file.fetch(offset, count, scratch), content[offset : offset + count])


@pytest.mark.parametrize("page_cache", [True, False])
def test_a_file_that_was_truncated_is_corrupt(tmp_path: Path, page_cache: bool) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(2 * MIB))
    with LocalFile(path, page_cache=page_cache) as file, BufferPool().acquire(3 * MIB) as scratch:
        os.truncate(path, MIB + 5)
        with pytest.raises(tensorkeep.CorruptCheckpointError, match="ends at byte 1,048,581"):
            file.fetch(MIB - 100, MIB, scratch)


def test_a_file_system_without_direct_reads_is_logged(tmp_path: Path) -> None:
    real = os.open

    def refuse_direct(path: str | Path, flags: int, *args: int, **options: int | None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **options)

    (tmp_path / "x").write_bytes(bytes(100))
    with (
        mock.patch.object(os, "open", refuse_direct),
        TestCase().assertLogs("tensorkeep.storage", "INFO") as logged,
        LocalFile(tmp_path / "x", page_cache=False) as file,
    ):
        assert not file.bypasses_cache(0, 100)
    assert "no direct I/O (Invalid argument); reading through the page cache" in str(logged.output)
