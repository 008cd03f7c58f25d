"""Who writes what: every rank computes the same answer from the tensors that the ranks have together."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from tensorkeep.checkpoint.ranks.outline import BoxKey, MergedTensors
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.sharded import Piece, pieces_of

SPLIT_BYTES = 64 * 1024**2
"""A box that several ranks have is divided among them in runs of rows of at least so many bytes."""


class Share(NamedTuple):
    """What one rank writes of a box that it has: the rows ``start:stop`` of the box; a scalar is one row."""

    name: str
    box: BoxKey
    start: int
    stop: int


def assign(merged: MergedTensors, ranks: int, own: int) -> list[Share]:
    """Return what rank ``own`` writes, so that everything is written once, by ranks with about the same bytes in all.

    A box that one rank has is written by it. Those that several ranks have follow, the largest first, each by the rank
    of them that has the least to write; large ones are divided. Ties are decided by name and rank, and so in the same
    way in every save.
    """
    load = [0] * ranks
    shares: list[Share] = []
    shared: list[tuple[int, list[int], Share]] = []
    for name, boxes in merged.boxes.items():
        tensor = merged.tensors[name]
        itemsize, count = BY_NAME[tensor.dtype].itemsize, len(tensor.shape)
        for box, owners in boxes.items():
            sizes = box[count:]
            nbytes = prod(sizes) * itemsize
            rows = sizes[0] if sizes else 1
            if len(owners) == 1:
                load[owners[0]] += nbytes
                if owners[0] == own:
                    shares.append(Share(name, box, 0, rows))
                continue
            for start, stop in _runs(rows, nbytes, len(owners)):
                shared.append((nbytes // rows * (stop - start), owners, Share(name, box, start, stop)))
    for nbytes, owners, share in sorted(shared, key=lambda each: -each[0]):
        writer = min(owners, key=lambda rank: (load[rank], rank))
        load[writer] += nbytes
        if writer == own:
            shares.append(share)
    order = {name: number for number, name in enumerate(merged.tensors)}
    return sorted(shares, key=lambda share: (order[share.name], share.box, share.start))


def own_pieces(shares: Sequence[Share], leaves: Mapping[str, Leaf]) -> list[Piece]:
    """Return the memory of what this rank writes."""
    pieces: list[Piece] = []
    held: dict[str, dict[BoxKey, Piece]] = {}
    for share in shares:
        if share.name not in held:
            held[share.name] = {(*piece.offsets, *piece.shape): piece for piece in pieces_of(leaves[share.name])}
        piece = held[share.name][share.box]
        everything = not piece.shape or (share.start, share.stop) == (0, piece.shape[0])
        pieces.append(piece if everything else piece.rows(share.start, share.stop))
    return pieces


def _runs(rows: int, nbytes: int, owners: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows in which a box is written: one, or several of about the same size."""
    count = max(1, min(owners, nbytes // SPLIT_BYTES, rows))
    yield from pairwise(rows * number // count for number in range(count + 1))
