"""Comparing two checkpoints, of whatever formats, block by block."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from holdfast.checkpoint.finding import open_reader
from holdfast.checkpoint.opened import LazyTensor
from holdfast.errors import PathLike, UsageError
from holdfast.formats.base import BLOCK_BYTES, THREAD_BYTES, OpenSettings, Reader
from holdfast.io import parallel
from holdfast.io.buffers import DEFAULT_BUDGET, BufferPool, round_up
from holdfast.io.files import Bytes
from holdfast.io.parallel import Meter, Progress, default_threads
from holdfast.state import names
from holdfast.state.dtypes import DType
from holdfast.state.leaf import Leaf, LeafKind
from holdfast.state.plain_values import plain_values


@dataclass(slots=True)
class TensorDiff:
    """How one tensor differs.

    Attributes
    ----------
    name : str
    elements : int
        Elements of the tensor.
    different : int
        Elements beyond the tolerance; with no tolerance given, elements with other bits.
    largest : float
        The largest absolute difference; NaN against a number counts as infinite.
    """

    name: str
    elements: int
    different: int = 0
    largest: float = 0.0

    @property
    def share(self) -> float:
        """The share of elements that differ."""
        return self.different / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor or plain value that is something else in each checkpoint: a shape, a dtype, a number."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class DiffReport:
    """How two checkpoints differ.

    Attributes
    ----------
    a, b : str
        The paths.
    equal : bool
        Whether nothing differs beyond the tolerance.
    added, removed : list of str
        Tensors that only ``b``, or only ``a``, has.
    reshaped, retyped : list of Mismatch
        Tensors of another shape, or of the same shape and another dtype.
    changed : list of TensorDiff
        Tensors with other values, most changed first.
    identical : int
        How many tensors are the same, within the tolerance.
    values : list of Mismatch
        Plain values that differ; None where a checkpoint does not have it.
    """

    a: str
    b: str
    equal: bool
    added: list[str]
    removed: list[str]
    reshaped: list[Mismatch]
    retyped: list[Mismatch]
    changed: list[TensorDiff]
    identical: int
    values: list[Mismatch]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, as ``--json`` prints it."""
        changed = [{**asdict(found), "share": found.share} for found in self.changed]
        return {**asdict(self), "changed": changed}


@dataclass(frozen=True, slots=True)
class _Tolerance:
    atol: float
    rtol: float
    exact: bool = field(init=False)

    def __post_init__(self) -> None:
        for value in (self.atol, self.rtol):
            if not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"a tolerance of {value} makes no sense", remedy="give a number of 0 or more")
        object.__setattr__(self, "exact", self.atol == 0 and self.rtol == 0)


def diff(
    a: PathLike,
    b: PathLike,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    select: str | Iterable[str] | None = None,
    verify: bool = True,
    progress: Progress | None = None,
    threads: int | None = None,
    memory_budget: int = DEFAULT_BUDGET,
) -> DiffReport:
    """Compare two checkpoints of any formats; tensors are matched by name.

    Parameters
    ----------
    a, b : path-like
    atol, rtol : float
        Elements are the same when ``|a - b| <= atol + rtol * |b|``. With both 0 their bits are compared, so that a NaN
        equals itself and -0.0 differs from 0.0.
    select : str or list of str, optional
        Globs on the names; only these tensors are compared, and no plain values.
    verify : bool
        Check what is read against its checksums.
    progress, threads, memory_budget
        As for `load`.

    Returns
    -------
    DiffReport

    Raises
    ------
    CorruptCheckpointError, NotACheckpointError, UnsupportedError, StoreError, UsageError
    """
    tolerance = _Tolerance(atol, rtol)
    with BufferPool(memory_budget) as pool, _open_both(a, b, OpenSettings(verify=verify, pool=pool)) as (left, right):
        first, second = _chosen(left, right, select)
        common = [name for name in first if name in right.entries and name in second]
        reshaped = [_mismatch(left, right, n, "shape") for n in common if _attribute(left, right, n, "shape")]
        moved = {mismatch.name for mismatch in reshaped}
        retyped = [
            _mismatch(left, right, n, "dtype") for n in common if n not in moved and _attribute(left, right, n, "dtype")
        ]
        moved |= {mismatch.name for mismatch in retyped}
        found = _compare(left, right, [n for n in common if n not in moved], tolerance, threads, pool, progress)
        changed = sorted((d for d in found if d.different), key=lambda d: (-d.share, d.name))
        values = _values(left, right) if select is None else []
        added = [name for name in second if name not in left.entries]
        removed = [name for name in first if name not in right.entries]
        return DiffReport(
            a=os.fspath(a),
            b=os.fspath(b),
            equal=not (added or removed or reshaped or retyped or changed or values),
            added=added,
            removed=removed,
            reshaped=reshaped,
            retyped=retyped,
            changed=changed,
            identical=len(found) - len(changed),
            values=values,
        )


@contextmanager
def _open_both(a: PathLike, b: PathLike, settings: OpenSettings) -> Iterator[tuple[Reader, Reader]]:
    with open_reader(a, settings) as left, open_reader(b, settings) as right:
        yield left, right


