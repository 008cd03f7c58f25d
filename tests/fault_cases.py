"""Fixtures of the fault tests: which of many places to break, and a real file system that is small enough to fill."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

Choose = Callable[[int], Sequence[int]]
"""Return the indices to break, of so many."""

STRIDE = 29


def every(count: int) -> Sequence[int]:
    return range(count)


def sample(count: int) -> Sequence[int]:
    """Return about one index of each stride, the first and the last two always among them."""
    return sorted({0, *range(STRIDE // 2, count, STRIDE), count - 2, count - 1} & set(range(count)))


def some(count: int, start: int = 0, stride: int = STRIDE) -> Sequence[int]:
    """Return one index of each stride, the first in the first half, and the last one; tests differ in their start."""
    return sorted({*range(start % min(stride, count // 2 or 1), count, stride), count - 1})


def swept(*axes: Mapping[str, object], stride: int = STRIDE) -> list["pytest.ParameterSet"]:
    """Return the combinations of the axes' values, each followed by a `Choose`.

    All combinations with every index are exhaustive. Beside them, each value of the first axis has one combination of
    the others, in turn, and some indices, which differ, so that all tests together try most of them.
    """
    everything, part = [], []
    others = [*itertools.product(*(axis.items() for axis in axes[1:]))]
    for number, (first, (place, rest)) in enumerate(itertools.product(axes[0].items(), enumerate(others))):
        names, values = zip(first, *rest, strict=True)
        everything.append(pytest.param(*values, every, id="-".join((*names, "every")), marks=pytest.mark.exhaustive))
        if place == number // len(others) % len(others):
            part.append(pytest.param(*values, partial(some, start=number, stride=stride), id="-".join(names)))
    return part + everything


@pytest.fixture(
    params=[pytest.param(sample, id="sample"), pytest.param(every, id="exhaustive", marks=pytest.mark.exhaustive)]
)
def choose(request: pytest.FixtureRequest) -> Choose:
    """A fixed sample in `make test`; in `make torture`, all of them as well."""
    return request.param


@pytest.fixture
def chosen(choose: Choose, record_property: Callable[[str, object], None]) -> Choose:
    """Choose as ``choose`` of the test does, and record how many cases there are."""

    def chosen(count: int) -> Sequence[int]:
        found = choose(count)
        record_property("cases", len(found))
        return found

    return chosen


def copy_tree(source: Path, target: Path) -> None:
    """Copy a file, or a folder whose files may be links to each other."""
    copies: dict[int, str] = {}

    def copy(file: str, to: str) -> None:
        first = copies.setdefault(os.stat(file).st_ino, to)
        shutil.copyfile(file, to) if first == to else os.link(first, to)

    shutil.copytree(source, target, copy_function=copy) if source.is_dir() else copy(str(source), str(target))


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


def fill(disk: Path) -> None:
    """Fill a small disk up to the last page."""
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
