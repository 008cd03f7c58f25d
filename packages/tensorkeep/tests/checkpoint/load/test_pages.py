"""New memory is populated with the page size that was faster the last time."""

import mmap

import numpy as np
import pytest

from tensorkeep.checkpoint import ranges
from tensorkeep.checkpoint.ranges import NewPages

MIB = 1024**2


class Kernel:
    """Stands in for madvise and the clock: a huge page costs ``huge`` seconds, 2 MiB of small ones ``small``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, small: float, huge: float) -> None:
        self.small, self.huge = small, huge
        self.size = "small"
        self.populated: list[str] = []
        self.now = 0.0
        monkeypatch.setattr(ranges, "_advise", self.advise)
        monkeypatch.setattr(ranges.time, "thread_time", lambda: self.now)

    def advise(self, start: int, stop: int, advice: int) -> None:
        if advice == mmap.MADV_HUGEPAGE:
            self.size = "huge"
        elif advice == mmap.MADV_NOHUGEPAGE:
            self.size = "small"
        elif stop - start == 2 * MIB:
            self.populated.append(self.size)
            self.now += self.huge if self.size == "huge" else self.small

    def populate(self, new: NewPages, nbytes: int) -> list[str]:
        self.populated = []
        new.populate(np.empty(nbytes + 2 * MIB, np.uint8))
        return self.populated


@pytest.mark.parametrize(("small", "huge", "faster"), [(4.0, 1.0, "huge"), (1.0, 4.0, "small")])
def test_the_faster_page_size_is_used(monkeypatch: pytest.MonkeyPatch, small: float, huge: float, faster: str) -> None:
    used = Kernel(monkeypatch, small=small, huge=huge).populate(NewPages(), 200 * MIB)
    assert used[:2] == ["small", "huge"]
    assert used.count(faster) >= len(used) - 5


def test_a_size_now_slow_is_left_after_one_piece_and_one_now_fast_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, new = Kernel(monkeypatch, small=4.0, huge=1.0), NewPages()
    kernel.populate(new, 10 * MIB)
    kernel.huge = 20.0
    assert kernel.populate(new, 4 * MIB)[:2] == ["huge", "small"]
    kernel.huge = 1.0
    assert kernel.populate(new, 64 * MIB)[-1] == "huge"


def test_memory_keeps_its_content_and_pages_are_present_afterwards() -> None:
    for nbytes in (1, 5000, 2 * MIB, 7 * MIB + 3):
        memory = np.arange(nbytes, dtype=np.uint8)
        new = NewPages()
        for _ in range(3):
            new.populate(memory)
        np.testing.assert_array_equal(memory, np.arange(nbytes, dtype=np.uint8))
    memory = np.frombuffer(mmap.mmap(-1, 16 * MIB), np.uint8)
    NewPages().populate(memory)
    assert resident_bytes(memory) == 16 * MIB


def resident_bytes(memory: np.ndarray) -> int:
    """Return how much of some memory has pages, as the kernel counts it."""
    begin = memory.ctypes.data
    total, inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            bounds = line.split(maxsplit=1)[0].split("-")
            if len(bounds) == 2:
                inside = begin <= int(bounds[0], 16) < begin + len(memory)
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total
