"""T5X checkpoints: made by hand as T5X writes them, written by Tensorkeep, and hostile ones."""

import json
import os
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

import tensorkeep
import tensorstore
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError, UnsupportedError, UsageError
from tensorkeep.formats import checksummed_json, sidecar
from tensorkeep.formats.base import OpenSettings, WriteSettings
from tensorkeep.state.tree import flatten
from tensorkeep.storage.base import SourceFile
from tensorkeep.storage.buffers import BufferPool
from tensorkeep.storage.local import LocalDirectory, LocalFile
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference
from tensorkeep.testing.format_suite import load, noise
from tensorkeep_formats import t5x
from tensorkeep_formats.t5x import FORMAT

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
    kvstore = {"driver": "file", "path": f"{path}/"}
    metadata = {"shape": values.shape, "chunks": chunks, "dtype": dtype, "compressor": {"id": "gzip"}}
    spec = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata, "create": True}
    tensorstore.open(spec).result().write(values).result()


def pointer(path: str, shape: tuple[int, ...], **more: Any) -> Tree:
    # Chunks and compressor are wrong here, as in checkpoints that were converted: `.zarray` is right.
    metadata = {"shape": shape, "chunks": [1] * len(shape), "compressor": {"id": "zlib"}}
    kvstore = {"driver": "file", "path": path}
    return {"driver": "zarr", "dtype": "float32", "kvstore": kvstore, "metadata": metadata, **more}


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
        "sizes": [1, [2.5, "x"], None],
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
            "sizes": [1, [2.5, "x"], None],
            "param_states": {"kernel": {"v": torch.from_numpy(MOMENT), "none": None}},
        },
    }
    assert difference(expected, read(path)) is None
    assert tensorkeep.info(path).format == "t5x"
    assert difference(expected, tensorkeep.load(path)) is None
    with FORMAT.open(path, OpenSettings()) as reader:
        assert reader.verifiable == "CRC-32 of every chunk"
        assert reader.entries["target.encoder.layers_0.kernel"].codec == "gzip"
        assert reader.entries["target.embedding"].file == "target.embedding"
        out = np.empty(20, np.uint8)
        reader.read("target.encoder.layers_0.kernel", 12, 32, out)
        assert out.view(np.float32).tolist() == [3, 4, 5, 6, 7]
    # A missing chunk is zeros.
    (path / "target.encoder.layers_0.kernel" / "1.0").unlink()
    kernel = read(path)["target"]["encoder"]["layers_0"]["kernel"]
    assert kernel[3:, :2].count_nonzero() == 0 and torch.equal(kernel[:3], torch.from_numpy(KERNEL[:3]))


def extension(code: int, content: bytes) -> bytes:
    return b"\xc7" + bytes([len(content), code]) + content


def test_literal_bytes_of_flax() -> None:
    # {"a": int8 array [1, 2], "b": float16 scalar 1.0, "c": 1j}, byte by byte.
    packed = b"\x93\x91\x02\xa4int8\xc4\x02\x01\x02"
    scalar = b"\x93\x90\xa7float16\xc4\x02\x00\x3c"
    turn = b"\x92\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00"
    content = b"\x83\xa1a" + extension(1, packed) + b"\xa1b" + extension(3, scalar) + b"\xa1c" + extension(2, turn)
    found = t5x.decode(content)
    assert found["a"].dtype == np.int8 and found["a"].tolist() == [1, 2]
    assert type(found["b"]) is np.float16 and found["b"] == 1 and found["c"] == 1j
    assert t5x.encode({"a": found["a"], "b": found["b"]}) == b"\x82" + content[1 : content.index(b"\xa1c\xc7")]


def test_large_arrays_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t5x, "MAX_ARRAY_BYTES", 16)
    array = np.arange(15, dtype=np.float32).reshape(3, 5)
    found = t5x.decode(t5x.encode({"w": array}))["w"]
    assert t5x.is_split(found) and [len(chunk) for chunk in found["chunks"].values()] == [4, 4, 4, 3]
    assert np.array_equal(t5x.join(found), array)


# ---- written by Tensorkeep, read as T5X reads


