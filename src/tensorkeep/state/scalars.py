"""Plain values as JSON without loss: each encoder with its decoder.

JSON numbers represent integers below 2**53 only, since programs in other languages read larger ones as floats. The
decoders take untrusted input and raise only `ValueError`.
"""

import base64
import math
import re
import struct
from typing import Any

from tensorkeep.state.names import Key

_SAFE_INTEGER = 2**53
_INTEGER = re.compile(r"-?0x(0|[1-9a-f][0-9a-f]*)")
_FLOAT = re.compile(r"-?(inf|\d+\.\d+|\d+(\.\d+)?e[+-]\d+)", re.ASCII)
_NAN = re.compile(r"nan:[0-9a-f]{16}")


def encode_int(value: int) -> object:
    """Return a JSON number, or ``{"int": "0x..."}`` for 2**53 and beyond."""
    return value if abs(value) < _SAFE_INTEGER else {"int": hex(value)}


def encode_float(value: float) -> str:
    """Return the shortest decimal that reads back as the same float; a NaN with its bits (``nan:7ff8...``)."""
    return f"nan:{struct.pack('>d', value).hex()}" if math.isnan(value) else repr(value)


def decode_float(text: object) -> float:
    """Inverse of `encode_float`."""
    if isinstance(text, str) and _NAN.fullmatch(text):
        value: float = struct.unpack(">d", bytes.fromhex(text[4:]))[0]
        if math.isnan(value):
            return value
    elif isinstance(text, str) and len(text) < 40 and _FLOAT.fullmatch(text):
        return float(text)
    raise ValueError(f"{brief(text)} is not a float")


def encode_bytes(value: bytes | bytearray) -> str:
    """Return base64."""
    return base64.b64encode(value).decode()


def decode_bytes(text: object) -> bytes:
    """Inverse of `encode_bytes`."""
    if not isinstance(text, str):
        raise ValueError(f"{brief(text)} is not base64 text")
    return base64.b64decode(text, validate=True)


def encode_key(key: Key) -> object:
    """Return the JSON of a dict's key or a set's element: None, bool, int, float, str or a tuple of these."""
    if isinstance(key, tuple):
        return {"tuple": [encode_key(part) for part in key]}
    if isinstance(key, bool) or key is None or isinstance(key, str):
        return key
    return encode_int(key) if isinstance(key, int) else {"float": encode_float(key)}


def decode_key(node: object) -> Any:
    """Inverse of `encode_key`."""
    if node is None or isinstance(node, bool | int):
        return node
    if isinstance(node, str):
        return check_text(node)
    if isinstance(node, dict) and len(node) == 1:
        if "float" in node:
            return decode_float(node["float"])
        if "int" in node:
            return decode_long_int(node["int"])
        parts = node.get("tuple")
        if isinstance(parts, list) and not any(isinstance(part, dict) and "tuple" in part for part in parts):
            return tuple(map(decode_key, parts))
    raise ValueError(f"{brief(node)} is not a key")


def decode_int(node: object) -> int:
    """Inverse of `encode_int`."""
    value = decode_key(node)
    if type(value) is not int:
        raise ValueError(f"{brief(node)} is not an integer")
    return value


def decode_long_int(text: object) -> int:
    """Return the integer of a hexadecimal text."""
    if not isinstance(text, str) or not _INTEGER.fullmatch(text):
        raise ValueError(f"{brief(text)} is not a hexadecimal integer")
    return int(text, 16)


def check_text(text: object) -> str:
    """Return the text if it is a string of valid Unicode."""
    if not isinstance(text, str):
        raise ValueError(f"{brief(text)} is not a string")
    text.encode()  # UnicodeEncodeError, a ValueError, on a lone surrogate.
    return text


def brief(node: object) -> str:
    """Return the start of a malformed node, for an error message."""
    text = ascii(node) if isinstance(node, str | int | float | None) else type(node).__name__
    return text if len(text) <= 50 else f"{text[:47]}..."