def _chosen(left: Reader, right: Reader, select: str | Iterable[str] | None) -> tuple[dict[str, None], dict[str, None]]:
    if select is None:
        return dict.fromkeys(left.entries), dict.fromkeys(right.entries)
    wanted = set(names.select([*left.entries, *right.entries], select))
    first, second = (dict.fromkeys(n for n in reader.entries if n in wanted) for reader in (left, right))
    return first, second


def _attribute(left: Reader, right: Reader, name: str, attribute: str) -> bool:
    return bool(getattr(left.entries[name], attribute) != getattr(right.entries[name], attribute))


def _mismatch(left: Reader, right: Reader, name: str, attribute: str) -> Mismatch:
    shown = [getattr(reader.entries[name], attribute) for reader in (left, right)]
    return Mismatch(name, *(value.name if isinstance(value, DType) else list(value) for value in shown))


def _values(left: Reader, right: Reader) -> list[Mismatch]:
    first, second = plain_values(left.flat.skeleton), plain_values(right.flat.skeleton)
    both = dict.fromkeys([*first, *second])
    # The nodes of the skeleton are compared, which hold floats bit for bit.
    return [Mismatch(n, first.get(n), second.get(n)) for n in both if first.get(n, both) != second.get(n, both)]


def _compare(
    left: Reader,
    right: Reader,
    common: list[str],
    tolerance: _Tolerance,
    threads: int | None,
    pool: BufferPool,
    progress: Progress | None,
) -> list[TensorDiff]:
    found = {n: TensorDiff(n, left.entries[n].nbytes // left.entries[n].dtype.itemsize) for n in common}
    # A view is compared with what it looks into, unless the other side stores it as a tensor of its own.
    stored = [n for n in common if n in left.flat.leaves and n in right.flat.leaves]
    views = [n for n in common if n not in stored]
    meter = Meter(sum(left.entries[n].nbytes for n in stored), progress)
    lock = threading.Lock()

    def task(name: str, start: int, stop: int) -> None:
        aside = round_up(stop - start)
        with pool.acquire(2 * aside) as buffer:
            one, other = buffer[: stop - start], buffer[aside : aside + stop - start]
            left.read(name, start, stop, one)
            right.read(name, start, stop, other)
            count, largest = _differences(one, other, left.entries[name].dtype, tolerance)
        with lock:
            found[name].different += count
            found[name].largest = max(found[name].largest, largest)
        meter.add(stop - start)

    tasks = (
        functools.partial(task, name, start, min(start + BLOCK_BYTES, left.entries[name].nbytes))
        for name in stored
        for start in range(0, left.entries[name].nbytes, BLOCK_BYTES)
    )
    parallel.run(tasks, pool.threads(threads or default_threads(), THREAD_BYTES))
    for name in views:
        _compare_view(left, right, found[name], tolerance)
    return list(found.values())


def _compare_view(left: Reader, right: Reader, found: TensorDiff, tolerance: _Tolerance) -> None:
    a, b = left.flat.aliases.get(found.name), right.flat.aliases.get(found.name)
    if a is not None and a == b and a.of in right.flat.leaves:
        return  # the same view of a tensor that is compared itself
    one, other = (_whole(reader, found.name) for reader in (left, right))
    found.different, found.largest = _differences(one, other, left.entries[found.name].dtype, tolerance)


def _whole(reader: Reader, name: str) -> Bytes:
    kind: LeafKind = "tensor" if reader.entries[name].dtype.has_torch else "ndarray"
    leaf = Leaf.of(name, LazyTensor(reader, name, kind).load())
    assert leaf is not None
    out = np.empty(leaf.nbytes, np.uint8)
    leaf.read(0, leaf.nbytes, out)
    return out


def _differences(one: Bytes, other: Bytes, dtype: DType, tolerance: _Tolerance) -> tuple[int, float]:
    """Return how many elements differ, and by how much at most."""
    if np.array_equal(one, other):
        return 0, 0.0
    width = dtype.itemsize
    if width == 16:
        unlike = (one.view(np.uint64) != other.view(np.uint64)).reshape(-1, 2).any(axis=1)
    else:
        unlike = one.view(f"u{width}") != other.view(f"u{width}")
    places = np.flatnonzero(unlike)
    x, y = (_numbers(data, dtype, places) for data in (one, other))
    with np.errstate(all="ignore"):
        distance = np.abs(x - y)
        distance[np.isnan(distance) & ~(np.isnan(x) & np.isnan(y))] = np.inf
        distance[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
        if tolerance.exact:
            return len(places), float(distance.max())
        beyond = ~(distance <= tolerance.atol + tolerance.rtol * np.abs(y))
    return int(beyond.sum()), float(distance.max())


def _numbers(data: Bytes, dtype: DType, places: np.ndarray[Any, np.dtype[np.intp]]) -> Any:
    """Return the elements at some places as float64 (complex128 for complex ones)."""
    if dtype.has_numpy:
        picked = data.view(dtype.numpy)[places]
        return picked.astype(np.complex128 if dtype.kind == "complex" else np.float64)
    if dtype.kind == "complex":
        halves = data.view(np.float16).reshape(-1, 2)[places].astype(np.float64)
        return halves[:, 0] + 1j * halves[:, 1]
    return data[places].astype(np.float64)
