"""The header of a safetensors file: building one, and reading an untrusted one.

A file is ``u64 N | N bytes of JSON | data``. The JSON maps each name to its dtype, shape and byte range in the data;
the ranges cover the data without holes or overlaps. Source: the format section of the safetensors README.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.decoding import decoding
from tensorkeep.io.buffers import round_up
from tensorkeep.io.source_file import SourceFile
from tensorkeep.state.dtypes import BY_SAFETENSORS, DType
from tensorkeep.state.leaf import MOST_DIMENSIONS
from tensorkeep.structs import prepared

MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""

_LENGTH_BYTES = 8
_SUB_BYTE = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits per element of dtypes smaller than a byte."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor in the header: dtype tag, shape, and byte range relative to the start of the data."""

    name: str
    tag: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> DType | None:
        """The dtype; None if it is not known, or packs numbers in a way that neither torch nor numpy has."""
        found = BY_SAFETENSORS.get(self.tag)
        packed = found is not None and found.packs > 1
        return None if packed and (not self.shape or self.shape[-1] % found.packs) else found  # type: ignore[union-attr]

    @property
    def element_shape(self) -> tuple[int, ...]:
        """The shape that counts elements of the dtype, which is known."""
        assert self.dtype is not None
        return (*self.shape[:-1], self.shape[-1] // self.dtype.packs) if self.shape else self.shape


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header.

    The data starts at byte ``nbytes`` of the file. The order of the records may differ from that of the data.
    ``metadata`` is the file's ``__metadata__``.
    """

    nbytes: int
    records: dict[str, TensorRecord]
    metadata: dict[str, str]


def build(records: Iterable[TensorRecord], metadata: dict[str, str], *, size: int | None = None) -> bytes:
    """Return the header's bytes, padded with spaces to ``size`` or else to the next multiple of 4096.

    Raises UnsupportedError if the header is longer than readers accept.
    """
    content: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for record in records:
        content[record.name] = {
            "dtype": record.tag,
            "shape": record.shape,
            "data_offsets": (record.start, record.stop),
        }
    text = msgspec.json.encode(content)
    total = round_up(_LENGTH_BYTES + len(text)) if size is None else size
    padded = total - _LENGTH_BYTES
    if padded > MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"{len(content):,} tensors need a safetensors header of more than {MAX_HEADER_BYTES:,} bytes",
            remedy="give a smaller shard_bytes, so that each file holds fewer tensors",
        )
    if len(text) > padded:
        raise AssertionError(f"the header needs {len(text)} bytes, {padded} were reserved for it")
    return padded.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded)


def read(file: SourceFile) -> Header:
    """Read and check the header of a file.

    Raises CorruptCheckpointError if it breaks any rule of the format.
    """
    if file.size < _LENGTH_BYTES + 2:
        raise CorruptCheckpointError("too short to be a safetensors file", path=file.path)
    length = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    if length > min(MAX_HEADER_BYTES, file.size - _LENGTH_BYTES):
        raise CorruptCheckpointError(
            f"claims a header of {length:,} bytes, more than the file or the format allows", path=file.path
        )
    text = file.read(_LENGTH_BYTES, length)
    if not text.startswith(b"{"):
        raise CorruptCheckpointError("the header does not begin with '{'", path=file.path)
    with decoding(file.path, what="the header is not valid JSON"):
        content = decode_object(text)
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptCheckpointError("__metadata__ does not map strings to strings", path=file.path)
    nbytes = _LENGTH_BYTES + length
    with decoding(file.path):
        records = {name: _record(name, value) for name, value in content.items()}
        _check_tiling(sorted(records.values(), key=lambda r: (r.start, r.stop)), file.size - nbytes)
    return Header(nbytes, records, metadata)


def decode_object(text: bytes) -> dict[str, Any]:
    """Return a JSON object.

    Raises ValueError, RecursionError if it is not a JSON object, or a name occurs twice in it.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name occurs twice")
        for name in found:
            name.encode()  # a lone surrogate is not valid Unicode, and could not be printed
        return found

    # msgspec silently keeps the last of two equal names; which one is right is unknown.
    content = json.loads(text, object_pairs_hook=unique)
    if not isinstance(content, dict):
        raise ValueError("not an object")
    return content


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
    bits = _SUB_BYTE.get(raw.dtype) or (8 * dtype.itemsize if dtype else None)
    # The size of elements of a later dtype is unknown.
    needed, rest = divmod(prod(raw.shape) * bits, 8) if bits is not None else (stop - start, 0)
    if rest or not 0 <= start <= stop or stop - start != needed:
        raise CorruptCheckpointError(
            f"dtype {raw.dtype} and shape {list(raw.shape)} do not fit the byte range {start:,} to {stop:,}", name=name
        )
    return TensorRecord(name, raw.dtype, raw.shape, start, stop)


def _check_tiling(records: list[TensorRecord], data_bytes: int) -> None:
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
