"""Hostile and damaged checkpoints: each is refused, and no code of theirs runs."""

import io
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as real

import tensorkeep
from formats.dcp.checkpoints import grid, read, real_save, write_chunks
from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    TensorkeepError,
    UnsupportedError,
)
from tensorkeep.formats import sidecar
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.dcp import FORMAT, inert_pickle
from tensorkeep.formats.dcp.metadata import check_tiling
from tensorkeep.formats.structure import Structure
from tensorkeep.state.tree import flatten
from tensorkeep.testing.equality import difference
from tensorkeep.testing.format_states import load


def hostile(path: Path, change: Callable[[real.Metadata], None]) -> TensorkeepError:
    write_chunks(path, {"w": torch.ones(11, 9)}, cut=grid, change=change)
    with pytest.raises(TensorkeepError) as caught, FORMAT.open(path, OpenSettings()) as reader:
        load(reader)
    return caught.value


def infos(metadata: real.Metadata) -> list[Any]:
    return list(metadata.storage_data.values())


def as_value(metadata: real.Metadata) -> None:
    metadata.state_dict_metadata["w"] = real.BytesStorageMetadata()
    metadata.storage_data = {real.MetadataIndex("w"): infos(metadata)[0]}


def test_metadata_that_would_run_code_is_refused_by_name_and_not_run(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path}/run",)

    real_save({"w": torch.ones(2)}, tmp_path / "c")
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    metadata.planner_data = Attack()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsupportedError, match=r"names posix\.system"):
        FORMAT.open(tmp_path / "c", OpenSettings())
    assert FORMAT.recognises(tmp_path / "c")
    assert not (tmp_path / "run").exists()


def test_piece_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path}/run",)

    content = io.BytesIO()
    torch.save(Attack(), content)
    for kind in ("tensor", "value"):
        write_chunks(tmp_path / kind, {"w": torch.ones(2)})
        metadata = pickle.loads((tmp_path / kind / ".metadata").read_bytes())
        infos(metadata)[0].length = len(content.getvalue())
        if kind == "value":
            as_value(metadata)
        (tmp_path / kind / ".metadata").write_bytes(pickle.dumps(metadata))
        (tmp_path / kind / "__0_0.distcp").write_bytes(content.getvalue())
        with pytest.raises(UnsupportedError), FORMAT.open(tmp_path / kind, OpenSettings()) as reader:
            load(reader)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "c:d", "x\0y"])
def test_file_name_outside_of_the_directory_is_refused(name: str, tmp_path: Path) -> None:
    def change(metadata: real.Metadata) -> None:
        infos(metadata)[3].relative_path = name

    error = hostile(tmp_path / "c", change)
    assert isinstance(error, CorruptCheckpointError) and "which is not in the checkpoint's directory" in str(error)


