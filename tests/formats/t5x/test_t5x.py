"""T5X checkpoints: made by hand as T5X writes them, written by Tensorkeep, and hostile ones."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import tensorstore
import torch

import tensorkeep
from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    TensorkeepError,
    UnsupportedError,
    UsageError,
)
from tensorkeep.formats import sealed, sidecar
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.t5x import FORMAT, flax_msgpack
from tensorkeep.formats.write import WriteSettings
from tensorkeep.io.buffers import BufferPool
from tensorkeep.io.directory import Directory
from tensorkeep.io.source_file import SourceFile
from tensorkeep.state.tree import flatten
from tensorkeep.testing.equality import difference
from tensorkeep.testing.format_states import load, noise, training_state

Tree = dict[str, Any]


def read(path: Path) -> Any:
    with FORMAT.open(path, OpenSettings()) as reader:
        assert list(reader.audit()) == []
        return load(reader)


# ---- made by hand, without Tensorkeep's writer


def ext(code: int, array: npt.NDArray[Any]) -> msgspec.msgpack.Ext:
    packed = msgspec.msgpack.encode([list(array.shape), array.dtype.name, array.tobytes()])
    return msgspec.msgpack.Ext(code, packed)


def put_array(path: Path, values: npt.NDArray[Any], chunks: list[int], dtype: str) -> None:
    tensorstore.open(
        {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{path}/"},
            "metadata": {"shape": values.shape, "chunks": chunks, "dtype": dtype, "compressor": {"id": "gzip"}},
            "create": True,
        }
    ).result().write(values).result()


def pointer(path: str, shape: tuple[int, ...], **more: Any) -> Tree:
    # Chunks and compressor are wrong here, as in checkpoints that were converted: `.zarray` is right.
    metadata = {"shape": shape, "chunks": [1] * len(shape), "compressor": {"id": "zlib"}}
    return {
        "driver": "zarr",
        "dtype": "float32",
        "kvstore": {"driver": "file", "path": path},
        "metadata": metadata,
        **more,
    }


KERNEL = np.arange(24, dtype=np.float32).reshape(6, 4)
SCALE = np.array([1.5, -2, 0.25], ml_dtypes.bfloat16)
EMBEDDING = np.linspace(0, 1, 10, dtype=np.float32).reshape(5, 2)
MOMENT = np.full((6, 4), 2.5, np.float32)
PIECES = np.arange(10, dtype=np.int32)


def t5x_tree() -> Tree:
    gcs = {"driver": "gcs", "bucket": "t5x-dummy-bucket"}
    target = {
        "encoder": {
            "layers_0": {"kernel": pointer("target.encoder.layers_0.kernel", (6, 4))},
            "scale": pointer("target.encoder.scale/", (3,)),
        },
        "embedding": {**pointer("", (5, 2)), "kvstore": gcs, "path": "target.embedding"},
        "small": ext(1, np.array([[1, 2]], np.int16)),
        "long": {
            "__msgpack_chunked_array__": True,
            "shape": {"0": 2, "1": 5},
            "chunks": {"0": ext(1, PIECES[:7]), "1": ext(1, PIECES[7:])},
        },
    }
    state = {
        "step": ext(1, np.array(1_000_000, np.int32)),
        "rate": ext(3, np.array(0.5, np.float32)),
        "turn": msgspec.msgpack.Ext(2, msgspec.msgpack.encode([1.0, -2.0])),
        "name": "adafactor",
        "param_states": {"kernel": {"v": pointer("state.param_states.kernel.v", (6, 4)), "none": None}},
    }
    return {"version": 3, "optimizer": {"target": target, "state": state}}


def t5x_made(path: Path, tree: Tree | None = None) -> Path:
    path.mkdir()
    (path / "checkpoint").write_bytes(msgspec.msgpack.encode(tree or t5x_tree()))
    put_array(path / "target.encoder.layers_0.kernel", KERNEL, [3, 2], "<f4")
    put_array(path / "target.encoder.scale", SCALE, [3], "bfloat16")
    put_array(path / "target.embedding", EMBEDDING, [5, 1], "<f4")
    put_array(path / "state.param_states.kernel.v", MOMENT, [6, 4], "<f4")
    return path


def test_checkpoint_of_t5x_is_read(tmp_path: Path) -> None:
    path = t5x_made(tmp_path / "checkpoint_1000000")
    expected = {
        "target": {
            "encoder": {
                "layers_0": {"kernel": torch.from_numpy(KERNEL)},
                "scale": torch.tensor([1.5, -2, 0.25], dtype=torch.bfloat16),
            },
            "embedding": torch.from_numpy(EMBEDDING),
            "small": torch.tensor([[1, 2]], dtype=torch.int16),
            "long": torch.from_numpy(PIECES).reshape(2, 5),
        },
        "state": {
            "step": torch.tensor(1_000_000, dtype=torch.int32),
            "rate": np.float32(0.5),
            "turn": complex(1, -2),
            "name": "adafactor",
            "param_states": {"kernel": {"v": torch.from_numpy(MOMENT), "none": None}},
        },
    }
    assert difference(expected, read(path)) is None
    assert tensorkeep.info(path).format == "t5x"
    assert (
        difference(torch.from_numpy(KERNEL), tensorkeep.load(path)["target"]["encoder"]["layers_0"]["kernel"]) is None
    )
    with FORMAT.open(path, OpenSettings()) as reader:
        assert reader.verifiable == "CRC-32 of every chunk"
        assert reader.entries["target.encoder.layers_0.kernel"].codec == "gzip"
        assert reader.entries["target.embedding"].file == "target.embedding"
        out = np.empty(20, np.uint8)
        reader.read("target.encoder.layers_0.kernel", 12, 32, out)
        assert out.view(np.float32).tolist() == [3, 4, 5, 6, 7]


def test_missing_chunk_of_t5x_is_zeros(tmp_path: Path) -> None:
    path = t5x_made(tmp_path / "c")
    (path / "target.encoder.layers_0.kernel" / "1.0").unlink()
    kernel = read(path)["target"]["encoder"]["layers_0"]["kernel"]
    assert kernel[3:, :2].count_nonzero() == 0 and torch.equal(kernel[:3], torch.from_numpy(KERNEL[:3]))


def test_literal_bytes_of_flax() -> None:
    # {"a": int8 array [1, 2], "b": float16 scalar 1.0, "c": 1j}, byte by byte.
    packed = b"\x93\x91\x02\xa4int8\xc4\x02\x01\x02"
    scalar = b"\x93\x90\xa7float16\xc4\x02\x00\x3c"
    turn = b"\x92\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00"
    content = (
        b"\x83\xa1a\xc7"
        + bytes([len(packed)])
        + b"\x01"
        + packed
        + b"\xa1b\xc7"
        + bytes([len(scalar)])
        + b"\x03"
        + scalar
        + b"\xa1c\xc7"
        + bytes([len(turn)])
        + b"\x02"
        + turn
    )
    found = flax_msgpack.decode(content)
    assert found["a"].dtype == np.int8 and found["a"].tolist() == [1, 2]
    assert type(found["b"]) is np.float16 and found["b"] == 1 and found["c"] == 1j
    assert flax_msgpack.encode({"a": found["a"], "b": found["b"]}) == b"\x82" + content[1 : content.index(b"\xa1c\xc7")]


def test_large_arrays_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flax_msgpack, "MAX_ARRAY_BYTES", 16)
    array = np.arange(15, dtype=np.float32).reshape(3, 5)
    found = flax_msgpack.decode(flax_msgpack.encode({"w": array}))["w"]
    assert flax_msgpack.is_split(found) and [len(chunk) for chunk in found["chunks"].values()] == [4, 4, 4, 3]
    assert np.array_equal(flax_msgpack.join(found), array)


# ---- written by Tensorkeep, read as T5X reads


def as_t5x_reads(path: Path, spec: Tree) -> npt.NDArray[Any]:
    """Open an array from its spec alone, with the path relative to the directory."""
    given = {"driver": spec["driver"], "kvstore": {**spec["kvstore"], "path": f"{path}/{spec['kvstore']['path']}"}}
    store = tensorstore.open(given, open=True).result()
    metadata = store.spec().to_json()["metadata"]
    assert [metadata["shape"], metadata["chunks"]] == [spec["metadata"]["shape"], spec["metadata"]["chunks"]]
    assert metadata["compressor"]["id"] == spec["metadata"]["compressor"]["id"] == "gzip"
    return np.asarray(store.read().result())


def test_t5x_finds_the_arrays_of_our_checkpoint(tmp_path: Path) -> None:
    weight = torch.linspace(-1, 1, 60, dtype=torch.float16).reshape(12, 5)
    state = {"model": {"layers": [{"w": weight}], "head": weight, "row": weight[3]}, "step": 7, "lr": 0.1}
    tensorkeep.save(state, tmp_path / "c", format="t5x", chunk="100B")
    tree = flax_msgpack.decode((tmp_path / "c" / "checkpoint").read_bytes())
    assert tree["version"] == 3
    optimizer = tree["optimizer"]
    assert optimizer["state"]["step"].dtype == np.int32 and optimizer["state"]["step"] == 7
    model = optimizer["target"]["model"]
    spec = model["layers"]["0"]["w"]
    assert spec == {
        "driver": "zarr",
        "dtype": "float32",
        "kvstore": {"driver": "file", "path": "target.model.layers.0.w"},
        "metadata": {"shape": [12, 5], "chunks": [4, 5], "compressor": {"id": "gzip"}},
    }
    assert np.array_equal(as_t5x_reads(tmp_path / "c", spec), weight.float().numpy())
    assert model["head"] == spec  # tied weights: two names for one array
    assert "row" not in model
    assert [optimizer["target"]["step"], optimizer["target"]["lr"]] == [7, 0.1]
    zarray = json.loads((tmp_path / "c" / "target.model.layers.0.w" / ".zarray").read_text())
    assert zarray["dtype"] == "<f4" and zarray["compressor"]["id"] == "gzip" and zarray["zarr_format"] == 2
    assert (tmp_path / "c" / "target.model.layers.0.w" / "2.0").read_bytes()[:2] == b"\x1f\x8b"
    found = tensorkeep.load(tmp_path / "c")
    assert difference(state, found) is None and found["model"]["layers"][0]["w"] is found["model"]["head"]


def test_dtype_that_was_saved_is_restored(tmp_path: Path) -> None:
    state = {name: torch.linspace(-2, 2, 9).to(getattr(torch, name)) for name in ("bfloat16", "float16", "float32")}
    state |= {"ids": torch.arange(5), "mask": torch.tensor([True, False])}
    tensorkeep.save(state, tmp_path / "c", format="t5x")
    assert json.loads((tmp_path / "c" / "target.bfloat16" / ".zarray").read_text())["dtype"] == "<f4"
    assert difference(state, tensorkeep.load(tmp_path / "c")) is None
    tensorkeep.save(state, tmp_path / "kept", format="t5x", dtype="keep")
    assert json.loads((tmp_path / "kept" / "target.bfloat16" / ".zarray").read_text())["dtype"] == "bfloat16"
    assert difference(state, tensorkeep.load(tmp_path / "kept")) is None


def test_float64_is_not_truncated(tmp_path: Path) -> None:
    state = {"wide": torch.full((3,), 0.1, dtype=torch.float64), "narrow": torch.full((3,), 0.1, dtype=torch.float16)}
    tensorkeep.save(state, tmp_path / "c", format="t5x")
    stored = {name: json.loads((tmp_path / "c" / f"target.{name}" / ".zarray").read_text())["dtype"] for name in state}
    assert stored == {"wide": "<f8", "narrow": "<f4"}
    assert difference(state, tensorkeep.load(tmp_path / "c")) is None


@pytest.mark.parametrize(
    "state",
    [
        {1: noise("float32", 2), "1": noise("float32", 3)},
        {"a": {"b": noise("int8", 1)}, "a.b": noise("int8", 2), "a/b": noise("int8", 3)},
        {"driver": noise("int8", 4), "kvstore": noise("int8", 5), "x": {"driver": "zarr", "path": "y"}},
        {"__msgpack_chunked_array__": noise("int8", 4), "a": {"__msgpack_chunked_array__": True, "b": {"driver": 1}}},
        {"a": 2**80, "b": "PLACEHOLDER://c", "c": {"d": (1, [2, {"e": noise("int8", 1)}])}},
        [noise("float32", 2), {"": noise("float32", 2)}],
        {"w" * 300: noise("float32", 2), "..": noise("float32", 3), "W" * 300: noise("float32", 4)},
    ],
    ids=range(7),
)
def test_awkward_keys_round_trip(state: Any, tmp_path: Path) -> None:
    tensorkeep.save(state, tmp_path / "c", format="t5x")
    assert difference(state, tensorkeep.load(tmp_path / "c")) is None
    assert all(child.name.startswith("target.") for child in (tmp_path / "c").iterdir() if child.is_dir())


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    state = {"large": torch.arange(20_000_000, dtype=torch.float32).reshape(20, 1_000_000), "small": torch.ones(10)}
    flat = flatten(state)
    for number, in_flight in enumerate(("all", "one")):
        with BufferPool(64 * 1024**2) as pool:
            options = {"compressor": None, "in_flight": in_flight, "chunk": "4MiB"}
            written = FORMAT.write(
                flat, tmp_path / str(number), WriteSettings(pool=pool, options=FORMAT.parse_options(options))
            )
        assert 4_000_000 <= written.peak_buffer_bytes <= 64 * 1024**2
    with FORMAT.open(tmp_path / "0", OpenSettings()) as reader:
        assert difference(state, load(reader)) is None


@pytest.mark.parametrize(
    ("options", "word"),
    [({"zarr": 3}, "zarr"), ({"chunk": -1}, "chunk"), ({"concurrency": 0}, "concurrency"), ({"compressor": "x"}, "x")],
)
def test_invalid_options_are_refused(options: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=word):
        tensorkeep.save({"a": torch.ones(2)}, tmp_path / "c", format="t5x", **options)
    assert list(tmp_path.iterdir()) == []


# ---- damaged and hostile checkpoints


def refused(path: Path, change: Callable[[Tree], None]) -> TensorkeepError:
    tree = t5x_tree()
    change(tree)
    t5x_made(path, tree)
    with pytest.raises(TensorkeepError) as caught:
        read(path)
    return caught.value


@pytest.mark.parametrize("place", ["../secret", "/etc", "..", ".", "", "a/b", "a\\b", "x\0y", 5, None, ["x"]])
def test_spec_of_a_directory_elsewhere_is_refused(place: Any, tmp_path: Path) -> None:
    def change(tree: Tree) -> None:
        tree["optimizer"]["target"]["embedding"] = pointer(place, (5, 2))

    error = refused(tmp_path / "c", change)
    assert isinstance(error, CorruptCheckpointError) and error.name == "target.embedding"
    assert "not in the checkpoint's directory" in error.message or "names no directory" in error.message


def test_link_out_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = t5x_made(tmp_path / "c")
    (path / "target.embedding").rename(tmp_path / "elsewhere")
    (path / "target.embedding").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpointError, match="symbolic link"):
        read(path)


@pytest.mark.parametrize("where", ["target.w", "target.w/0.0", "target.w/.zarray"])
@pytest.mark.parametrize("own", [True, False])
def test_links_in_arrays_are_refused(where: str, own: bool, tmp_path: Path) -> None:
    path = tmp_path / "c"
    tensorkeep.save({"w": torch.ones(3, 3)}, path, format="t5x")
    if not own:
        (path / "tensorkeep.json").unlink()
        tree = {"version": 3, "optimizer": {"target": {"w": pointer("target.w", (3, 3))}}}
        (path / "checkpoint").write_bytes(msgspec.msgpack.encode(tree))
    (path / where).rename(tmp_path / "elsewhere")
    (path / where).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpointError, match="symbolic link") as caught:
        read(path)
    assert str(caught.value.path).startswith(str(path / "target.w"))


def test_metadata_of_more_than_16_mib_is_not_read(tmp_path: Path) -> None:
    path = t5x_made(tmp_path / "c")
    os.truncate(path / "target.embedding" / ".zarray", 2**40)
    with pytest.raises(UnsupportedError, match="bytes of metadata"):
        read(path)


def test_listed_files_are_hashed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.ones(3), "b": torch.zeros(2)}
    tensorkeep.save(state, tmp_path / "c", format="t5x")
    monkeypatch.setattr(sealed, "_PIECE", 50)
    counts: list[int] = []
    original = SourceFile.read_into

    def counted(self: SourceFile, offset: int, out: Any) -> None:
        if self.path.name == ".zarray":
            counts.append(len(out))
        original(self, offset, out)

    monkeypatch.setattr(SourceFile, "read_into", counted)
    assert difference(state, read(tmp_path / "c")) is None
    sizes = sum(file.stat().st_size for file in (tmp_path / "c").glob("*/.zarray"))
    assert max(counts) == 50 and sum(counts) == sizes


def test_listed_files_are_those_of_the_open_directory(tmp_path: Path) -> None:
    path = tmp_path / "c"
    tensorkeep.save({"a": torch.ones(3)}, path, format="t5x")
    with Directory(path) as held:
        path.rename(tmp_path / "old")
        tensorkeep.save({"a": torch.ones(7)}, path, format="t5x")
        assert sidecar.read(held, "t5x", sidecar.Sidecar).tensors["a"].shape == (3,)
        (tmp_path / "old" / "target.a" / ".zarray").unlink()
        (tmp_path / "old" / "target.a" / ".zarray").mkdir()
        with pytest.raises(CorruptCheckpointError, match="not a regular file") as caught:
            sidecar.read(held, "t5x", sidecar.Sidecar)
        assert caught.value.path == str(path / "target.a" / ".zarray")


@pytest.mark.parametrize("kind", ["pointer", "pieces"])
def test_optimizer_that_is_an_array_is_refused(kind: str, tmp_path: Path) -> None:
    optimizers = {
        "pointer": {"driver": "zarr", "kvstore": {"path": "x"}},
        "pieces": t5x_tree()["optimizer"]["target"]["long"],
    }
    error = refused(tmp_path / "c", lambda tree: tree.update(optimizer=optimizers[kind]))
    assert isinstance(error, CorruptCheckpointError) and "single array" in error.message


@pytest.mark.parametrize("length", [0, 1, 2])
def test_version_that_is_an_array_is_refused(length: int, tmp_path: Path) -> None:
    error = refused(tmp_path / "c", lambda tree: tree.update(version=ext(1, np.full(length, 3, np.int32))))
    assert isinstance(error, UnsupportedError) and "ndarray" in error.message


def test_arrays_and_placeholders_in_lists_are_refused(tmp_path: Path) -> None:
    long = t5x_tree()["optimizer"]["target"]["long"]
    values = ["PLACEHOLDER://x", pointer("target.embedding", (5, 2)), {"deep": [pointer("y", (1,))]}, long]
    for number, value in enumerate(values):
        error = refused(tmp_path / str(number), lambda tree, value=value: tree["optimizer"].update(x=[1, [value]]))  # type: ignore[misc]
        assert isinstance(error, UnsupportedError) and error.name == "x", value


def test_lists_of_plain_values_are_read(tmp_path: Path) -> None:
    tree = t5x_tree()
    tree["optimizer"]["state"]["sizes"] = [1, [2.5, "x"], None]
    assert read(t5x_made(tmp_path / "c", tree))["state"]["sizes"] == [1, [2.5, "x"], None]


def test_placeholder_error_names_orbax(tmp_path: Path) -> None:
    def change(tree: Tree) -> None:
        tree["optimizer"]["target"]["embedding"] = "PLACEHOLDER://target.embedding"

    error = refused(tmp_path / "c", change)
    assert isinstance(error, UnsupportedError) and "Orbax" in str(error) and error.name == "target.embedding"
    assert error.remedy == "load it with Orbax and save it again"


@pytest.mark.parametrize(
    ("version", "word"), [(2, "uint16"), (1, "uint16"), (None, "uint16"), ("3", ""), (4, "reads 3")]
)
def test_other_versions_are_refused_with_the_reason(version: Any, word: str, tmp_path: Path) -> None:
    error = refused(tmp_path / "c", lambda tree: tree.update(version=version))
    assert isinstance(error, UnsupportedError) and word in str(error)


def test_malformed_trees_are_refused(tmp_path: Path) -> None:
    def put(value: Any) -> Callable[[Tree], None]:
        return lambda tree: tree["optimizer"]["target"].update(x=value)

    chunked = t5x_tree()["optimizer"]["target"]["long"]
    values = [
        pointer("target.nothing", (2,)),
        {**pointer("target.embedding", (5, 2)), "driver": "zarr3"},
        msgspec.msgpack.Ext(7, b"x"),
        msgspec.msgpack.Ext(1, b"x"),
        msgspec.msgpack.Ext(1, msgspec.msgpack.encode([[2**40, 2**40], "float32", b"1234"])),
        msgspec.msgpack.Ext(1, msgspec.msgpack.encode([[-1, -1], "float32", b"1234"])),
        msgspec.msgpack.Ext(1, msgspec.msgpack.encode([[1], "object", b"12345678"])),
        msgspec.msgpack.Ext(3, msgspec.msgpack.encode([[1], "int32", b"1234"])),
        {**chunked, "shape": {"0": 2, "1": 6}},
        {**chunked, "shape": {"0": 2**62, "1": 2**62}},
        {**chunked, "shape": [2, 5]},
        {**chunked, "chunks": {"0": chunked["chunks"]["0"], "2": chunked["chunks"]["1"]}},
        {**chunked, "chunks": {}},
        {1: 2},
    ]
    for number, value in enumerate(values):
        error = refused(tmp_path / str(number), put(value))
        assert isinstance(error, CorruptCheckpointError | UnsupportedError), value


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x82\xa7version\x03",
        b"\x82\xa7version\x03\xa9optimizer\xdf\xff\xff\xff\xff",
        b"\x82\xa7version\x03\xa9optimizer" + b"\x91" * 100_000,
        b"\x82\xa7version\x03\xa9optimizer" + b"\x81\xa1a" * 500 + b"\xc0",
        b"\x82\xa7version\x03\xa9optimizer\xc0",
        b"\x93\x01\x02\x03",
        b"model_checkpoint_path: 'x'",
        b"\x81\xa1\xff\x01",
    ],
)
def test_malformed_msgpack_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(content)
    with pytest.raises((CorruptCheckpointError, UnsupportedError)):
        FORMAT.open(tmp_path, OpenSettings())


def test_every_missing_chunk_is_an_error(tmp_path: Path) -> None:
    tensorkeep.save({"zeros": torch.zeros(12, 5), "w": torch.ones(12, 5)}, tmp_path / "c", format="t5x", chunk="100B")
    for chunk in sorted((tmp_path / "c").glob("target.*/*.*")):
        kept = chunk.read_bytes()
        chunk.unlink()
        with pytest.raises(CorruptCheckpointError, match=r"zeros|w"):
            read(tmp_path / "c")
        chunk.write_bytes(kept)
    shutil.rmtree(tmp_path / "c" / "target.w")
    with pytest.raises(CorruptCheckpointError, match=r"target\.w"):
        read(tmp_path / "c")


def test_missing_sidecar_and_changed_tree_are_errors(tmp_path: Path) -> None:
    tensorkeep.save(training_state(), tmp_path / "c", format="t5x", dtype="keep")
    tree = (tmp_path / "c" / "checkpoint").read_bytes()
    (tmp_path / "c" / "checkpoint").write_bytes(tree.replace(b"fused", b"fusee"))
    with pytest.raises(CorruptCheckpointError, match="checksum is wrong"):
        read(tmp_path / "c")
    (tmp_path / "c" / "checkpoint").write_bytes(tree)
    (tmp_path / "c" / "tensorkeep.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"tensorkeep\.json"):
        read(tmp_path / "c")


def test_unfinished_checkpoint_is_refused(tmp_path: Path) -> None:
    path = t5x_made(tmp_path / "checkpoint_10.tmp-1700000000")
    with pytest.raises(NotACheckpointError, match="is unfinished"):
        read(path)


def test_only_a_t5x_checkpoint_is_replaced(tmp_path: Path) -> None:
    path = t5x_made(tmp_path / "c")
    (path / "notes.txt").write_text("precious")
    with pytest.raises(TensorkeepError, match="not replaced"):
        tensorkeep.save({"a": torch.ones(1)}, path, format="t5x", overwrite=True)
    (path / "notes.txt").unlink()
    tensorkeep.save({"a": torch.ones(1)}, path, format="t5x", overwrite=True)
    assert difference({"a": torch.ones(1)}, tensorkeep.load(path)) is None


def test_without_tensorstore_errors_name_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = t5x_made(tmp_path / "c")
    monkeypatch.setitem(__import__("sys").modules, "tensorstore", None)
    assert FORMAT.recognises(path)
    for call in (lambda: read(path), lambda: tensorkeep.save({"a": torch.ones(1)}, tmp_path / "d", format="t5x")):
        with pytest.raises(UnsupportedError, match=r"pip install '\.\[tensorstore\]'"):
            call()
