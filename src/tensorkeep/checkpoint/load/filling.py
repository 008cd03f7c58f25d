"""Reading one tensor, or some of its rows, whether it is stored itself or a view of one that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tensorkeep.errors import CorruptCheckpointError, PathLike
from tensorkeep.formats.base import Reader
from tensorkeep.io.buffers import BufferPool
from tensorkeep.state.aliases import make_view
from tensorkeep.state.leaf import Leaf, LeafKind, allocate


def run_of(reader: Reader, name: str) -> tuple[str, int] | None:
    """Return the stored tensor that a tensor lies in and the byte at which it begins there.

    None for a view whose elements do not follow one another: a transposed one, a column, an expanded row.
    """
    alias = reader.flat.aliases.get(name)
    if alias is None:
        return name, 0
    return (alias.of, alias.offset_elements * reader.entries[name].dtype.itemsize) if alias.is_contiguous else None


def fill(reader: Reader, name: str, leaf: Leaf, pool: BufferPool, *, start: int = 0) -> None:
    """Fill a leaf with the bytes of a tensor from ``start`` on, in this thread.

    Of a view whose elements do not follow one another, the whole tensor that it looks into is loaded.

    Parameters
    ----------
    leaf : Leaf
        Of any kind, device and memory layout, and of the tensor's dtype.
    start : int
        A multiple of the item size; 0 unless `run_of` finds a run.
    """
    run = run_of(reader, name)
    if run is None:
        kind: LeafKind = "tensor" if leaf.is_torch else "ndarray"
        copy_range(strided_view(reader, name, kind, pool), 0, leaf, pool)
        return
    stored, offset = run
    host = leaf.host_bytes()
    first = offset + start
    for begin, end in _grid(first, first + leaf.nbytes, reader.block_bytes(stored)):
        if host is not None:
            reader.read(stored, begin, end, host[begin - first : end - first])
        else:
            with pool.acquire(end - begin) as buffer:
                reader.read(stored, begin, end, buffer[: end - begin])
                leaf.write(begin - first, end - first, buffer[: end - begin])


def strided_view(reader: Reader, name: str, kind: LeafKind, pool: BufferPool) -> Leaf:
    """Return a view whose elements do not follow one another, of new memory for all that it looks into."""
    alias, entry = reader.flat.aliases[name], reader.entries[name]
    shape = reader.flat.leaves[alias.of].shape
    base = Leaf(alias.of, kind, entry.dtype, allocate(kind, entry.dtype, shape))
    fill(reader, alias.of, base, pool)
    return Leaf(name, kind, entry.dtype, make_view(base.array, alias))


def copy_range(source: Leaf, start: int, target: Leaf, pool: BufferPool) -> None:
    """Fill a leaf from the bytes of another from ``start`` on, a piece at a time."""
    step = 4 * 1024**2
    for begin, end in _grid(0, target.nbytes, step):
        with pool.acquire(end - begin) as buffer:
            source.read(start + begin, start + end, buffer[: end - begin])
            target.write(begin, end, buffer[: end - begin])


@contextmanager
def structure_of(path: PathLike) -> Iterator[None]:
    """Turn the `ValueError` of a structure that cannot be rebuilt into CorruptCheckpointError."""
    try:
        yield
    except (ValueError, TypeError, OverflowError) as error:
        raise CorruptCheckpointError(
            f"its structure cannot be rebuilt ({error})", path=path, remedy="take another checkpoint or copy"
        ) from error


def _grid(start: int, stop: int, step: int) -> Iterable[tuple[int, int]]:
    """Yield the range cut at the multiples of ``step``."""
    while start < stop:
        end = min((start // step + 1) * step, stop)
        yield start, end
        start = end
