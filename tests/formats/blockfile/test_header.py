"""The header of a safetensors file: built, read back, and refused where it is malformed or contradictory."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.blockfile import header
from tensorkeep.formats.blockfile.header import Header, TensorRecord
from tensorkeep.io.source_file import SourceFile


def write(path: Path, header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def read(path: Path) -> Header:
    with SourceFile(path) as file:
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


def test_header_over_the_size_limit_is_not_built() -> None:
    with pytest.raises(UnsupportedError):
        header.build([], {"key": "x" * 100_000_001})


def test_header_without_tensors_is_read(tmp_path: Path) -> None:
    assert read(write(tmp_path / "x", {})).records == {}


def test_elements_smaller_than_a_byte_must_fill_full_bytes(tmp_path: Path) -> None:
    tensors = {"four": entry("F4", (3, 4), (0, 6)), "six": entry("F6_E2M3", (4,), (6, 9))}
    assert read(write(tmp_path / "x", tensors, bytes(9))).records["six"].tag == "F6_E2M3"
    with pytest.raises(CorruptCheckpointError, match="do not fit"):
        read(write(tmp_path / "odd", {"four": entry("F4", (3,), (0, 1))}, bytes(1)))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 100, 3, 1])
def test_wrong_header_length_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(CorruptCheckpointError):
        read(write(tmp_path / "x", {"a": entry()}, bytes(8), length=length))


@pytest.mark.parametrize("content", [b"", b"\2", bytes(8), bytes(9), b"\2" + bytes(7) + b"{"])
def test_file_too_short_for_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        read(tmp_path / "x")


@pytest.mark.parametrize(
    "text",
    [
        b"not JSON",
        b"[]",
        b'"text"',
        b"{",
        b"{}{}",
        b' {"spaces": "before"}',
        b'{"a": nul}',
        b'{"\xff\xfe": {}}',
        b'{"\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
        b'{"a":' * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 10_000 + b'], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},'
        b' "a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [0], "data_offsets": [0, 0]}}',
    ],
    ids=lambda text: text[:24].decode("latin-1"),
)
def test_malformed_header_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        read(write(tmp_path / "x", text))


@pytest.mark.parametrize("metadata", [[], "text", None, {"a": 1}, {"a": None}, {"a": {"b": "c"}}])
def test_metadata_other_than_strings_is_refused(tmp_path: Path, metadata: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="__metadata__"):
        read(write(tmp_path / "x", {"__metadata__": metadata}))


@pytest.mark.parametrize(
    "bad",
    [
        entry(shape=(-2,)),
        entry(shape=(-1, -2)),
        entry(shape=(3,)),
        entry(shape=(2**63,)),
        entry(shape=(2**62, 0, 2**62)),
        entry(shape=(1,) * 65 + (2,)),
        entry(shape=[2.0]),
        entry(shape=["2"]),
        entry(shape="2"),
        entry(shape=None),
        entry(offsets=(8, 0)),
        entry(offsets=(-8, 0)),
        entry(offsets=(0, 2**63)),
        entry(offsets=(0,)),
        entry(offsets=(0, 8, 8)),
        entry(offsets=(0, 8.5)),
        entry(offsets=(1, 9)),
        entry(dtype="U8"),
        {"dtype": "F32", "shape": (2,)},
        {**entry(), "more": 1},
        [],
        None,
        7,
    ],
    ids=str,
)
def test_invalid_entry_is_refused_by_name(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(CorruptCheckpointError) as caught:
        read(write(tmp_path / "x", {"weight": bad}, bytes(8)))
    assert caught.value.name == "weight"


def test_unknown_dtype_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="F128"):
        read(write(tmp_path / "x", {"weight": entry("F128")}, bytes(8)))


@pytest.mark.parametrize(
    ("ranges", "data_bytes"),
    [
        ([(0, 8), (0, 8)], 8),
        ([(0, 8), (4, 12)], 12),
        ([(0, 8), (12, 20)], 20),
        ([(8, 16)], 16),
        ([(0, 8), (8, 16)], 15),
        ([(0, 8), (8, 16)], 17),
        ([(0, 8), (8, 16)], 0),
        ([(0, 8), (8, 2**63 + 8)], 16),
        ([(0, 8), (8, 10**4000 * 8)], 16),
    ],
)
def test_ranges_with_gaps_or_overlaps_are_refused(
    tmp_path: Path, ranges: list[tuple[int, int]], data_bytes: int
) -> None:
    tensors = {
        f"t{number}": entry(shape=((stop - start) // 4,), offsets=(start, stop))
        for number, (start, stop) in enumerate(ranges)
    }
    with pytest.raises(CorruptCheckpointError):
        read(write(tmp_path / "x", tensors, bytes(data_bytes)))
