"""JSON files of ours that carry a checksum of themselves: the manifest, and what lies beside the formats of others.

Such a file is ``{"xxh3_64":"<16 hex digits>","body":{...}}``; the checksum is over every byte that follows the digits,
from their closing quote to the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import xxhash

from tensorkeep.errors import CorruptCheckpointError
from tensorkeep.io.directory import Directory

OPENING = b'{"xxh3_64":"'
"""How each of them begins."""

MAX_BYTES = 1024**3

DIGITS = 16
WIDE_DIGITS = 32


def digest(data: Any) -> str:
    """Return the xxh3-64 of some bytes, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def wide_digest(data: Any) -> str:
    """Return the xxh3-128 of some bytes, as 32 hexadecimal digits: wide enough to tell blocks apart by it alone."""
    return xxhash.xxh3_128_hexdigest(data)


def new_hasher(*, wide: bool) -> Any:
    """Return a new hasher, of 128 bits or of 64."""
    return xxhash.xxh3_128() if wide else xxhash.xxh3_64()


def hasher_for(expected: str) -> Any:
    """Return a new hasher of the kind that an expected digest is of, by its length."""
    return new_hasher(wide=len(expected) == WIDE_DIGITS)


def seal(body: object) -> bytes:
    """Return the bytes of a file with this body, which msgspec can encode."""
    rest = b'","body":' + msgspec.json.encode(body) + b"}\n"
    return OPENING + digest(rest).encode() + rest


def read(directory: Directory, name: str) -> dict[str, Any]:
    """Return the body of a file whose checksum is right; what it says is still to be checked.

    Raises
    ------
    NotACheckpointError
        If there is no such file.
    CorruptCheckpointError
        If it is damaged, or none of ours.
    """
    return body_of(read_content(directory, name), directory.path / name)


def read_content(directory: Directory, name: str) -> bytes:
    """Return all bytes of a file whose checksum is right; the errors are those of `read`."""
    path = directory.path / name
    with directory.open(name, follow_links=False) as file:
        if file.size > MAX_BYTES:
            raise CorruptCheckpointError(f"holds {file.size:,} bytes, which no such file of ours does", path=path)
        content = file.read(0, file.size)
    digits, rest = content[len(OPENING) : len(OPENING) + DIGITS], content[len(OPENING) + DIGITS :]
    if not content.startswith(OPENING) or digest(rest).encode() != digits:
        raise CorruptCheckpointError(
            "its checksum is wrong: the file is damaged", path=path, remedy="take another checkpoint or copy"
        )
    return content


def body_of(content: bytes, path: Path) -> dict[str, Any]:
    """Return the body that is in the bytes of a file; CorruptCheckpointError, with its path, if there is none."""
    try:
        body = msgspec.json.decode(content, type=dict[str, Any]).get("body")
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CorruptCheckpointError(f"is malformed ({error})", path=path) from error
    if not isinstance(body, dict):
        raise CorruptCheckpointError("is malformed (it has no body)", path=path)
    return body
