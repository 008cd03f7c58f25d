"""`tensorkeep.diff`, and the arithmetic of a comparison: float64, a piece at a time."""

import functools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tensorkeep.checkpoint.info import json_value
from tensorkeep.checkpoint.options import AllowOption, MemorySize, ProgressOption, drawn, open_settings, thread_count
from tensorkeep.checkpoint.ranges import contiguous_in, grid, reading_threads, strided_view
from tensorkeep.errors import PathLike, UsageError
from tensorkeep.formats.base import BLOCK_BYTES, Entry, Reader, RenamedReader
from tensorkeep.formats.finding import open_reader
from tensorkeep.runs.address import checkpoint_path
from tensorkeep.state import names
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import Bytes, LeafKind
from tensorkeep.state.tree import PlainValue, leaf_paths, plain_values, value_of
from tensorkeep.storage import parallel
from tensorkeep.storage.buffers import DEFAULT_BUDGET, BufferPool
from tensorkeep.storage.parallel import Meter, Progress

# The arithmetic of a comparison: how far two ranges of numbers are apart, in float64, a piece at a time.

# Elements that are compared at once: float64 results of this size stay in the cache, and need no new pages.
_PIECE = 2**13


class Tolerance(NamedTuple):
    """Elements are the same when ``|a - b| <= atol + rtol * |b|``; with both 0 their bits are compared."""

    atol: float
    rtol: float


class Distances(NamedTuple):
    """Sums over a range: |a - b|^2, |a|^2, |b|^2 and a * b of the elements that are finite on both sides."""

    different: int = 0  # elements
    largest: float = 0.0  # distance
    difference: float = 0.0
    first: float = 0.0
    second: float = 0.0
    dot: float = 0.0

    @staticmethod
    def total(parts: Iterable["Distances"]) -> "Distances":
        columns = tuple(zip(Distances(), *parts, strict=True))
        # `fsum` rounds once, so that the sums do not depend on the order of the threads.
        sums = (math.inf if math.inf in column else math.fsum(column) for column in columns[2:])
        return Distances(sum(columns[0]), max(columns[1]), *sums)


def distances(one: Bytes, other: Bytes, dtypes: tuple[DType, DType], tolerance: Tolerance) -> Distances | None:
    """None if the dtypes and bits are the same."""
    a, b = dtypes
    if a == b and all(np.array_equal(x, y) for x, y in _pieces(one, other, dtypes)):
        # Most blocks of two close checkpoints are equal, and comparing bits is much faster than arithmetic.
        return None
    return Distances.total([_of_piece(x, y, dtypes, tolerance) for x, y in _pieces(one, other, dtypes)])


def norm_of_equal(data: Bytes, dtype: DType) -> Distances:
    same = dtype, dtype
    return Distances.total([_of_piece(x, x, same, Tolerance(0, 0)) for x, _ in _pieces(data, data, same)])


