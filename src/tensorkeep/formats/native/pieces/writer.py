"""Writing one rank's part of a checkpoint that many ranks write together: its data files, then its fragment."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from tensorkeep.formats import checksummed_json
from tensorkeep.formats.base import PartKey, WriteResult, WriteSettings
from tensorkeep.formats.blockfile.plan import (
    CODED_GRID,
    CODED_SUFFIX,
    RAW_GRID,
    SUFFIX,
    CutSource,
    FilePlan,
    Grid,
    block_starts,
    plan_part,
    shard_limit,
)
from tensorkeep.formats.blockfile.write import DataFile
from tensorkeep.formats.decoding import as_a_reader
from tensorkeep.formats.native.block_write import BlockFilesWrite, features_of, stored_blocks
from tensorkeep.formats.native.options import NativeOptions
from tensorkeep.formats.native.pieces.fragments import check_fragment, parse_fragment
from tensorkeep.formats.native.pieces.previous import PreviousPieces
from tensorkeep.formats.native.pieces.records import (
    FRAGMENT_FORMAT,
    FRAGMENT_VERSION,
    BoxRecord,
    Fragment,
    FragmentRecord,
    FragmentReport,
    TensorRecord,
    fragment_name,
    save_id,
)
from tensorkeep.formats.native.records import FileRecord
from tensorkeep.state.names import part_file_stems
from tensorkeep.state.sharded import Piece
from tensorkeep.storage import storage_of, write_file
from tensorkeep.storage.store_commit import object_name


class Together(Protocol):
    """How the ranks of one save act together; the format itself does not communicate."""

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def begin(self) -> tuple[Path, str]:
        """Wait until the coordinator has made the staging folder; return it and the name of the save.

        In an object store, it is the prefix of the checkpoint itself.
        """

    def finish(self, report: FragmentReport) -> None:
        """Report that this rank's part is durable, and wait until the coordinator has published the checkpoint.

        Raises on every rank if one has failed.
        """


class PiecesWrite(BlockFilesWrite):
    """The writing of the boxes of one rank; see `tensorkeep.formats.base.StagedWrite`.

    ``parts`` has the part and the key of every tensor of the whole state, so that all ranks name files alike. The
    result of `run` counts what this rank wrote. `Together.begin` and `Together.finish` are called in `run`.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        parts: Mapping[str, PartKey],
        destination: Path,
        settings: WriteSettings,
        together: Together,
        *,
        grid: Grid | None = None,
    ) -> None:
        suffix = SUFFIX if settings.compression == "none" else CODED_SUFFIX
        self._grid = grid or (RAW_GRID if settings.compression == "none" else CODED_GRID)
        limit = shard_limit(settings.options_as(NativeOptions).shard_bytes)
        plans = list(_plan(pieces, parts, together.rank, limit, suffix, self._grid))
        super().__init__(plans, destination, settings)
        self._pieces = pieces
        self._together = together

    def _write(self) -> WriteResult:
        self._check_budget()
        directory, save = self._together.begin()
        of_save = save_id(save) if storage_of(directory).remote else ""
        kind = partial(PreviousPieces, pieces=self._pieces, grid=self._grid)
        written = self._write_over_base(directory, kind, ranks=self._together.size, save_id=of_save)
        records = written.records + written.linked
        fragment = self._fragment(written.files, records, written.numbers, save)
        content = checksummed_json.seal(fragment)
        path = directory / object_name(fragment_name(self._together.rank), of_save)
        with as_a_reader():
            self._check(content, path, save)
        self._cancellation.check()
        write_file(path, content)
        result = written.result(self._settings, len(content))
        self._together.finish(
            FragmentReport(
                self._together.rank,
                FragmentRecord(path.name, len(content), checksummed_json.digest(content, wide=True)),
                [record.name for record in records],
                fragment.leaves,
                [(box.leaf, box.offsets, box.sizes) for box in fragment.boxes],
                result.stored_bytes,
                result.new_bytes,
            )
        )
        return result

    def _fragment(
        self, files: Sequence[DataFile], records: list[FileRecord], numbers: dict[int, int], save: str
    ) -> Fragment:
        """Return the fragment of the finished files of this rank; ``records`` are those, then the linked files."""
        leaves: dict[str, int] = {}
        boxes: list[BoxRecord] = []
        for number, file in enumerate(files):
            for leaf in file.plan.leaves:
                piece = leaf.source
                assert isinstance(piece, Piece)
                index = leaves.setdefault(piece.name, len(leaves))
                stored = stored_blocks(leaf, number, file, numbers)
                boxes.append(BoxRecord(index, piece.offsets, piece.shape, *stored))
        return Fragment(
            format=FRAGMENT_FORMAT,
            version=FRAGMENT_VERSION,
            features=features_of(records, boxes, wide=self._options.wide_digests),
            save=save,
            rank=self._together.rank,
            ranks=self._together.size,
            grid_bytes=self._grid.most_bytes,
            grid_parts=self._grid.parts,
            files=records,
            leaves=list(leaves),
            boxes=boxes,
        )

    def _check(self, content: bytes, path: Path, save: str) -> None:
        """Check the fragment as a reader will: what no reader accepts must not be reported as saved."""
        fragment = parse_fragment(content, path, save, self._together.size, self._together.rank)
        tensors: dict[str, TensorRecord] = {}
        for plan in self._plans:
            for leaf in plan.leaves:
                assert isinstance(leaf.source, Piece)
                piece = leaf.source
                tensors[piece.name] = TensorRecord(piece.name, leaf.part, leaf.key, piece.dtype.name, piece.whole)
        check_fragment(fragment, path, tensors)


def _plan(
    pieces: Sequence[Piece], parts: Mapping[str, PartKey], rank: int, limit: int, suffix: str, grid: Grid
) -> Iterator[FilePlan]:
    """Yield the data files of a rank: a set for each part, named after the rank."""
    stems = part_file_stems(dict.fromkeys(part for part, _ in parts.values()))
    keys = _keys(pieces, parts)
    by_part: dict[str, list[CutSource]] = {}
    for piece, key in zip(pieces, keys, strict=True):
        starts = block_starts(piece.whole, piece.offsets, piece.shape, piece.dtype.itemsize, grid)
        by_part.setdefault(parts[piece.name][0], []).append((piece, key, starts))
    for part, leaves in by_part.items():
        yield from plan_part(part, f"{stems[part]}-rank-{rank:05d}", leaves, limit, suffix=suffix)


def _keys(pieces: Sequence[Piece], parts: Mapping[str, PartKey]) -> list[str]:
    """Return the key of each box in its data file: that of the tensor, with the box's place if there are several."""
    counts: dict[str, int] = {}
    for piece in pieces:
        counts[piece.name] = counts.get(piece.name, 0) + 1
    taken = set(parts.values())
    keys: list[str] = []
    for piece in pieces:
        part, key = parts[piece.name]
        if counts[piece.name] > 1:
            sides = zip(piece.offsets, piece.shape, strict=True)
            key += f"[{','.join(f'{offset}:{offset + size}' for offset, size in sides)}]"
            while (part, key) in taken:
                key += "_"
            taken.add((part, key))
        keys.append(key)
    return keys