def test_symbolic_link_is_refused(tmp_path: Path) -> None:
    write_chunks(tmp_path / "c", {"w": torch.ones(2)})
    (tmp_path / "c" / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (tmp_path / "c" / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpointError, match="symbolic link"):
        FORMAT.open(tmp_path / "c", OpenSettings())


@pytest.mark.parametrize(
    ("offset", "length"), [(10**15, 5), (-1, 100), (0, 0), (0, -5), (0, 10**15), (10**15, 10**15), (1, 2**70)]
)
def test_chunk_beyond_the_end_of_its_file_is_refused(offset: int, length: int, tmp_path: Path) -> None:
    def change(metadata: real.Metadata) -> None:
        infos(metadata)[2].offset, infos(metadata)[2].length = offset, length

    error = hostile(tmp_path / "c", change)
    assert isinstance(error, CorruptCheckpointError) and error.name == "w"


def test_entries_that_share_the_same_bytes_are_refused(tmp_path: Path) -> None:
    def change(metadata: real.Metadata) -> None:
        info = infos(metadata)[2]
        for number in range(10_000):
            metadata.state_dict_metadata[f"v{number}"] = real.BytesStorageMetadata()
            metadata.storage_data[real.MetadataIndex(f"v{number}")] = info

    assert "its chunks claim" in str(hostile(tmp_path / "c", change))


def test_overlapping_and_missing_chunks_are_refused(tmp_path: Path) -> None:
    def missing(metadata: real.Metadata) -> None:
        del metadata.state_dict_metadata["w"].chunks[4]

    def twice(metadata: real.Metadata) -> None:
        metadata.state_dict_metadata["w"].chunks.append(metadata.state_dict_metadata["w"].chunks[4])

    def moved(metadata: real.Metadata) -> None:
        metadata.state_dict_metadata["w"].chunks[4] = metadata.state_dict_metadata["w"].chunks[5]

    def beyond(metadata: real.Metadata) -> None:
        metadata.state_dict_metadata["w"].size = torch.Size([11, 8])

    def homeless(metadata: real.Metadata) -> None:
        del metadata.storage_data[real.MetadataIndex("w", torch.Size([0, 4]))]

    for number, (change, words) in enumerate(
        {
            missing: "chunks hold",
            twice: "overlap",
            moved: "chunks hold|overlap",
            beyond: "beyond",
            homeless: "lacks the location",
        }.items()
    ):
        error = hostile(tmp_path / str(number), change)
        assert isinstance(error, CorruptCheckpointError) and error.name == "w"
        assert any(word in str(error) for word in words.split("|")), str(error)


def test_piece_that_differs_from_the_metadata_is_refused(tmp_path: Path) -> None:
    def dtype(metadata: real.Metadata) -> None:
        metadata.state_dict_metadata["w"].properties.dtype = torch.int32

    def swapped(metadata: real.Metadata) -> None:
        infos(metadata)[0].relative_path, infos(metadata)[5].relative_path = "__5_0.distcp", "__0_0.distcp"

    assert "the metadata declares" in str(hostile(tmp_path / "dtype", dtype))

    def huge(metadata: real.Metadata) -> None:
        entry = metadata.state_dict_metadata["w"]
        entry.size = torch.Size([2**40, 2**40])

    assert "impossible shape" in str(hostile(tmp_path / "huge", huge))


def test_transforms_are_refused_with_a_remedy(tmp_path: Path) -> None:
    def change(metadata: real.Metadata) -> None:
        infos(metadata)[1].transform_descriptors = ["stream.zstd/1"]

    error = hostile(tmp_path / "c", change)
    assert isinstance(error, UnsupportedError) and "transform" in error.message and error.remedy


def test_missing_file_is_named(tmp_path: Path) -> None:
    write_chunks(tmp_path / "c", {"w": torch.ones(11, 9)}, cut=grid)
    (tmp_path / "c" / "__7_0.distcp").unlink()
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real_save({"b": torch.zeros(2)}, tmp_path / "c")
    assert difference({"b": torch.zeros(2)}, read(tmp_path / "c")) is None
    (tmp_path / "c" / "tensorkeep.json").write_bytes(kept)
    with pytest.raises(CorruptCheckpointError, match="if another tool wrote here since, remove"):
        FORMAT.open(tmp_path / "c", OpenSettings())


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04r\xff\xff\xff\x7f.",  # a memo of two thousand million places
        b"\x80\x05\x96" + (2**40).to_bytes(8, "little"),  # a bytearray of a terabyte
        b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"x",  # a text of four exabytes
        b"\x80\x04)" + b"\x85" * 200_000 + b"}\x94h\x00s.",
        b"\x80\x04}" + b")" + b"\x85" * 200_000 + b"Ns.",  # a key that is hashed by recursion
        b"\x80\x04]\x94h\x00a.",  # a list that holds itself
        b"\x80\x04(.",
        b"\x80\x04",
        b"",
        b"\x80\x04K\x01R.",
        b"\x80\x04\x82\x01.",  # a registered extension
        b"cposix\nsystem\n(X\x02\x00\x00\x00lstR.",
    ],
)
def test_malformed_pickle_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises((CorruptCheckpointError, UnsupportedError)):
        FORMAT.open(tmp_path, OpenSettings())


def test_lists_with_large_indices_stay_flat(tmp_path: Path) -> None:
    write_chunks(tmp_path / "c", {"a.999999999": torch.ones(1)}, paths={"a.999999999": ("a", 999_999_999)})
    assert list(read(tmp_path / "c")) == ["a.999999999"]


def test_gaps_of_all_lists_together_are_bounded(tmp_path: Path) -> None:
    paths = {"a": ("a", *[1000] * 400)}
    write_chunks(tmp_path / "c", {"a": torch.ones(1)}, paths=paths)
    assert list(read(tmp_path / "c")) == ["a"]


def opened(path: Path) -> TensorkeepError:
    with pytest.raises(TensorkeepError) as caught:
        FORMAT.open(path, OpenSettings()).close()
    return caught.value


def test_names_that_share_one_list_of_chunks_are_refused(tmp_path: Path) -> None:
    def change(metadata: real.Metadata) -> None:
        entry = metadata.state_dict_metadata["w"]
        for number in range(3000):
            metadata.state_dict_metadata[f"w{number}"] = entry
            metadata.storage_data[real.MetadataIndex(f"w{number}")] = infos(metadata)[0]

    write_chunks(tmp_path / "c", {"w": torch.ones(44, 36)}, cut=grid, change=change)
    error = opened(tmp_path / "c")
    assert isinstance(error, CorruptCheckpointError) and "same chunks many times" in str(error)