def _pieces(one: Bytes, other: Bytes, dtypes: tuple[DType, DType]) -> Iterator[tuple[Bytes, Bytes]]:
    a, b = (_PIECE * dtype.itemsize for dtype in dtypes)
    for index in range(-(-len(one) // a)):
        yield one[index * a : (index + 1) * a], other[index * b : (index + 1) * b]


def _of_piece(one: Bytes, other: Bytes, dtypes: tuple[DType, DType], tolerance: Tolerance) -> Distances:
    a, b = dtypes
    x, y = _numbers(one, a), _numbers(other, b)
    # NaN and infinities are expected, and handled below.
    with np.errstate(all="ignore"):
        first, second = _dot(x, x), _dot(y, y)
        # The sums of squares show it in one pass. They may overflow as well: then the slow way is only slower.
        all_finite = math.isfinite(first + second)
        if a == b and a.itemsize == 8 and a.kind in ("int", "uint"):
            distance = _of_long_integers(one.view(a.numpy), other.view(a.numpy))
        else:
            distance = np.abs(x - y) if all_finite else _of_numbers(x, y)
        if any(tolerance):
            within = distance <= tolerance.atol + tolerance.rtol * np.abs(y)
            # An infinity is within the tolerance of nothing else, whatever the tolerance times infinity is.
            different = (distance != 0) & ~(within & np.isfinite(distance))
        else:
            different = _unlike(one, other, a.itemsize) if a == b else distance != 0
        if not all_finite:
            # An infinity or NaN on one side only has an infinite distance, and so the sum is infinite.
            finite = np.isfinite(x) & np.isfinite(y)
            x, y = np.where(finite, x, 0), np.where(finite, y, 0)
            first, second = _dot(x, x), _dot(y, y)
        squares, dot = _dot(distance, distance), _dot(x, y)
        return Distances(int(np.count_nonzero(different)), float(distance.max()), squares, first, second, dot)


def _unlike(one: Bytes, other: Bytes, width: int) -> Any:
    # numpy has no integers of 16 bytes.
    if width == 16:
        return (one.view(np.uint64) != other.view(np.uint64)).reshape(-1, 2).any(axis=1)
    return one.view(f"u{width}") != other.view(f"u{width}")


def _of_long_integers(x: Any, y: Any) -> Any:
    """|x - y| as float64. The subtraction is exact: float64 has no integers beyond 2**53."""
    # Modulo 2**64 the difference of the larger and the smaller is exact, whatever the signs.
    return (np.maximum(x, y).view(np.uint64) - np.minimum(x, y).view(np.uint64)).astype(np.float64)


def _of_numbers(x: Any, y: Any) -> Any:
    """|x - y|, which is 0 for two NaN, and infinite for NaN against a number."""
    distance = np.abs(x - y)
    nan = np.isnan(x) & np.isnan(y)
    distance[np.isnan(distance) & ~nan] = np.inf
    # Equal infinities: their difference is NaN.
    distance[(x == y) | nan] = 0.0
    return distance


def _dot(x: Any, y: Any) -> float:
    """The sum of products; of complex numbers, its real part."""
    if np.iscomplexobj(x) or np.iscomplexobj(y):
        return _dot(x.real, y.real) + _dot(x.imag, y.imag)
    # Unlike `np.dot`, without threads of its own beside ours.
    return float(np.einsum("i,i->", x, y))


def _numbers(data: Bytes, dtype: DType) -> Any:
    if dtype.has_numpy:
        return data.view(dtype.numpy).astype(np.complex128 if dtype.kind == "complex" else np.float64)
    # complex32: numpy has no such dtype, but has its halves.
    if dtype.kind == "complex":
        halves = data.view(np.float16).reshape(-1, 2).astype(np.float64)
        return halves[:, 0] + 1j * halves[:, 1]
    return data.astype(np.float64)


# Comparing the tensors of two checkpoints in parallel: how many elements differ, and by how much.

# Raw bytes of a range of a view, which need not be aligned to blocks.
_CUT_BYTES = 4 * 1024**2
# Reads a range of a tensor's raw bytes.
_Reading = Callable[[int, int, Bytes], None]


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """How one tensor differs, or the tensors of one layer together.

    ``different`` of its ``elements`` are beyond the tolerance; with no tolerance given, they have other bits. All else
    is computed in float64.

    Together, tensors of floating point and complex numbers are not mixed with integers, such as random states, nor with
    scalars: if there are any, distances and norms are theirs alone, while ``elements`` and ``different`` count every
    tensor.

    Attributes
    ----------
    scalar : bool
        Whether it is a tensor without dimensions, such as a step counter of Adam.
    floating : bool
        Whether distances and norms were computed on floating point or complex numbers, rather than on integers.
    largest : float
        The largest absolute difference, infinite for NaN against a number.
    norm_a, norm_b, norm_difference, dot : float
        The L2 norms of a, b and a - b, and the dot product of a and b, over the elements that are finite in both; an
        infinity or NaN against another value makes ``norm_difference`` infinite. All are 0 for equal tensors.
    """

    name: str
    elements: int
    different: int = 0
    largest: float = 0.0
    norm_a: float = 0.0
    norm_b: float = 0.0
    norm_difference: float = 0.0
    dot: float = 0.0
    floating: bool = True
    scalar: bool = False

    @property
    def share(self) -> float:
        """The fraction of elements that differ."""
        return self.different / self.elements if self.elements else 0.0

    @property
    def relative_l2(self) -> float:
        """The relative L2 difference ``||a - b|| / ||a||``; infinite if only a is 0."""
        if self.norm_difference in (0, math.inf):
            return self.norm_difference
        return self.norm_difference / self.norm_a if self.norm_a else math.inf

    @property
    def cosine(self) -> float | None:
        """The cosine similarity of a and b; None if a or b is 0."""
        product = self.norm_a * self.norm_b
        return max(-1.0, min(1.0, self.dot / product)) if product and math.isfinite(product) else None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, with what follows from them."""
        return {**asdict(self), "share": self.share, "relative_l2": self.relative_l2, "cosine": self.cosine}


def together(name: str, tensors: Iterable[TensorDiff]) -> TensorDiff:
    """Return how several tensors differ; distances count those of floating point and several elements, if any."""
    found = list(tensors)
    floating = [each for each in found if each.floating]
    # A counter would outweigh all weights of a layer.
    measured = [each for each in floating if not each.scalar] or floating or found
    return TensorDiff(
        name,
        elements=sum(each.elements for each in found),
        different=sum(each.different for each in found),
        largest=max((each.largest for each in measured), default=0.0),
        norm_a=math.hypot(*(each.norm_a for each in measured)),
        norm_b=math.hypot(*(each.norm_b for each in measured)),
        norm_difference=math.hypot(*(each.norm_difference for each in measured)),
        dot=math.fsum(each.dot for each in measured),
        floating=all(each.floating for each in measured),
        scalar=all(each.scalar for each in found),
    )


def compare(
    left: Reader,
    right: Reader,
    common: list[str],
    tolerance: Tolerance,
    threads: int,
    pool: BufferPool,
    progress: Progress | None,
) -> list[TensorDiff]:
    """Compare tensors that both checkpoints have with equal shapes. Different dtypes are compared by value."""

    # Both have the same view of a stored tensor that is compared itself.
    def is_same_view(name: str) -> bool:
        alias = left.flat.aliases.get(name)
        same_type = left.entries[name].dtype == right.entries[name].dtype
        return alias is not None and alias == right.flat.aliases.get(name) and alias.of in compared and same_type

    compared = set(common)
    comparison = _Comparison(left, right, tolerance, pool)
    separate = [name for name in common if not is_same_view(name)]
    full = dict.fromkeys(name for name in separate if _is_full(left, name) and _is_full(right, name))
    meter = Meter(sum(left.entries[name].nbytes for name in separate), progress)
    usable = reading_threads(threads, pool, left, right)
    parallel.run(
        (
            functools.partial(comparison.read_and_add, name, start, stop, meter)
            for name in full
            for start, stop in grid(0, _elements(left.entries[name]), BLOCK_BYTES // comparison.widest(name))
        ),
        usable,
    )
    for name in (name for name in separate if name not in full):
        comparison.add_view(name, meter)
    # The norm of a tensor that has changed includes the ranges that have not.
    parallel.run(
        (
            functools.partial(comparison.add_equal, name, start, stop)
            for name, ranges in comparison.equal.items()
            if any(part.different for _, part in comparison.parts[name])
            for start, stop in ranges
        ),
        usable,
    )
    # In the order of the state, whichever thread was first.
    return [comparison.result(name) for name in common]


class _Comparison:
    def __init__(self, left: Reader, right: Reader, tolerance: Tolerance, pool: BufferPool) -> None:
        self.left, self.right = left, right
        self._tolerance = tolerance
        self._pool = pool
        self._lock = threading.Lock()
        self.parts: dict[str, list[tuple[int, Distances]]] = {name: [] for name in left.entries}
        self.equal: dict[str, list[tuple[int, int]]] = {}

    def dtypes(self, name: str) -> tuple[DType, DType]:
        return self.left.entries[name].dtype, self.right.entries[name].dtype

    def widest(self, name: str) -> int:
        return max(dtype.itemsize for dtype in self.dtypes(name))

    def read_and_add(self, name: str, start: int, stop: int, meter: Meter) -> None:
        one, other = _reading(self.left, name, self._pool), _reading(self.right, name, self._pool)
        with self._pool.acquire(2 * BLOCK_BYTES) as buffer:
            part = self._distances(name, one, other, start, stop, (buffer[:BLOCK_BYTES], buffer[BLOCK_BYTES:]))
        # The threads of one tensor end in any order; `result` sorts the parts.
        with self._lock:
            if part is None:
                self.equal.setdefault(name, []).append((start, stop))
            else:
                self.parts[name].append((start, part))
        meter.add((stop - start) * self.dtypes(name)[0].itemsize)

    def add_view(self, name: str, meter: Meter) -> None:
        # For a range that cuts blocks, the reader also holds the full blocks: short ranges, one at a time.
        buffers = np.empty(_CUT_BYTES, np.uint8), np.empty(_CUT_BYTES, np.uint8)
        one, other = _reading(self.left, name, self._pool), _reading(self.right, name, self._pool)
        dtype, _ = self.dtypes(name)
        for start, stop in grid(0, _elements(self.left.entries[name]), _CUT_BYTES // self.widest(name)):
            part = self._distances(name, one, other, start, stop, buffers)
            equal = None if part else norm_of_equal(buffers[0][: (stop - start) * dtype.itemsize], dtype)
            self.parts[name].append((start, part or equal or Distances()))
            meter.add((stop - start) * dtype.itemsize)

    def add_equal(self, name: str, start: int, stop: int) -> None:
        dtype, _ = self.dtypes(name)
        size = dtype.itemsize
        with self._pool.acquire(BLOCK_BYTES) as buffer:
            data = buffer[: (stop - start) * size]
            _reading(self.left, name, self._pool)(start * size, stop * size, data)
            part = norm_of_equal(data, dtype)
        with self._lock:
            self.parts[name].append((start, part))

    def _distances(
        self, name: str, one: _Reading, other: _Reading, start: int, stop: int, buffers: tuple[Bytes, Bytes]
    ) -> Distances | None:
        a, b = (dtype.itemsize for dtype in self.dtypes(name))
        first, second = buffers[0][: (stop - start) * a], buffers[1][: (stop - start) * b]
        one(start * a, stop * a, first)
        other(start * b, stop * b, second)
        return distances(first, second, self.dtypes(name), self._tolerance)

    def result(self, name: str) -> TensorDiff:
        total = Distances.total(part for _, part in sorted(self.parts[name]))
        elements = _elements(self.left.entries[name])
        return TensorDiff(
            name,
            elements,
            total.different,
            total.largest,
            norm_a=math.sqrt(total.first),
            norm_b=math.sqrt(total.second),
            norm_difference=math.sqrt(total.difference),
            dot=total.dot,
            floating=any(dtype.kind in ("float", "complex") for dtype in self.dtypes(name)),
            scalar=not self.left.entries[name].shape,
        )


def _elements(entry: Entry) -> int:
    return entry.nbytes // entry.dtype.itemsize


def _is_full(reader: Reader, name: str) -> bool:
    alias = reader.flat.aliases.get(name)
    return alias is None or alias.is_full(reader.flat.leaves[alias.of].shape)


def _reading(reader: Reader, name: str, pool: BufferPool) -> _Reading:
    """A function that reads any tensor; for a strided view, the stored tensor is loaded first."""
    place = contiguous_in(reader, name)
    if place is not None:
        stored, offset = place
        return lambda start, stop, out: reader.read(stored, offset + start, offset + stop, out)
    kind: LeafKind = "tensor" if reader.entries[name].dtype.has_torch else "ndarray"
    # torch has no negative strides.
    if min(reader.flat.aliases[name].strides, default=0) < 0:
        kind = "ndarray"
    return strided_view(reader, name, kind, pool).read


# `tensorkeep.diff`: compare two checkpoints of any formats, tensor by tensor.


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A shape, dtype or plain value that is not the same in both checkpoints."""

    name: str
    a: Any
    b: Any

    @property
    def texts(self) -> tuple[str, str]:
        """Both values as texts, ``absent`` for one that a checkpoint does not have."""
        texts = _text(self.a), _text(self.b)
        # The text "1" and the number 1.
        return texts if texts[0] != texts[1] else (_text(self.a, repr), _text(self.b, repr))

    def as_dict(self) -> dict[str, Any]:
        """Return the mismatch as plain values; a value that JSON does not have is a text."""
        return {"name": self.name, "a": json_value(self.a), "b": json_value(self.b)}


def _text(value: Any, write: Callable[[Any], str] = str) -> str:
    if value is None:
        return "absent"
    return write(value) if isinstance(value, str) else repr(value)


@dataclass(frozen=True, slots=True)
class DiffReport:
    """How two checkpoints differ; ``bool(report)`` is its ``equal``, so true if they do not.

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
    changed, identical : list of TensorDiff, int
        Tensors with other values, the largest relative L2 difference first, scalars and then integers last, and how
        many are the same, within the tolerance.
    values : list of Mismatch
        Plain values that differ in type or in a bit, as they are in the state (an enum by its name); None if a
        checkpoint does not have it, and ``"None"`` for a None that was saved. For containers or tensors of different
        kinds (a list and a tuple, a tensor and an array), their kinds. An OrderedDict counts as a dict, a parameter as
        a tensor.
    converted : list of TensorDiff
        The values of the tensors in ``retyped``, compared as numbers.
    placeholders : list of str
        Values that cannot be read from one of the checkpoints, or both (see `Placeholder`). They are not compared, and
        so count as a difference; with ``select`` they are left out.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> for name, value in (("a", 0.0), ("b", 0.5)):
    ...     _ = tensorkeep.save({"model": {"w": torch.full((4,), value)}}, f"{folder.name}/{name}")
    >>> report = tensorkeep.diff(f"{folder.name}/a", f"{folder.name}/b")
    >>> bool(report), report.total.different, [layer.name for layer in report.by_layer()]
    (False, 4, ['model'])
    >>> folder.cleanup()
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
    converted: list[TensorDiff] = field(default_factory=list)
    placeholders: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.equal

    def as_dict(self, *, depth: int | None = None) -> dict[str, Any]:
        """Return the report as plain values, as ``--json`` prints it, with the layers of `by_layer`."""
        return {
            **asdict(self),
            "values": [found.as_dict() for found in self.values],
            "changed": [found.as_dict() for found in self.changed],
            "converted": [found.as_dict() for found in self.converted],
            "total": self.total.as_dict(),
            "layers": [found.as_dict() for found in self.by_layer(depth)],
        }

    @property
    def total(self) -> TensorDiff:
        """How the changed tensors differ together; distances count floating point tensors only, if there are any."""
        return together("", self.changed)

    @property
    def summary(self) -> str:
        """How many tensors are changed, reshaped, of another dtype, added, removed and identical, as text."""
        counts = (
            (len(self.changed), "changed"),
            (len(self.reshaped), "reshaped"),
            (len(self.retyped), "of another dtype"),
            (len(self.added), "added"),
            (len(self.removed), "removed"),
            (self.identical, "identical"),
        )
        return ", ".join(f"{count:,} {what}" for count, what in counts if count) or "no tensors"

    def folded(self) -> list[TensorDiff]:
        """Return the changed tensors, with counters and random states of one part of the state together.

        Scalars fold by the last component of their names (``optimizer.*.step``), tensors of integers if their part of
        the state has no others (``random.*``).
        """
        with_floats = {found.name.partition(".")[0] for found in self.changed if found.floating}
        folds: dict[str, list[TensorDiff]] = {}
        for found in self.changed:
            part, _, rest = found.name.partition(".")
            name = found.name
            if found.scalar and part in with_floats:
                name = f"{part}.*.{rest.rpartition('.')[2]}"
            elif part not in with_floats:
                name = f"{part}.*"
            folds.setdefault(name, []).append(found)
        every = (each[0] if len(each) == 1 else together(name, each) for name, each in folds.items())
        return sorted(every, key=most_changed_first)

    def by_layer(self, depth: int | None = None) -> list[TensorDiff]:
        """Return how the changed tensors differ together, layer by layer, in the order of ``changed``; see `total`.

        A layer is named by the first ``depth`` components of the names of its tensors: by default up to the first
        number (``model.blocks.3``), or without a number by all but the last component (``model.head``).
        """
        layers: dict[str, list[TensorDiff]] = {}
        for found in self.changed:
            layers.setdefault(layer_of(found.name, depth), []).append(found)
        return sorted((together(name, found) for name, found in layers.items()), key=most_changed_first)


def diff(
    a: PathLike,
    b: PathLike,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    select: str | Iterable[str] | None = None,
    verify: bool = True,
    progress: ProgressOption = None,
    threads: int | None = None,
    memory_budget: MemorySize = DEFAULT_BUDGET,
    allow: AllowOption = None,
) -> DiffReport:
    """Compare two checkpoints of any formats; tensors are matched by name, or by the same keys.

    Tensors with equal bits need no arithmetic. Tensors of different dtypes differ, and their values are compared as
    numbers.

    Parameters
    ----------
    a, b : path-like
        Checkpoints, or steps of runs such as ``"run"`` or ``"run@1200"``; see `tensorkeep.load`.
    atol, rtol : float
        Elements are the same when ``|a - b| <= atol + rtol * |b|``. With both 0 their bits are compared, so that a NaN
        equals itself and -0.0 differs from 0.0.
    select : str or list of str, optional
        Globs on the names; only these tensors are compared, and no plain values.
    verify, progress, threads, memory_budget, allow : optional
        See `tensorkeep.load`. For a view that is not contiguous, such as a transposed tensor, the full stored tensor
        is loaded beside the buffers, unless both checkpoints have the same view.

    Raises
    ------
    NotFoundError, NotACheckpointError, CorruptCheckpointError, UnsupportedError, StoreError
        As `tensorkeep.load`, for either checkpoint.
    UsageError
        If a tolerance is not valid, or a pattern matches nothing.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> for name, value in (("a", 0.0), ("b", 0.5)):
    ...     _ = tensorkeep.save({"w": torch.full((4,), value), "step": 1}, f"{folder.name}/{name}")
    >>> report = tensorkeep.diff(f"{folder.name}/a", f"{folder.name}/b")
    >>> report.equal, [(found.name, found.different, found.largest) for found in report.changed]
    (False, [('w', 4, 0.5)])
    >>> tensorkeep.diff(f"{folder.name}/a", f"{folder.name}/b", atol=0.5).equal
    True
    >>> folder.cleanup()
    """
    for value in (atol, rtol):
        if not (value >= 0 and math.isfinite(value)):
            raise UsageError(f"a tolerance of {value} is not allowed", remedy="give a finite number of 0 or more")
    count = thread_count(threads)
    settings = open_settings(memory_budget, verify=verify, allow=allow)
    a, b = checkpoint_path(a), checkpoint_path(b)
    with (
        # The pool is closed last: readers may hold its buffers.
        settings.pool as pool,
        open_reader(a, settings) as left,
        open_reader(b, settings) as opened,
        drawn(progress, "comparing") as callback,
    ):
        right = _named_alike(opened, left)
        both = dict.fromkeys([*left.entries, *right.entries])
        chosen = both.keys() if select is None else set(names.select(both, select))
        common = [name for name in left.entries if name in right.entries and name in chosen]
        reshaped, common = _mismatches(left, right, common, lambda entry: list(entry.shape))
        retyped, _ = _mismatches(left, right, common, lambda entry: entry.dtype.name)
        other_types = {mismatch.name for mismatch in retyped}
        compared = compare(left, right, common, Tolerance(atol, rtol), count, pool, callback)
        found = [each for each in compared if each.name not in other_types]
        converted = sorted((each for each in compared if each.name in other_types), key=most_changed_first)
        changed = sorted((each for each in found if each.different), key=most_changed_first)
        values, placeholders = _values(left, right) if select is None else ([], [])
        added = [name for name in right.entries if name in chosen and name not in left.entries]
        removed = [name for name in left.entries if name in chosen and name not in right.entries]
        equal = not (added or removed or reshaped or retyped or changed or values or placeholders)
        identical = len(found) - len(changed)
        a, b = os.fspath(a), os.fspath(b)
        return DiffReport(
            *(a, b, equal, added, removed, reshaped, retyped, changed, identical, values, converted, placeholders)
        )


def _named_alike(reader: Reader, other: Reader) -> Reader:
    """A reader with the names that another one has for the same keys.

    Optimizers are named by parameters or by numbers: an older version, or another format, has numbers.
    """
    theirs, own = ({path: name for name, path in leaf_paths(each.flat.skeleton)} for each in (other, reader))
    # A name may be that of a parameter here and a number there. The keys decide.
    found = {name: theirs[path] for path, name in own.items() if theirs.get(path, name) != name}
    if not found:
        return reader
    names = [found.get(name, name) for name in reader.entries]
    return RenamedReader(reader, found) if len({*names}) == len(names) else reader


def most_changed_first(found: TensorDiff) -> tuple[bool, bool, float, float, str]:
    # Counters, such as the steps of Adam, change more than every weight, and integers have no relative difference.
    return not found.floating, found.scalar, -found.relative_l2, -found.share, found.name


def layer_of(name: str, depth: int | None = None) -> str:
    """Return the layer that a tensor belongs to; see `DiffReport.by_layer`."""
    parts = name.split(".")
    if depth is None:
        number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
        depth = max(len(parts) - 1, 1) if number is None else number + 1
    return ".".join(parts[:depth])


def _mismatches(
    left: Reader, right: Reader, common: list[str], key: Callable[[Entry], object]
) -> tuple[list[Mismatch], list[str]]:
    """The tensors with different shapes or dtypes, and the names of the other tensors."""
    found = [Mismatch(name, key(left.entries[name]), key(right.entries[name])) for name in common]
    return [each for each in found if each.a != each.b], [each.name for each in found if each.a == each.b]


def _values(left: Reader, right: Reader) -> tuple[list[Mismatch], list[str]]:
    """The plain values that differ, and the names of values that cannot be read."""
    first, second = plain_values(left.flat.skeleton), plain_values(right.flat.skeleton)
    found, unread = [], []
    for path in dict.fromkeys([*first, *second]):
        a, b = first.get(path), second.get(path)
        if "placeholder" in (a and a.kind, b and b.kind):
            unread.append((a or b).name)  # type: ignore[union-attr]  # a or b exists
        elif a and b:
            if not a.equals(b):
                found.append(Mismatch(a.name, _value(a), _value(b)))
        # A container that the other one lacks does not differ itself; its values do.
        elif a and a.is_content:
            found.append(Mismatch(a.name, _value(a), None))
        elif b and b.is_content:
            found.append(Mismatch(b.name, None, _value(b)))
    return found, unread


def _value(found: PlainValue) -> Any:
    """A value as the state has it; a None that was saved as a text, because None stands for no value."""
    if found.node is None:
        return "None"
    return value_of(found.node) if found.kind == "plain" else found.node