def test_t5x_finds_the_arrays_of_our_checkpoint(tmp_path: Path) -> None:
    weight = torch.linspace(-1, 1, 60, dtype=torch.float16).reshape(12, 5)
    state = {"model": {"layers": [{"w": weight}], "head": weight, "row": weight[3]}, "step": 7, "lr": 0.1}
    tensorkeep.save(state, tmp_path / "c", format="t5x", chunk="100B")
    tree = t5x.decode((tmp_path / "c" / "checkpoint").read_bytes())
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
    # T5X opens an array from its spec alone, with the path relative to the directory.
    kvstore = {"driver": "file", "path": f"{tmp_path}/c/target.model.layers.0.w"}
    store = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True).result()
    assert np.array_equal(store.read().result(), weight.float().numpy())
    metadata = store.spec().to_json()["metadata"]
    assert [metadata["shape"], metadata["chunks"], metadata["compressor"]["id"]] == [[12, 5], [4, 5], "gzip"]
    assert model["head"] == spec  # tied weights: two names for one array
    assert "row" not in model
    assert [optimizer["target"]["step"], optimizer["target"]["lr"]] == [7, 0.1]
    zarray = json.loads((tmp_path / "c" / "target.model.layers.0.w" / ".zarray").read_text())
    assert zarray["dtype"] == "<f4" and zarray["compressor"]["id"] == "gzip" and zarray["zarr_format"] == 2
    assert (tmp_path / "c" / "target.model.layers.0.w" / "2.0").read_bytes()[:2] == b"\x1f\x8b"
    found = tensorkeep.load(tmp_path / "c")
    assert difference(state, found) is None and found["model"]["layers"][0]["w"] is found["model"]["head"]


def test_dtype_that_was_saved_is_restored_and_float64_is_not_truncated(tmp_path: Path) -> None:
    floats = {name: torch.linspace(-2, 2, 9).to(getattr(torch, name)) for name in ("bfloat16", "float16", "float32")}
    others = {"ids": torch.arange(5), "mask": torch.tensor([True, False]), "wide": torch.full((3,), 0.1).double()}
    state = floats | others
    stored = {"bfloat16": "<f4", "float16": "<f4", "float32": "<f4", "ids": "<i8", "mask": "|b1", "wide": "<f8"}
    for options, expected in (({}, stored), ({"dtype": "keep"}, stored | {"bfloat16": "bfloat16", "float16": "<f2"})):
        path = tmp_path / str(len(options))
        tensorkeep.save(state, path, format="t5x", **options)
        found = {name: json.loads((path / f"target.{name}" / ".zarray").read_text())["dtype"] for name in state}
        assert found == expected
        assert difference(state, tensorkeep.load(path)) is None


def test_awkward_keys_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "c"
    for state in (
        {1: noise("float32", 2), "1": noise("float32", 3)},
        {"a": {"b": noise("int8", 1)}, "a.b": noise("int8", 2), "a/b": noise("int8", 3)},
        {"driver": noise("int8", 4), "kvstore": noise("int8", 5), "x": {"driver": "zarr", "path": "y"}},
        {"__msgpack_chunked_array__": noise("int8", 4), "a": {"__msgpack_chunked_array__": True, "b": {"driver": 1}}},
        {"a": 2**80, "b": "PLACEHOLDER://c", "c": {"d": (1, [2, {"e": noise("int8", 1)}])}},
        [noise("float32", 2), {"": noise("float32", 2)}],
        {"w" * 300: noise("float32", 2), "..": noise("float32", 3), "W" * 300: noise("float32", 4)},
    ):
        with case(state):
            tensorkeep.save(state, path, format="t5x", overwrite=True)
            assert difference(state, tensorkeep.load(path)) is None
            assert all(child.name.startswith("target.") for child in path.iterdir() if child.is_dir())


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    state = {"large": torch.arange(6_000_000, dtype=torch.float32).reshape(20, 300_000), "small": torch.ones(10)}
    for in_flight in ("all", "one"):
        options = FORMAT.parse_options({"compressor": None, "in_flight": in_flight, "chunk": "1MiB"})
        with BufferPool() as pool:
            pool.budget = 16 * 1024**2
            written = FORMAT.write(flatten(state), tmp_path / in_flight, WriteSettings(pool=pool, options=options))
        assert 1_000_000 <= written.peak_buffer_bytes <= 16 * 1024**2
    assert difference(state, read(tmp_path / "all")) is None


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    for name, value in {"zarr": 3, "chunk": -1, "concurrency": 0, "compressor": "x"}.items():
        with case(name), pytest.raises(UsageError, match=name):
            tensorkeep.save({"a": torch.ones(2)}, tmp_path / "c", format="t5x", **{name: value})
    assert list(tmp_path.iterdir()) == []


