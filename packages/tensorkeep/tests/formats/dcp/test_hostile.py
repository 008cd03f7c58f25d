"""Hostile and damaged checkpoints: each is refused, and no code of theirs runs."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as real

import tensorkeep
from formats.dcp.checkpoints import grid, read, real_save, write_chunks
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError
from tensorkeep.formats import sidecar
from tensorkeep.formats.base import OpenSettings, Structure
from tensorkeep.formats.dcp import FORMAT
from tensorkeep.formats.dcp.reader import check_tiling
from tensorkeep.formats.torch_file import pickles
from tensorkeep.state.tree import flatten
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference
from tensorkeep.testing.format_suite import load


def infos(metadata: real.Metadata) -> list[Any]:
    return list(metadata.storage_data.values())


def entry(metadata: real.Metadata) -> Any:
    return metadata.state_dict_metadata["w"]


def as_value(metadata: real.Metadata) -> None:
    metadata.state_dict_metadata["w"] = real.BytesStorageMetadata()
    metadata.storage_data = {real.MetadataIndex("w"): infos(metadata)[0]}


def change_metadata(path: Path, change: Callable[[real.Metadata], object]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def write_piece(path: Path, value: Any, **more: Any) -> None:
    """Write a checkpoint of one tensor, and replace its piece by a value."""
    content = io.BytesIO()
    torch.save(value, content)
    write_chunks(path, {"w": torch.ones(50)}, **more)
    change_metadata(path, lambda metadata: setattr(infos(metadata)[0], "length", len(content.getvalue())))
    (path / "__0_0.distcp").write_bytes(content.getvalue())


def one_huge_chunk(metadata: real.Metadata) -> None:
    origin, shape = torch.Size([0]), torch.Size([2**50])
    entry(metadata).size, entry(metadata).chunks = shape, [real.ChunkStorageMetadata(origin, shape)]
    metadata.storage_data = {real.MetadataIndex("w", origin): infos(metadata)[1]}


def swap_pieces(metadata: real.Metadata) -> None:
    first, other = infos(metadata)[0], infos(metadata)[5]
    first.relative_path, other.relative_path = other.relative_path, first.relative_path
    first.length, other.length = other.length, first.length


def share_bytes(metadata: real.Metadata) -> None:
    for number in range(100):
        metadata.state_dict_metadata[f"v{number}"] = real.BytesStorageMetadata()
        metadata.storage_data[real.MetadataIndex(f"v{number}")] = infos(metadata)[2]


def share_chunks(metadata: real.Metadata) -> None:
    entry(metadata).chunks *= 100
    for number in range(300):
        metadata.state_dict_metadata[f"w{number}"] = entry(metadata)
        metadata.storage_data[real.MetadataIndex(f"w{number}")] = infos(metadata)[0]


def share_path(metadata: real.Metadata) -> None:
    path = ("a", *[0] * 3000)
    metadata.planner_data = {"w": path} | {f"v{number}": path for number in range(200)}


def place(number: int, **fields: Any) -> Callable[[real.Metadata], object]:
    return lambda metadata: vars(infos(metadata)[number]).update(fields)


# Changes of the metadata of the tensor ``w`` that the error must name, and words of the error.
OF_A_TENSOR: dict[str, tuple[Callable[[real.Metadata], object], str | None]] = {
    **{
        f"a piece in {name!r}": (place(3, relative_path=name), "which is not in the checkpoint's directory")
        for name in ("../secret", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "c:d", "x\0y")
    },
    **{
        f"a piece at {offset} of {length} bytes": (place(2, offset=offset, length=length), None)
        for offset in (10**15, 0, -1)
        for length in (5, -5, 0, 10**15)
        if (offset, length) != (0, 5)
    },
    **{
        f"a {field} of {'-' * (value < 0)}2**{value.bit_length()}": (place(0, **{field: value}), None)
        for field in ("offset", "length")
        for value in (10**5000, -(10**5000), 2**63, 2**70)
    },
    "a missing chunk": (lambda metadata: entry(metadata).chunks.pop(4), "no chunk has"),
    "a chunk twice": (lambda metadata: entry(metadata).chunks.append(entry(metadata).chunks[4]), "overlap"),
    "a moved chunk": (
        lambda metadata: entry(metadata).chunks.__setitem__(4, entry(metadata).chunks[5]),
        "no chunk has|overlap",
    ),
    "a chunk beyond its tensor": (lambda metadata: setattr(entry(metadata), "size", torch.Size([11, 8])), "beyond"),
    "a chunk without a place": (
        lambda metadata: metadata.storage_data.pop(real.MetadataIndex("w", torch.Size([0, 4]))),
        "lacks the location",
    ),
    "another dtype": (lambda metadata: setattr(entry(metadata).properties, "dtype", torch.int32), "metadata declares"),
    "pieces of other shapes": (swap_pieces, "the metadata declares"),
    "a shape larger than its chunk, before memory is allocated": (one_huge_chunk, "cannot hold"),
}
OTHERS: dict[str, tuple[Callable[[real.Metadata], object], str | None]] = {
    "an impossible shape": (
        lambda metadata: setattr(entry(metadata), "size", torch.Size([2**40, 2**40])),
        "impossible shape",
    ),
    "entries that share bytes": (share_bytes, "its chunks claim"),
    "names that share one list of chunks": (share_chunks, "same chunks many times"),
    "names that share one path": (share_path, "same paths many times"),
    "a record with too many fields": (
        lambda metadata: vars(metadata).update({f"field{number}": number for number in range(1000)}),
        "fields",
    ),
}


@pytest.mark.parametrize(("changes", "name"), [(OF_A_TENSOR, "w"), (OTHERS, None)], ids=["of a tensor", "others"])
def test_metadata_that_lies_or_has_transforms_is_refused(
    changes: dict[str, Any], name: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "c"
    write_chunks(path, {"w": torch.ones(11, 9)}, cut=grid)
    original = (path / ".metadata").read_bytes()
    for label, (change, words) in changes.items():
        (path / ".metadata").write_bytes(original)
        change_metadata(path, change)
        with case(label):
            with (
                pytest.raises(CorruptCheckpointError, match=words) as caught,
                FORMAT.open(path, OpenSettings()) as reader,
            ):
                load(reader)
            assert caught.value.name == name or name is None
            assert len(str(caught.value)) < 1000
    (path / ".metadata").write_bytes(original)
    change_metadata(path, place(1, transform_descriptors=["stream.zstd/1"]))
    with pytest.raises(UnsupportedError, match="transform") as unsupported:
        read(path)
    assert unsupported.value.remedy


class Attack:
    """An object whose pickle runs a command."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.witness}",)


