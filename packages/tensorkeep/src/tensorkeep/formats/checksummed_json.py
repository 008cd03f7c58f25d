"""JSON files ``{"xxh3_64":"<16 hex digits>","body":{...}}``; the checksum covers every byte after the digits."""

from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import xxhash

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.decoding import decoding
from tensorkeep.storage.base import Directory, SourceFile

# The first bytes of every such file.
OPENING = b'{"xxh3_64":"'

# Larger files are refused before they are read: a damaged or hostile one must not fill the memory.
MAX_BYTES = 1024**3

_DIGITS = 16
_PIECE = 1024**2


# An incremental checksum: `update` adds bytes, `hexdigest` returns the checksum.
Hasher = xxhash.xxh3_64 | xxhash.xxh3_128


def new_hasher(*, wide: bool = False) -> Hasher:
    # 64 bits detect damage; 128 bits identify blocks without a comparison of their bytes.
    return xxhash.xxh3_128() if wide else xxhash.xxh3_64()


def digest(data: Any, *, wide: bool = False) -> str:
    return xxhash.xxh3_128_hexdigest(data) if wide else xxhash.xxh3_64_hexdigest(data)


def digest_of(file: SourceFile, count: int) -> str:
    # In pieces: a head may be 100 MB, and an index larger.
    hasher = xxhash.xxh3_64()
    buffer = np.empty(min(count, _PIECE), np.uint8)
    for at in range(0, count, _PIECE):
        piece = buffer[: count - at]
        file.read_into(at, piece)
        hasher.update(piece)
    return hasher.hexdigest()


def is_wide(expected: str) -> bool:
    return len(expected) > _DIGITS


Body = TypeVar("Body")


class Content(msgspec.Struct, Generic[Body]):
    body: Body


def seal(body: object) -> bytes:
    """Return the bytes of a file with this body; UnsupportedError if `read_content` would refuse its size."""
    # The digits come first, so that the checksum covers every byte that follows.
    rest = b'","body":' + msgspec.json.encode(body) + b"}\n"
    if len(rest) > MAX_BYTES - len(OPENING) - _DIGITS:
        raise UnsupportedError(
            f"cannot be saved: its structure and plain values take {len(rest):,} bytes, of {MAX_BYTES:,} at most",
            remedy="save long strings and bytes as tensors or arrays, and long lists of numbers, too",
        )
    return OPENING + digest(rest).encode() + rest


def read(directory: Directory, name: str, *, follow_links: bool = False) -> dict[str, Any]:
    """Return the body of a file after comparing its checksum; the caller checks the fields."""
    return body_of(read_content(directory, name, follow_links=follow_links), directory.path / name)


def read_content(directory: Directory, name: str, *, follow_links: bool = False) -> bytes:
    """Return all bytes of a file after comparing its checksum; raises the errors of `read`."""
    path = directory.path / name
    # Not through a link, unless the format allows links: a native checkpoint never has one.
    with directory.open(name, follow_links=follow_links) as file:
        if file.size > MAX_BYTES:
            raise CorruptCheckpointError(f"is too large: {file.size:,} bytes", path=path)
        content = file.read(0, file.size)
    digits, rest = content[len(OPENING) : len(OPENING) + _DIGITS], content[len(OPENING) + _DIGITS :]
    if not content.startswith(OPENING) or digest(rest).encode() != digits:
        raise CorruptCheckpointError("its checksum is wrong: the file is damaged", path=path)
    return content


def body_of(content: bytes, path: Path) -> dict[str, Any]:
    """Return the body in the bytes of a file; CorruptCheckpointError, with ``path``, if it has no body."""
    with decoding(path):
        body = msgspec.json.decode(content, type=dict[str, Any]).get("body")
    if not isinstance(body, dict):
        raise CorruptCheckpointError("is malformed (it has no body)", path=path)
    return body
