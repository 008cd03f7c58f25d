"""Direct writes by many threads, and errors of the operating system."""

import errno
import os
import threading
from pathlib import Path
from unittest import TestCase, mock

import pytest

from tensorkeep.errors import BusyError, DestinationExistsError, NotFoundError, StoreError
from tensorkeep.paths import absolute
from tensorkeep.storage.buffers import ALIGNMENT, aligned_copy
from tensorkeep.storage.direct_io import DirectFile
from tensorkeep.storage.parallel import run
from tensorkeep.storage.system_errors import store_errors


def test_threads_that_meet_einval_fall_back_to_the_page_cache(tmp_path: Path) -> None:
    real, together = os.pwrite, threading.Barrier(2)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if offset < 2 * ALIGNMENT and not seen.count(offset):
            seen.append(offset)
            together.wait(timeout=10)
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(fd, data, offset)

    seen: list[int] = []
    file = DirectFile(tmp_path / "x")
    page = aligned_copy(bytes(range(256)) * 16)
    with mock.patch.object(os, "pwrite", pwrite), TestCase().assertLogs("tensorkeep.storage", "INFO") as logged:
        run([lambda place=place: file.write(place * 4096, page) for place in range(8)], 4)
    file.finish(8 * 4096)
    assert (tmp_path / "x").read_bytes() == page.tobytes() * 8
    assert not file.direct
    assert [record.getMessage() for record in logged.records] == [
        f"{tmp_path / 'x'}: the file system refuses direct I/O; writing through the page cache"
    ]


def test_an_alarm_is_not_an_error_of_the_system() -> None:
    alarm = TimeoutError("too long")
    with mock.patch.object(os, "getcwd", side_effect=alarm), pytest.raises(TimeoutError, match=r"^too long"):
        absolute("x")
    with pytest.raises(TimeoutError, match=r"^too long"), store_errors("x", "read the file"):
        raise alarm


def test_a_store_error_has_the_errno_of_its_cause(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "x")
    with pytest.raises(OSError, match="cannot create the file: File exists") as caught:
        DirectFile(tmp_path / "x")
    assert isinstance(caught.value, StoreError)
    assert caught.value.errno == errno.EEXIST
    assert isinstance(caught.value.__cause__, FileExistsError)
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "posix_fallocate", side_effect=full), pytest.raises(StoreError) as no_space:
        file.preallocate(1 << 20)
    assert (no_space.value.errno, no_space.value.remedy) == (errno.ENOSPC, "free some space, or save elsewhere")


@pytest.mark.parametrize(
    "error", [NotFoundError("x"), DestinationExistsError("x"), BusyError("x"), StoreError("x", errno=errno.EIO)]
)
def test_store_errors_does_not_wrap_errors_of_this_package(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, store_errors("path", "do it"):
        raise error
    assert caught.value is error
