"""Safetensors headers, written, and read without trust; ``docs/reference/native-format.md`` specifies our entry."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.codecs.base import CODECS
from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.base import BLOCK_BYTES, MAX_BLOCK_BYTES, Structure
from tensorkeep.formats.blockfile.plan import Block, BlockKey, BlockRecord, FilePlan, LeafInFile, blocks_of
from tensorkeep.formats.decoding import MAX_HEADER_BYTES, decode_json_object, decoding
from tensorkeep.state.dtypes import BY_NAME, BY_SAFETENSORS, DType
from tensorkeep.state.leaf import MOST_DIMENSIONS
from tensorkeep.storage.base import SourceFile
from tensorkeep.storage.buffers import round_up
from tensorkeep.structs import prepared

METADATA_KEY = "tensorkeep"
VERSION = 1
CHANGES_VERSION = 2
# A reader of version 1 refuses the later versions, which it would misread.
CUTS_VERSION = 3
# Raw bytes below which a block is not stored as a difference: the record of its base would cost as much.
SMALLEST_DIFFERENCE = 1024

_LENGTH_BYTES = 8
# Bits per element of dtypes that are smaller than a byte.
_SUB_BYTE = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor in the header; its byte range is relative to the start of the data."""

    name: str
    tag: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> DType | None:
        """The dtype; None if it is unknown, or packs numbers in a way that neither torch nor numpy has."""
        found = BY_SAFETENSORS.get(self.tag)
        packed = found is not None and found.packs > 1
        return None if packed and (not self.shape or self.shape[-1] % found.packs) else found  # type: ignore[union-attr]

    @property
    def element_shape(self) -> tuple[int, ...]:
        assert self.dtype is not None
        # Torch counts elements that pack several numbers; the header counts the numbers.
        return (*self.shape[:-1], self.shape[-1] // self.dtype.packs) if self.shape else self.shape


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header; ``metadata`` is the file's ``__metadata__``."""

    # The data starts at this byte of the file.
    nbytes: int
    # In the order of the JSON, which may differ from the order of the data.
    records: dict[str, TensorRecord]
    metadata: dict[str, str]


def build(records: Iterable[TensorRecord], metadata: dict[str, str], *, size: int | None = None) -> bytes:
    """Return the header, padded with spaces to ``size`` or else to the next multiple of 4096."""
    content: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for record in records:
        content[record.name] = {
            "dtype": record.tag,
            "shape": record.shape,
            "data_offsets": (record.start, record.stop),
        }
    text = msgspec.json.encode(content)
    total = round_up(_LENGTH_BYTES + len(text)) if size is None else size
    # Data begins at a whole page, for direct I/O and for readers that map the file.
    padded = total - _LENGTH_BYTES
    if padded > MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"{len(content):,} tensors need a safetensors header of more than {MAX_HEADER_BYTES:,} bytes",
            remedy="give a smaller shard_bytes, so that each file holds fewer tensors",
        )
    assert len(text) <= padded, f"the header needs {len(text)} bytes, {padded} were reserved for it"
    return padded.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded)


def read(file: SourceFile) -> Header:
    """Read the header of a file; CorruptCheckpointError if it breaks any rule of the format."""
    if file.size < _LENGTH_BYTES + 2:
        raise CorruptCheckpointError("too short to be a safetensors file", path=file.path)
    # Checked before it is read: a damaged length must not become an allocation.
    length = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    if length > min(MAX_HEADER_BYTES, file.size - _LENGTH_BYTES):
        raise CorruptCheckpointError(
            f"claims a header of {length:,} bytes, more than the file or the format allows", path=file.path
        )
    text = file.read(_LENGTH_BYTES, length)
    if not text.startswith(b"{"):
        raise CorruptCheckpointError("the header does not begin with '{'", path=file.path)
    with decoding(file.path, what="the header is not valid JSON"):
        content = decode_json_object(text)
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptCheckpointError("__metadata__ does not map strings to strings", path=file.path)
    nbytes = _LENGTH_BYTES + length
    with decoding(file.path):
        records = {name: _record(name, value) for name, value in content.items()}
        # By the end as well: an empty tensor begins where the next one does.
        _check_tiling(sorted(records.values(), key=lambda r: (r.start, r.stop)), file.size - nbytes)
    return Header(nbytes, records, metadata)