# ---- damaged and hostile checkpoints


CORRUPT, UNSUPPORTED = CorruptCheckpointError, UnsupportedError
LONG = t5x_tree()["optimizer"]["target"]["long"]


def in_target(**values: Any) -> Tree:
    tree = t5x_tree()
    tree["optimizer"]["target"].update(values)
    return tree


def packed(code: int, *content: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(content))


HOSTILE: list[tuple[Tree, type[TensorkeepError], str | None, str | None]] = [
    *(
        (in_target(embedding=pointer(place, (5, 2))), CORRUPT, "not in the checkpoint|no directory", "target.embedding")
        for place in ("../secret", "/etc", "..", ".", "", "a/b", "a\\b", "x\0y", 5, None, ["x"])
    ),
    *(
        (t5x_tree() | {"optimizer": optimizer}, CORRUPT, "single array", None)
        for optimizer in ({"driver": "zarr", "kvstore": {"path": "x"}}, LONG)
    ),
    *(
        (t5x_tree() | {"version": version}, UNSUPPORTED, word, None)
        for version, word in (
            *((2, "uint16"), (1, "uint16"), (None, "uint16"), ("3", None), (4, "reads 3")),
            *((ext(1, np.full(length, 3, np.int32)), "ndarray") for length in (0, 1, 2)),
        )
    ),
    *(
        ({"version": 3, "optimizer": {"x": [1, [value]]}}, UNSUPPORTED, None, "x")
        for value in ("PLACEHOLDER://x", pointer("target.embedding", (5, 2)), {"deep": [pointer("y", (1,))]}, LONG)
    ),
    (
        in_target(embedding="PLACEHOLDER://target.embedding"),
        *(UNSUPPORTED, "Orbax(?s:.*)\nload it with Orbax and save it again", "target.embedding"),
    ),
    *(
        (in_target(x=value), CORRUPT, None, None)
        for value in (
            pointer("target.nothing", (2,)),
            packed(1, [2**40, 2**40], "float32", b"1234"),
            packed(1, [-1, -1], "float32", b"1234"),
            packed(3, [1], "int32", b"1234"),
            msgspec.msgpack.Ext(1, b"x"),
            *({**LONG, "shape": shape} for shape in ({"0": 2, "1": 6}, {"0": 2**62, "1": 2**62}, [2, 5])),
            *({**LONG, "chunks": chunks} for chunks in ({}, {"0": LONG["chunks"]["0"], "2": LONG["chunks"]["1"]})),
            {1: 2},
        )
    ),
    *(
        (in_target(x=value), UNSUPPORTED, None, None)
        for value in (
            {**pointer("target.embedding", (5, 2)), "driver": "zarr3"},
            packed(1, [1], "object", b"12345678"),
            msgspec.msgpack.Ext(7, b"x"),
        )
    ),
]


def test_hostile_trees_and_metadata_of_more_than_16_mib_are_refused(tmp_path: Path) -> None:
    path = t5x_made(tmp_path / "c")
    for tree, error, words, name in HOSTILE:
        (path / "checkpoint").write_bytes(msgspec.msgpack.encode(tree))
        with case(tree):
            with pytest.raises(error, match=words) as caught:
                read(path)
            assert name is None or caught.value.name == name
    (path / "checkpoint").write_bytes(msgspec.msgpack.encode(t5x_tree()))
    os.truncate(path / "target.embedding" / ".zarray", 2**40)
    with pytest.raises(UnsupportedError, match="bytes of metadata"):
        read(path)


def test_links_to_folders_are_refused(tmp_path: Path) -> None:
    own = tmp_path / "own"
    tensorkeep.save({"w": torch.ones(3, 3)}, own, format="t5x")
    shutil.copytree(own, tmp_path / "foreign")
    (tmp_path / "foreign" / "tensorkeep.json").unlink()
    tree = {"version": 3, "optimizer": {"target": {"w": pointer("target.w", (3, 3))}}}
    (tmp_path / "foreign" / "checkpoint").write_bytes(msgspec.msgpack.encode(tree))
    for path, where in product((own, tmp_path / "foreign"), ("target.w", "target.w/0.0", "target.w/.zarray")):
        (path / where).rename(tmp_path / "elsewhere")
        (path / where).symlink_to(tmp_path / "elsewhere")
        with case(f"{path.name} {where}"):
            if where == "target.w":
                with pytest.raises(UnsupportedError, match="symbolic link") as caught:
                    read(path)
                assert str(caught.value.path).startswith(str(path / "target.w"))
            else:
                read(path)
        (path / where).unlink()
        (tmp_path / "elsewhere").rename(path / where)


