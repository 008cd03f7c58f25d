"""Which leaf lies where: parts into files, leaves into a file's byte stream, blocks into tasks.

A file is one stream of bytes. A task is a run of whole blocks, together at most one block's size, and owns a run of
whole pages of the file, so that tasks can be written in any order, directly and without touching each other's pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tensorkeep.errors import UsageError
from tensorkeep.formats.structure import Structure
from tensorkeep.formats.write import FormatOptions
from tensorkeep.state.leaf import Source
from tensorkeep.state.names import part_file_stems
from tensorkeep.state.tree import Flat
from tensorkeep.units import parse_bytes

DEFAULT_SHARD_BYTES = 4 * 1024**3


class BlockFileOptions(FormatOptions, frozen=True):
    """The options that the native format and the safetensors format share.

    Attributes
    ----------
    shard_bytes : int or str or None
        The size above which the tensors of a part are divided among several files, also as ``"4GiB"``, the default.
    direct_io : bool
        Whether to write around the page cache (O_DIRECT) where the file system supports it.
    """

    shard_bytes: int | str | None = None
    direct_io: bool = True


@dataclass(frozen=True, slots=True)
class Placed:
    """A leaf in a file: its name there, and the offset of its raw bytes in the data."""

    source: Source
    part: str
    key: str
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.source.nbytes


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One data file.

    Attributes
    ----------
    name, part : str
    leaves : tuple of Placed
        In the order of the data, with raw offsets that begin at 0.
    header_order : tuple of str
        The keys in the order in which the header names them; empty for that of the data.
    metadata : dict of str to str
        What the header's ``__metadata__`` says besides the format and our own entry.
    structure : Structure or None
        What the file says of the whole state, where there is no manifest to say it.
    """

    name: str
    part: str
    leaves: tuple[Placed, ...]
    header_order: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    structure: Structure | None = None

    @property
    def raw_bytes(self) -> int:
        return self.leaves[-1].stop if self.leaves else 0


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a placed leaf: bytes ``start:stop`` of the leaf."""

    leaf: Placed
    index: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def plan_files(flat: Flat[Source], shard_bytes: int | str | None = None) -> list[FilePlan]:
    """Return the data files of a state: one set for each part, none above ``shard_bytes`` unless one leaf is.

    Names follow Hugging Face: ``model.safetensors`` alone, ``model-00001-of-00003.safetensors`` in a set.
    """
    limit = DEFAULT_SHARD_BYTES if shard_bytes is None else parse_bytes(shard_bytes)
    if limit <= 0:
        raise UsageError(f"shard_bytes is {shard_bytes}", remedy="give a positive number of bytes")
    parts: dict[str, list[tuple[Source, str]]] = {}
    for name, source in flat.leaves.items():
        part, key = flat.parts[name]
        parts.setdefault(part, []).append((source, key))
    stems = part_file_stems(list(parts))
    return [plan for part, leaves in parts.items() for plan in _shards(part, stems[part], leaves, limit)]


def _shards(part: str, stem: str, leaves: list[tuple[Source, str]], shard_bytes: int) -> Iterator[FilePlan]:
    # Wide elements first: every leaf then begins at a multiple of its item size, which readers that map a file need.
    ordered = sorted(leaves, key=lambda leaf: -leaf[0].dtype.itemsize)
    shards: list[list[tuple[Source, str]]] = [[]]
    size = 0
    for leaf in ordered:
        if shards[-1] and size + leaf[0].nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(leaf)
        size += leaf[0].nbytes
    for number, shard in enumerate(shards, start=1):
        suffix = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        yield FilePlan(f"{stem}{suffix}.safetensors", part, tuple(_place(part, shard)))


def _place(part: str, leaves: Sequence[tuple[Source, str]]) -> Iterator[Placed]:
    start = 0
    for source, key in leaves:
        yield Placed(source, part, key, start)
        start += source.nbytes


def tasks_of(plan: FilePlan, block_bytes: int) -> list[list[Block]]:
    """Return the blocks of a file in order, in groups of at most ``block_bytes`` raw bytes."""
    groups: list[list[Block]] = []
    size = block_bytes
    for leaf in plan.leaves:
        for index, start in enumerate(range(0, leaf.source.nbytes, block_bytes)):
            block = Block(leaf, index, start, min(start + block_bytes, leaf.source.nbytes))
            if size + block.nbytes > block_bytes:
                groups.append([])
                size = 0
            groups[-1].append(block)
            size += block.nbytes
    return groups
