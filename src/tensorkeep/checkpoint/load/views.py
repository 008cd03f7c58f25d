"""Reading one tensor, or some rows of it, whether it is stored itself or a view of a stored tensor."""

from __future__ import annotations

from tensorkeep.checkpoint.load.ranges import grid
from tensorkeep.errors import CorruptCheckpointError
from tensorkeep.formats.base import Reader
from tensorkeep.io.buffers import BufferPool
from tensorkeep.state.aliases import make_view
from tensorkeep.state.leaf import Leaf, LeafKind, allocate

_COPY_BYTES = 4 * 1024**2


def contiguous_in(reader: Reader, name: str) -> tuple[str, int] | None:
    """Return the stored tensor that a tensor lies in and the byte at which it begins there.

    None for a view that is not contiguous: a transposed tensor, a column, an expanded row.
    """
    alias = reader.flat.aliases.get(name)
    if alias is None:
        return name, 0
    return (alias.of, alias.offset_elements * reader.entries[name].dtype.itemsize) if alias.is_contiguous else None


def fill(reader: Reader, name: str, leaf: Leaf, pool: BufferPool, *, start: int = 0) -> None:
    """Fill a leaf with the bytes of a tensor from ``start`` on, in this thread.

    For a view that is not contiguous, the full stored tensor is loaded.

    Parameters
    ----------
    leaf : Leaf
        Of any kind, device and memory layout, and of the tensor's dtype.
    start : int
        A multiple of the item size; 0 for a view that is not contiguous.
    """
    place = contiguous_in(reader, name)
    if place is None:
        copy_range(strided_view(reader, name, "tensor" if leaf.is_torch else "ndarray", pool), 0, leaf, pool)
        return
    stored, offset = place
    host = leaf.host_bytes()
    first = offset + start
    for begin, end in grid(first, first + leaf.nbytes, reader.block_bytes(stored)):
        if host is not None:
            reader.read(stored, begin, end, host[begin - first : end - first])
        else:
            with pool.acquire(end - begin) as buffer:
                reader.read(stored, begin, end, buffer[: end - begin])
                leaf.write(begin - first, end - first, buffer[: end - begin])


def strided_view(reader: Reader, name: str, kind: LeafKind, pool: BufferPool) -> Leaf:
    """Return a view that is not contiguous, having loaded the stored tensor into new memory."""
    alias, entry = reader.flat.aliases[name], reader.entries[name]
    base = Leaf(alias.of, kind, entry.dtype, allocate(kind, entry.dtype, reader.flat.leaves[alias.of].shape))
    fill(reader, alias.of, base, pool)
    try:
        return Leaf(name, kind, entry.dtype, make_view(base.array, alias))
    except (ValueError, TypeError, OverflowError) as error:
        raise CorruptCheckpointError(f"the view cannot be made ({error})", path=reader.path, name=name) from error


def copy_range(source: Leaf, start: int, target: Leaf, pool: BufferPool) -> None:
    """Fill a leaf from the bytes of another one from ``start`` on, 4 MiB at a time."""
    for begin, end in grid(0, target.nbytes, _COPY_BYTES):
        with pool.acquire(end - begin) as buffer:
            source.read(start + begin, start + end, buffer[: end - begin])
            target.write(begin, end, buffer[: end - begin])
