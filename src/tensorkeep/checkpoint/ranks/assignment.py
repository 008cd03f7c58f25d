"""Who writes what: every rank computes the same answer from the tensors that the ranks have together."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from tensorkeep.checkpoint.ranks.outline import MergedTensors, Offsets, Sizes
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.sharded import Piece, pieces_of

SPLIT_BYTES = 64 * 1024**2
"""A box that several ranks have is divided among them in runs of rows of at least so many bytes."""


class Share(NamedTuple):
    """What one rank writes of a box that it has: the rows ``start:stop`` of the box; a scalar is one row."""

    name: str
    offsets: Offsets
    sizes: Sizes
    start: int
    stop: int


def assign(merged: MergedTensors, ranks: int) -> list[list[Share]]:
    """Return what each rank writes, so that everything is written once, by ranks with about the same bytes in all.

    A box that one rank has is written by it. Those that several ranks have follow, the largest first, each by the rank
    of them that has the least to write; large ones are divided. Ties are decided by name and rank, and so in the same
    way in every save.
    """
    load = [0] * ranks
    shares: list[list[Share]] = [[] for _ in range(ranks)]
    shared: list[tuple[int, list[int], Share]] = []
    for name, boxes in merged.boxes.items():
        itemsize = BY_NAME[merged.tensors[name].dtype].itemsize
        for (offsets, sizes), owners in boxes.items():
            if len(owners) == 1:
                load[owners[0]] += prod(sizes) * itemsize
                shares[owners[0]].append(Share(name, offsets, sizes, 0, sizes[0] if sizes else 1))
                continue
            for start, stop in _runs(sizes, prod(sizes) * itemsize, len(owners)):
                share = Share(name, offsets, sizes, start, stop)
                shared.append((prod(sizes[1:]) * (stop - start) * itemsize, owners, share))
    for nbytes, owners, share in sorted(shared, key=lambda each: -each[0]):
        writer = min(owners, key=lambda rank: (load[rank], rank))
        load[writer] += nbytes
        shares[writer].append(share)
    order = {name: number for number, name in enumerate(merged.tensors)}
    return [sorted(each, key=lambda share: (order[share.name], share.offsets, share.start)) for each in shares]


def own_pieces(shares: Sequence[Share], leaves: Mapping[str, Leaf]) -> list[Piece]:
    """Return the memory of what this rank writes."""
    pieces: list[Piece] = []
    held: dict[str, dict[tuple[Offsets, Sizes], Piece]] = {}
    for share in shares:
        if share.name not in held:
            held[share.name] = {(piece.offsets, piece.shape): piece for piece in pieces_of(leaves[share.name])}
        piece = held[share.name][share.offsets, share.sizes]
        everything = not share.sizes or (share.start, share.stop) == (0, share.sizes[0])
        pieces.append(piece if everything else piece.rows(share.start, share.stop))
    return pieces


def _runs(sizes: Sizes, nbytes: int, owners: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows in which a box is written: one, or several of about the same size."""
    rows = sizes[0] if sizes else 1
    count = max(1, min(owners, nbytes // SPLIT_BYTES, rows))
    yield from pairwise(rows * number // count for number in range(count + 1))