def test_listed_files_are_hashed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.ones(3), "b": torch.zeros(2)}
    tensorkeep.save(state, tmp_path / "c", format="t5x")
    monkeypatch.setattr(checksummed_json, "_PIECE", 50)
    counts: list[int] = []
    original = LocalFile.read_into

    def counted(self: SourceFile, offset: int, out: Any) -> None:
        if self.path.name == ".zarray":
            counts.append(len(out))
        original(self, offset, out)

    monkeypatch.setattr(LocalFile, "read_into", counted)
    assert difference(state, read(tmp_path / "c")) is None
    sizes = sum(file.stat().st_size for file in (tmp_path / "c").glob("*/.zarray"))
    assert max(counts) == 50 and sum(counts) == sizes


def test_listed_files_are_those_of_the_open_directory(tmp_path: Path) -> None:
    path = tmp_path / "c"
    tensorkeep.save({"a": torch.ones(3)}, path, format="t5x")
    with LocalDirectory(path) as held:
        path.rename(tmp_path / "old")
        tensorkeep.save({"a": torch.ones(7)}, path, format="t5x")
        assert sidecar.read(held, "t5x", sidecar.Sidecar).tensors["a"].shape == (3,)
        (tmp_path / "old" / "target.a" / ".zarray").unlink()
        (tmp_path / "old" / "target.a" / ".zarray").mkdir()
        with pytest.raises(CorruptCheckpointError, match="not a regular file") as caught:
            sidecar.read(held, "t5x", sidecar.Sidecar)
        assert caught.value.path == str(path / "target.a" / ".zarray")


def test_malformed_msgpack_is_refused(tmp_path: Path) -> None:
    for content in (
        b"",
        b"\x82\xa7version\x03",
        b"\x82\xa7version\x03\xa9optimizer\xdf\xff\xff\xff\xff",
        b"\x82\xa7version\x03\xa9optimizer" + b"\x91" * 100_000,
        b"\x82\xa7version\x03\xa9optimizer" + b"\x81\xa1a" * 500 + b"\xc0",
        b"\x82\xa7version\x03\xa9optimizer\xc0",
        b"\x93\x01\x02\x03",
        b"model_checkpoint_path: 'x'",
        b"\x81\xa1\xff\x01",
    ):
        (tmp_path / "checkpoint").write_bytes(content)
        with case(content[:40]), pytest.raises((CorruptCheckpointError, UnsupportedError)):
            FORMAT.open(tmp_path, OpenSettings())


def test_every_missing_file_and_a_changed_tree_are_errors(tmp_path: Path) -> None:
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
    tree = (tmp_path / "c" / "checkpoint").read_bytes()
    (tmp_path / "c" / "checkpoint").write_bytes(tree.replace(b"zeros", b"zeroz"))
    with pytest.raises(CorruptCheckpointError, match="checksum is wrong"):
        read(tmp_path / "c")
    (tmp_path / "c" / "checkpoint").write_bytes(tree)
    (tmp_path / "c" / "tensorkeep.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"tensorkeep\.json"):
        read(tmp_path / "c")


def test_only_a_t5x_checkpoint_is_replaced_and_an_unfinished_one_refused(tmp_path: Path) -> None:
    path = t5x_made(tmp_path / "c")
    (path / "notes.txt").write_text("precious")
    with pytest.raises(TensorkeepError, match="not replaced"):
        tensorkeep.save({"a": torch.ones(1)}, path, format="t5x", overwrite=True)
    (path / "notes.txt").unlink()
    tensorkeep.save({"a": torch.ones(1)}, path, format="t5x", overwrite=True)
    assert difference({"a": torch.ones(1)}, tensorkeep.load(path)) is None
    with pytest.raises(NotACheckpointError, match="is unfinished"):
        read(path.rename(tmp_path / "checkpoint_10.tmp-1700000000"))
