"""Fixtures of the fault tests: which of many places to break, and a real file system that is small enough to fill."""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

Choose = Callable[[int], Sequence[int]]
"""Return the indices to break, of so many."""

STRIDE = 17


def every(count: int) -> Sequence[int]:
    return range(count)


def sample(count: int) -> Sequence[int]:
    """Return about one index of 17, the first and the last two always among them."""
    return sorted({0, *range(STRIDE // 2, count, STRIDE), count - 2, count - 1} & set(range(count)))


@pytest.fixture(
    params=[pytest.param(sample, id="sample"), pytest.param(every, id="exhaustive", marks=pytest.mark.slow)]
)
def choose(request: pytest.FixtureRequest) -> Choose:
    """A fixed sample in `make test`; in `make torture`, all of them as well."""
    chosen: Choose = request.param
    return chosen


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB; skips where mounting is not permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