def test_what_would_run_code_is_refused_by_name_and_not_run(tmp_path: Path) -> None:
    witness = tmp_path / "run"
    real_save({"w": torch.ones(2)}, tmp_path / "metadata")
    change_metadata(tmp_path / "metadata", lambda metadata: setattr(metadata, "planner_data", Attack(witness)))
    with pytest.raises(UnsupportedError, match=r"names posix\.system"):
        read(tmp_path / "metadata")
    assert FORMAT.recognises(tmp_path / "metadata")
    for kind in ("tensor", "value"):
        write_piece(tmp_path / kind, Attack(witness), change=as_value if kind == "value" else None)
        with pytest.raises(UnsupportedError):
            read(tmp_path / kind)
    assert not witness.exists()


@pytest.mark.parametrize("member", [True, False])
def test_a_member_of_an_enum_may_be_an_attribute(member: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.0 to 3.11.3 pickle it so. Attributes of anything else are refused."""

    def reduced(self: Any, _: int) -> tuple[Any, ...]:
        return getattr, (type(self), self.name) if member else (torch.Size, "numel")

    monkeypatch.setattr(real._MEM_FORMAT_ENCODING, "__reduce_ex__", reduced)
    real_save({"w": torch.ones(2)}, tmp_path / "c")
    if member:
        assert difference({"w": torch.ones(2)}, read(tmp_path / "c")) is None
    else:
        with pytest.raises(UnsupportedError, match=r"names builtins\.getattr"):
            read(tmp_path / "c")


def test_missing_file_is_refused_and_a_link_to_it_followed(tmp_path: Path) -> None:
    write_chunks(tmp_path / "c", {"w": torch.ones(11, 9)}, cut=grid)
    piece = tmp_path / "c" / "__7_0.distcp"
    piece.rename(tmp_path / "elsewhere")
    piece.symlink_to(tmp_path / "elsewhere")
    assert difference({"w": torch.ones(11, 9)}, read(tmp_path / "c")) is None
    piece.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"__7_0\.distcp.*missing"):
        FORMAT.open(tmp_path / "c", OpenSettings())
    (tmp_path / "c" / ".metadata").unlink()
    with pytest.raises(NotACheckpointError, match=r"no \.metadata"):
        FORMAT.open(tmp_path / "c", OpenSettings())


def test_missing_sidecar_is_found_and_a_stale_one_explained(tmp_path: Path) -> None:
    tensorkeep.save({"a": torch.ones(1)}, tmp_path / "c", format="dcp")
    kept = (tmp_path / "c" / "tensorkeep.json").read_bytes()
    (tmp_path / "c" / "tensorkeep.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"tensorkeep\.json"):
        FORMAT.open(tmp_path / "c", OpenSettings())
    real_save({"b": torch.zeros(2)}, tmp_path / "c")
    assert difference({"b": torch.zeros(2)}, read(tmp_path / "c")) is None
    (tmp_path / "c" / "tensorkeep.json").write_bytes(kept)
    with pytest.raises(CorruptCheckpointError, match="if another tool wrote here since, remove"):
        FORMAT.open(tmp_path / "c", OpenSettings())


PICKLES = [
    b"\x80\x04r\xff\xff\xff\x7f.",  # a memo of two thousand million places
    b"\x80\x05\x96" + (2**40).to_bytes(8, "little"),  # a bytearray of a terabyte
    b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"x",  # a text of four exabytes
    b"\x80\x04)" + b"\x85" * 20_000 + b"}\x94h\x00s.",
    b"\x80\x04}" + b")" + b"\x85" * 200_000 + b"Ns.",  # a key that is hashed by recursion
    b"\x80\x04]\x94h\x00a.",  # a list that holds itself
    b"\x80\x04(.",
    b"\x80\x04",
    b"",
    b"\x80\x04K\x01R.",
    b"\x80\x04\x82\x01.",  # a registered extension
    b"cposix\nsystem\n(X\x02\x00\x00\x00lstR.",
]


def test_malformed_pickle_is_refused(tmp_path: Path) -> None:
    for content in PICKLES:
        (tmp_path / ".metadata").write_bytes(content)
        with case(content[:20]), pytest.raises((CorruptCheckpointError, UnsupportedError)):
            FORMAT.open(tmp_path, OpenSettings())


def test_paths_that_conflict_or_have_large_indices_or_gaps_stay_flat(tmp_path: Path) -> None:
    for number, paths in enumerate(
        ({"a": ("a",), "a.b": ("a", "b")}, {"a.999999999": ("a", 999_999_999)}, {"a": ("a", *[1000] * 400)})
    ):
        write_chunks(tmp_path / str(number), {name: torch.ones(1) for name in paths}, paths=paths)
        assert sorted(read(tmp_path / str(number))) == [*paths]


def test_pieces_that_would_take_more_memory_than_the_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorkeep.formats.dcp.reader.SHARED_VALUES", 10_000)
    write_piece(tmp_path / "expanded", torch.ones(1).expand(50))
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        read(tmp_path / "expanded")
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    write_piece(tmp_path / "shared", value, change=as_value)
    with pytest.raises(UnsupportedError, match="expands to more than"):
        FORMAT.open(tmp_path / "shared", OpenSettings())


def test_audit_checks_every_chunk_of_a_tensor_outside_of_the_state(tmp_path: Path) -> None:
    tensors = {"w": torch.full((11, 9), 7.25), "x": torch.full((11, 9), 7.25)}
    write_chunks(tmp_path / "c", tensors, cut=grid)
    # A sidecar that does not list x.
    flat = flatten({"w": tensors["w"]})
    structure, notes = Structure.of_state(flat), sidecar.describe_tensors(flat)
    listed = sidecar.Sidecar(format="dcp", structure=structure, tensors=notes, files={}, metadata={})
    sidecar.write(tmp_path / "c", listed)
    with FORMAT.open(tmp_path / "c", OpenSettings()) as reader:
        assert list(reader.audit()) == []
        places = [chunk.location for chunk in reader._metadata.tensors["x"].chunks]
    assert len(places) > 2
    file = tmp_path / "c" / places[0].file
    data = bytearray(file.read_bytes())
    data[data.index(torch.full((2,), 7.25).numpy().tobytes(), places[0].offset)] ^= 1
    file.write_bytes(data)
    with FORMAT.open(tmp_path / "c", OpenSettings()) as reader:
        assert [(problem.name, problem.file) for problem in reader.audit()] == [("x", file.name)]


def test_calls_in_a_pickle_are_recorded_and_plain_values_kept() -> None:
    value = {"a": [1, -2, 2**40, 2**100, 1.5, None, True, "ü", b"x"], "t": ((), (1,), (1, 2, 3, 4)), "d": Path("a/b")}
    for protocol in (4, 5):
        found = dict(pickles.decode(pickle.dumps(value, protocol), {("pathlib", "PosixPath")}, "it"))
        assert found["a"] == value["a"] and found["t"] == value["t"]
        assert str(found["d"].function) == "pathlib.PosixPath" and found["d"].args == ("a", "b")


def box(*sides: tuple[int, int]) -> tuple[slice, ...]:
    """Return a box by the start and the length of each side."""
    return tuple(slice(start, start + length) for start, length in sides)


def test_tilings_must_cover_a_tensor_once() -> None:
    check_tiling((), [()])
    check_tiling((0, 3), [])
    check_tiling((4,), [box((2, 2)), box((0, 2))])
    for bad in (
        [box((0, 2), (0, 2)), box((1, 1), (1, 1)), box((0, 1), (2, 1)), box((1, 1), (2, 0))],
        [box((0, 2), (0, 3)), box((0, 2), (0, 3))],
        [box((0, 2))],
        [],
    ):
        with pytest.raises(ValueError):
            check_tiling((2, 3), bad)
    with pytest.raises(ValueError, match="overlap"):
        check_tiling((4, 2), [box((0, 3), (0, 2)), box((2, 1), (0, 2))])
