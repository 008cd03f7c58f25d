"""The header of a safetensors file: built, read back, and refused where it is malformed or contradictory."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.blockfile import header
from tensorkeep.formats.blockfile.header import Header, TensorRecord
from tensorkeep.storage.local import LocalFile
from tensorkeep.testing.cases import case


def write(path: Path, header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def read(path: Path) -> Header:
    with LocalFile(path) as file:
        return header.read(file)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_built_header_is_read_back_here_and_by_safetensors(tmp_path: Path) -> None:
    records = [TensorRecord("b", "F32", (2,), 0, 8), TensorRecord("a", "U8", (3, 1), 8, 11)]
    text = header.build([records[1], records[0]], {"format": "pt"})
    assert len(text) == 4096
    path = tmp_path / "x.safetensors"
    path.write_bytes(text + bytes(11))
    found = read(path)
    assert found == Header(4096, {"a": records[1], "b": records[0]}, {"format": "pt"})
    assert list(found.records) == ["a", "b"]
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice("a").get_shape() == [3, 1]
    assert read(write(tmp_path / "empty", {})).records == {}


def test_header_over_the_size_limit_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 8184)
    header.build([], {"key": "x" * 7000})
    with pytest.raises(UnsupportedError):
        header.build([], {"key": "x" * 8185})


def test_elements_smaller_than_a_byte_must_fill_full_bytes(tmp_path: Path) -> None:
    tensors = {"four": entry("F4", (3, 4), (0, 6)), "six": entry("F6_E2M3", (4,), (6, 9))}
    assert read(write(tmp_path / "x", tensors, bytes(9))).records["six"].tag == "F6_E2M3"
    with pytest.raises(CorruptCheckpointError, match="do not fit"):
        read(write(tmp_path / "odd", {"four": entry("F4", (3,), (0, 1))}, bytes(1)))


def test_wrong_header_length_is_refused(tmp_path: Path) -> None:
    for length in (2**63, 2**64 - 1, 100_000_001, 100, 3, 1):
        with case(length), pytest.raises(CorruptCheckpointError):
            read(write(tmp_path / "x", {"a": entry()}, bytes(8), length=length))
    for content in (b"", b"\2", bytes(8), bytes(9), b"\2" + bytes(7) + b"{"):
        (tmp_path / "x").write_bytes(content)
        with case(content), pytest.raises(CorruptCheckpointError):
            read(tmp_path / "x")


EMPTY = b'{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
TEXTS = [
    *(b"not JSON", b"[]", b'"text"', b"{", b"{}{}", b' {"spaces": "before"}', b'{"a": nul}', b'{"\xff\xfe": {}}'),
    b'{"\\ud800": ' + EMPTY + b"}",
    b'{"a":' * 100_000,
    b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"a": ' + EMPTY.replace(b"[0]", b"[" + b"9" * 10_000 + b"]") + b"}",
    b'{"a": ' + EMPTY + b', "a": ' + EMPTY + b"}",
    b'{"a": ' + EMPTY.replace(b"{", b'{"dtype": "F16", ') + b"}",
]


def test_malformed_header_is_refused(tmp_path: Path) -> None:
    for text in TEXTS:
        with case(text[:40]), pytest.raises(CorruptCheckpointError):
            read(write(tmp_path / "x", text))
    for metadata in ([], "text", None, {"a": 1}, {"a": None}, {"a": {"b": "c"}}):
        with case(metadata), pytest.raises(CorruptCheckpointError, match="__metadata__"):
            read(write(tmp_path / "x", {"__metadata__": metadata}))


SHAPES = [(-2,), (-1, -2), (3,), (2**63,), (2**62, 0, 2**62), [2.0], ["2"], "2", None]
OFFSETS = [(8, 0), (-8, 0), (0, 2**63), (0,), (0, 8, 8), (0, 8.5), (1, 9)]
ENTRIES: list[Any] = [
    *(entry(shape=shape) for shape in SHAPES),
    *(entry(offsets=offsets) for offsets in OFFSETS),
    *(entry(dtype="U8"), {"dtype": "F32", "shape": (2,)}, {**entry(), "more": 1}, [], None, 7),
]


def test_an_invalid_entry_is_refused_by_name_and_an_unknown_dtype_is_none(tmp_path: Path) -> None:
    for bad in ENTRIES:
        with case(bad):
            with pytest.raises(CorruptCheckpointError) as caught:
                read(write(tmp_path / "x", {"weight": bad}, bytes(8)))
            assert caught.value.name == "weight"
    with pytest.raises(UnsupportedError, match="66 dimensions"):
        read(write(tmp_path / "x", {"weight": entry(shape=(1,) * 65 + (2,))}, bytes(8)))
    assert read(write(tmp_path / "x", {"weight": entry("F128")}, bytes(8))).records["weight"].dtype is None


def test_ranges_with_gaps_or_overlaps_are_refused(tmp_path: Path) -> None:
    for ranges, data_bytes in (
        ([(0, 8), (0, 8)], 8),
        ([(0, 8), (4, 12)], 12),
        ([(0, 8), (12, 20)], 20),
        ([(8, 16)], 16),
        *(([(0, 8), (8, 16)], data_bytes) for data_bytes in (15, 17, 0)),
        *(([(0, 8), (8, stop)], 16) for stop in (2**63 + 8, 10**4000 * 8)),
    ):
        entries = [entry(shape=((stop - start) // 4,), offsets=(start, stop)) for start, stop in ranges]
        tensors = {f"t{number}": each for number, each in enumerate(entries)}
        with case(f"{data_bytes} bytes"), pytest.raises(CorruptCheckpointError):
            read(write(tmp_path / "x", tensors, bytes(data_bytes)))
