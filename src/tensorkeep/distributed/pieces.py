"""Reading boxes of stored tensors in parallel."""

from collections.abc import Sequence

from tensorkeep.checkpoint.load.pages import NewPages
from tensorkeep.checkpoint.load.ranges import copy_range, fill, reads_of
from tensorkeep.formats.base import Reader
from tensorkeep.formats.boxes import box_of
from tensorkeep.formats.write import BLOCK_BYTES, thread_bytes
from tensorkeep.io import parallel
from tensorkeep.io.buffers import BufferPool
from tensorkeep.state import cuda
from tensorkeep.state.leaf import Leaf, allocate
from tensorkeep.state.sharded import Piece


def read_pieces(reader: Reader, pieces: Sequence[Piece], threads: int, pool: BufferPool) -> None:
    """Fill pieces, each with the box of the stored tensor of its name.

    Raises CorruptCheckpointError if a byte is not what was written.
    """
    cuda.wait_for_caller(pieces)
    stored: list[tuple[str, Piece]] = []
    views: list[Piece] = []
    for piece in pieces:
        alias = reader.flat.aliases.get(piece.name)
        if alias is None:
            stored.append((piece.name, piece))
        elif alias.is_full(reader.flat.leaves[alias.of].shape):
            stored.append((alias.of, piece))
        else:
            views.append(piece)
    tasks = (read for name, piece in stored for read, _ in reads_of(reader, name, piece, pool))
    block_bytes = max((reader.block_bytes(name) for name, _ in stored), default=BLOCK_BYTES)
    parallel.run(tasks, pool.threads(threads, thread_bytes(block_bytes, buffers=reader.buffers)))
    cuda.wait_for_copies(pieces)
    for piece in views:
        _fill_from_view(reader, piece, pool)


def _fill_from_view(reader: Reader, piece: Piece, pool: BufferPool) -> None:
    """Fill a piece of a view of a stored tensor, which is loaded in full."""
    full = Leaf(piece.name, "tensor", piece.dtype, allocate("tensor", piece.dtype, piece.whole))
    fill(reader, piece.name, full, pool, NewPages())
    own = full.array[box_of(piece.offsets, piece.shape)]
    copy_range(Leaf(piece.name, "tensor", piece.dtype, own), 0, piece, pool)