class _RawRecord(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _record(name: str, value: object) -> TensorRecord:
    with decoding(name=name, what="bad header entry"):
        raw = msgspec.convert(value, prepared(_RawRecord))
    start, stop = raw.data_offsets
    if len(raw.shape) > MOST_DIMENSIONS:
        raise UnsupportedError(f"has {len(raw.shape)} dimensions; {MOST_DIMENSIONS} are read at most", name=name)
    if any(length < 0 for length in raw.shape):
        raise CorruptCheckpointError(f"negative length in shape {raw.shape}", name=name)
    dtype = BY_SAFETENSORS.get(raw.dtype)
    # A tensor of numbers below a byte must still end at a whole byte.
    bits = _SUB_BYTE.get(raw.dtype) or (8 * dtype.itemsize if dtype else None)
    # The size of elements of a later dtype is unknown.
    needed, rest = divmod(prod(raw.shape) * bits, 8) if bits is not None else (stop - start, 0)
    if rest or not 0 <= start <= stop or stop - start != needed:
        raise CorruptCheckpointError(
            f"dtype {raw.dtype} and shape {list(raw.shape)} do not fit the byte range {start:,} to {stop:,}", name=name
        )
    return TensorRecord(name, raw.dtype, raw.shape, start, stop)


def _check_tiling(records: list[TensorRecord], data_bytes: int) -> None:
    # Without gaps and overlaps, no byte of the file has two meanings, and no bytes are hidden.
    end = 0
    for record in records:
        if record.start != end:
            problem = "overlaps the tensor before it" if record.start < end else "leaves a gap before it"
            raise CorruptCheckpointError(f"its byte range {problem}", name=record.name)
        end = record.stop
    if end != data_bytes:
        raise CorruptCheckpointError(
            f"the header describes {end:,} bytes of data, the file holds {data_bytes:,}",
            remedy="the file was cut short, extended or written over: take another copy",
        )


class TensorEncoding(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tensor in a ``U8`` vector, and the codec and stored length of its blocks in this file."""

    dtype: str
    shape: tuple[int, ...]
    blocks: list[tuple[str, int]]
    # The blocks' indices in the tensor, if files of earlier saves have the others.
    numbers: list[int] | None = None
    # Positions in `blocks` of differences from blocks in other files.
    differences: list[int] = []
    # The raw bytes of every block, unless they are `block_bytes`.
    raw: list[int] | None = None

    @property
    def complete(self) -> bool:
        """Whether the tensor can be decoded from this file alone."""
        return self.numbers is None and not self.differences


class FileEncoding(msgspec.Struct, frozen=True, omit_defaults=True):
    version: int
    block_bytes: int
    tensors: dict[str, TensorEncoding]
    # Describes the state, in checkpoints without a manifest.
    structure: Structure | None = None


# The header's records, and the ``tensorkeep`` entry if the file needs one.
Description = tuple[list[TensorRecord], FileEncoding | None]


def describe(
    plan: FilePlan, blocks: Mapping[BlockKey, BlockRecord], differences: Collection[BlockKey] = ()
) -> Description:
    """Return the description of a file without tensors that other files hold completely."""
    records: list[TensorRecord] = []
    tensors: dict[str, TensorEncoding] = {}
    start = 0
    for leaf in plan.leaves:
        planned = {block.key: block for block in blocks_of(leaf)}
        keys = list(planned)
        stored = [key for key in keys if key in blocks]
        # All blocks are unchanged: the files of earlier saves have them.
        if keys and not stored:
            continue
        found = [blocks[key] for key in stored]
        changed = [position for position, key in enumerate(stored) if key in differences]
        complete = len(stored) == len(keys)
        stop = start + sum(block.length for block in found)
        dtype, shape = leaf.source.dtype, leaf.source.shape
        tag = dtype.tag(shape)
        if tag is not None and complete and not changed and _is_plain(leaf, found, start):
            records.append(TensorRecord(leaf.key, tag, dtype.numbers_shape(shape), start, stop))
        else:
            records.append(TensorRecord(leaf.key, "U8", (stop - start,), start, stop))
            lengths = [(block.codec, block.length) for block in found]
            numbers = None if complete else [index for _, index in stored]
            raw = _raw_lengths(leaf, [planned[key] for key in stored])
            tensors[leaf.key] = TensorEncoding(
                leaf.source.dtype.name, leaf.source.shape, lengths, numbers, changed, raw
            )
        start = stop
    return records, _encoding(tensors, plan)


def describe_longest(plan: FilePlan, *, changes: bool = False, delta: bool = False) -> Description:
    """Return a description with a header at least as long as the header of the finished file."""
    # The longest codec name, and offsets with at least as many digits as in any coded file.
    codec = max(CODECS.names(), key=len)
    end = 2 * plan.raw_bytes + BLOCK_BYTES
    records = [TensorRecord(leaf.key, "U8", (end,), end, end) for leaf in plan.leaves]
    tensors: dict[str, TensorEncoding] = {}
    for leaf in plan.leaves:
        planned = list(blocks_of(leaf))
        count = len(planned)
        numbers = list(range(count)) if changes and count > 1 else None
        differences = list(range(count)) if delta and leaf.source.nbytes >= SMALLEST_DIFFERENCE else []
        blocks = [(codec, 2 * BLOCK_BYTES)] * count
        raw = _raw_lengths(leaf, planned)
        tensors[leaf.key] = TensorEncoding(leaf.source.dtype.name, leaf.source.shape, blocks, numbers, differences, raw)
    return records, _encoding(tensors, plan)


def _raw_lengths(leaf: LeafInFile, blocks: list[Block]) -> list[int] | None:
    # Readers compute the length of a block from `block_bytes`, and of a single block from the shape.
    return None if leaf.starts is None or len(leaf.starts) < 2 else [block.nbytes for block in blocks]


def _encoding(tensors: dict[str, TensorEncoding], plan: FilePlan) -> FileEncoding | None:
    # The lowest version that can describe the file, so that older readers refuse only what they would misread.
    version = VERSION if all(each.complete for each in tensors.values()) else CHANGES_VERSION
    if any(each.raw is not None for each in tensors.values()):
        version = CUTS_VERSION
    return FileEncoding(version, BLOCK_BYTES, tensors, plan.structure) if tensors or plan.structure else None


def _is_plain(leaf: LeafInFile, blocks: Iterable[BlockRecord], start: int) -> bool:
    # As any safetensors reader expects it.
    # Readers that map the file need elements at multiples of their size. A padded block is longer than its raw bytes.
    raw = all(block.codec == "raw" for block in blocks)
    return raw and sum(b.length for b in blocks) == leaf.source.nbytes and start % leaf.source.dtype.itemsize == 0


def parse(header: Header, path: Path) -> FileEncoding:
    """Return the ``tensorkeep`` entry of a file, checked against its header; an empty one if the file has none."""
    text = header.metadata.get(METADATA_KEY)
    if text is None:
        return FileEncoding(VERSION, MAX_BLOCK_BYTES, {})
    with decoding(path, what="the description of coded tensors is malformed"):
        encoding = msgspec.json.decode(text, type=prepared(FileEncoding))
        if encoding.version not in (VERSION, CHANGES_VERSION, CUTS_VERSION):
            raise UnsupportedError(
                f"has coded tensors of version {encoding.version}", remedy="install a later Tensorkeep"
            )
        for name, tensor in encoding.tensors.items():
            _check(name, tensor, encoding.block_bytes, header)
    return encoding


def _check(name: str, encoding: TensorEncoding, block_bytes: int, header: Header) -> None:
    record = header.records.get(name)
    if record is None or record.tag != "U8":
        raise CorruptCheckpointError("is described as coded, but is not a U8 vector in the file", name=name)
    if encoding.dtype not in BY_NAME:
        raise UnsupportedError(f"has dtype {encoding.dtype!r}, which this release does not know", name=name)
    if (
        # A reader allocates its buffers by these numbers.
        not 1 <= block_bytes <= MAX_BLOCK_BYTES
        or block_bytes % 16
        or len(encoding.shape) > MOST_DIMENSIONS
        or any(length < 0 for length in encoding.shape)
    ):
        raise CorruptCheckpointError("its description has impossible sizes", name=name)
    # An incremental file is only readable together with the files of earlier saves.
    if not encoding.complete:
        raise UnsupportedError(
            "has blocks in other files: this file holds the changes of one step",
            name=name,
            remedy="open the step's directory instead: its manifest lists the other files",
        )
    nbytes = prod(encoding.shape) * BY_NAME[encoding.dtype].itemsize
    stored = sum(length for _, length in encoding.blocks)
    raw = encoding.raw
    if (
        len(encoding.blocks) != (-(-nbytes // block_bytes) if raw is None else len(raw))
        or (raw is not None and (sum(raw) != nbytes or any(not 0 < length <= block_bytes for length in raw)))
        or stored != record.stop - record.start
        or any(not 0 < length < block_bytes + 2 * 4096 for _, length in encoding.blocks)
    ):
        raise CorruptCheckpointError("its blocks do not fit its shape", name=name)