def test_names_that_share_one_path_are_refused(tmp_path: Path) -> None:
    path = ("a", *[0] * 3000)

    def change(metadata: real.Metadata) -> None:
        metadata.planner_data = {"w": path} | {f"v{number}": path for number in range(200)}

    write_chunks(tmp_path / "c", {"w": torch.ones(1)}, change=change)
    error = opened(tmp_path / "c")
    assert isinstance(error, CorruptCheckpointError) and "same paths many times" in str(error)


def test_record_with_too_many_fields_is_refused(tmp_path: Path) -> None:
    def change(metadata: real.Metadata) -> None:
        metadata.__dict__.update({f"field{number}": number for number in range(1000)})

    write_chunks(tmp_path / "c", {"w": torch.ones(1)}, change=change)
    error = opened(tmp_path / "c")
    assert isinstance(error, CorruptCheckpointError) and "fields" in str(error)


@pytest.mark.parametrize("field", ["offset", "length"])
@pytest.mark.parametrize("value", [10**5000, -(10**5000), 2**63], ids=["huge", "below", "just"])
def test_offset_of_thousands_of_digits_is_refused(field: str, value: int, tmp_path: Path) -> None:
    write_chunks(
        tmp_path / "c", {"w": torch.ones(1)}, change=lambda metadata: setattr(infos(metadata)[0], field, value)
    )
    error = opened(tmp_path / "c")
    assert isinstance(error, CorruptCheckpointError) and error.name == "w" and len(str(error)) < 1000


def test_shape_larger_than_its_chunk_is_refused_before_memory_is_allocated(tmp_path: Path) -> None:
    def change(metadata: real.Metadata) -> None:
        entry = metadata.state_dict_metadata["w"]
        entry.size = entry.chunks[0].sizes = torch.Size([2**50])

    write_chunks(tmp_path / "c", {"w": torch.ones(1)}, change=change)
    error = opened(tmp_path / "c")
    assert isinstance(error, CorruptCheckpointError) and error.name == "w" and "cannot hold" in str(error)


def test_expanded_tensor_is_refused(tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save(torch.ones(1).expand(50), content)

    def change(metadata: real.Metadata) -> None:
        infos(metadata)[0].length = len(content.getvalue())

    write_chunks(tmp_path / "c", {"w": torch.ones(50)}, change=change)
    (tmp_path / "c" / "__0_0.distcp").write_bytes(content.getvalue())
    with FORMAT.open(tmp_path / "c", OpenSettings()) as reader, pytest.raises(CorruptCheckpointError, match="overlap"):
        load(reader)


def test_audit_checks_every_chunk_of_a_tensor_outside_of_the_state(tmp_path: Path) -> None:
    tensors = {"w": torch.full((11, 9), 7.25), "x": torch.full((11, 9), 7.25)}
    write_chunks(tmp_path / "c", tensors, cut=grid)
    # A sidecar that does not list x.
    flat = flatten({"w": tensors["w"]})
    structure, notes = Structure.of_state(flat), sidecar.describe_tensors(flat)
    sidecar.write(
        tmp_path / "c", sidecar.Sidecar(format="dcp", structure=structure, tensors=notes, files={}, metadata={})
    )
    with FORMAT.open(tmp_path / "c", OpenSettings()) as reader:
        assert list(reader.audit()) == []
        places = [chunk.location for chunk in reader._contents.tensors["x"].chunks]
    assert len(places) > 2
    file = tmp_path / "c" / places[0].file
    data = bytearray(file.read_bytes())
    data[data.index(torch.full((2,), 7.25).numpy().tobytes(), places[0].offset)] ^= 1
    file.write_bytes(data)
    with FORMAT.open(tmp_path / "c", OpenSettings()) as reader:
        assert [(problem.name, problem.file) for problem in reader.audit()] == [("x", file.name)]


def test_exponentially_shared_containers_are_refused(tmp_path: Path) -> None:
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    content = io.BytesIO()
    torch.save(value, content)

    def change(metadata: real.Metadata) -> None:
        as_value(metadata)
        infos(metadata)[0].length = len(content.getvalue())

    write_chunks(tmp_path / "c", {"w": torch.ones(1)}, change=change)
    (tmp_path / "c" / "__0_0.distcp").write_bytes(content.getvalue())
    with pytest.raises(UnsupportedError, match="expands to more than"):
        FORMAT.open(tmp_path / "c", OpenSettings())


def test_inert_pickle_records_calls_and_keeps_plain_values() -> None:
    value = {"a": [1, -2, 2**40, 2**100, 1.5, None, True, "ü", b"x"], "t": ((), (1,), (1, 2, 3, 4)), "d": Path("a/b")}
    for protocol in (4, 5):
        found = inert_pickle.decode(pickle.dumps(value, protocol), {("pathlib", "PosixPath")}, "it")
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
