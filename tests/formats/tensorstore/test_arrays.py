"""TensorStore's arrays: what is written by each option, what is read of others, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tensorkeep
from tensorkeep import CorruptCheckpointError, NotACheckpointError, StoreError, UnsupportedError, UsageError
from tensorkeep.formats import sealed, tensorstore
from tensorkeep.formats.tensorstore import load_arrays, saving, specs, walking, writer, zarr_bfloat16
from tensorkeep.formats.tensorstore.keys import array_keys
from tensorkeep.formats.tensorstore.sidecar import is_key
from tensorkeep.formats.tensorstore.stored_types import TENSORSTORE_LACKS
from tensorkeep.io.directory import Directory
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.testing.equality import difference
from tensorkeep.testing.format_states import noise, training_state

ts = pytest.importorskip("tensorstore")


def save(state: Any, path: Path, **options: Any) -> tensorkeep.SaveReport:
    return tensorkeep.save(state, path, format="tensorstore", **options)


def files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


@pytest.fixture
def weight() -> torch.Tensor:
    return noise("bfloat16", 200, 96)


def zarr2_metadata(tmp_path: Path, **options: Any) -> Any:
    save({"w": noise("float32", 30, 20)}, tmp_path / "c", zarr=2, **options)
    return json.loads((tmp_path / "c" / "w" / ".zarray").read_text())


def test_as_documented_really_is_blosc_lz4(tmp_path: Path) -> None:
    compressor = zarr2_metadata(tmp_path, compressor="as-documented")["compressor"]
    assert (compressor["id"], compressor["cname"]) == ("blosc", "lz4")


@pytest.mark.parametrize("given", [None, "none"])
def test_none_really_is_null_and_raw(given: str | None, tmp_path: Path) -> None:
    assert zarr2_metadata(tmp_path, compressor=given, chunk=None)["compressor"] is None
    assert (tmp_path / "c" / "w" / "0.0").read_bytes() == noise("float32", 30, 20).numpy().tobytes()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("gzip:6", {"id": "gzip", "level": 6}),
        ("zlib", {"id": "zlib", "level": 1}),
        ("bz2:3", {"id": "bz2", "level": 3}),
        ("zstd:-5", {"id": "zstd", "level": -5}),
        ("blosc-zstd:7", {"id": "blosc", "cname": "zstd", "clevel": 7, "blocksize": 0, "shuffle": -1}),
    ],
)
def test_compressors_of_zarr_2(given: str, expected: dict[str, Any], tmp_path: Path) -> None:
    assert zarr2_metadata(tmp_path, compressor=given)["compressor"] == expected
    assert difference({"w": noise("float32", 30, 20)}, tensorkeep.load(tmp_path / "c")) is None


@pytest.mark.parametrize(
    "name", ["gzip:1", "zstd", "zstd:1", *(f"blosc-{n}" for n in ("lz4", "lz4hc", "zstd", "zlib"))]
)
def test_compressors_of_zarr_3(name: str, weight: torch.Tensor, tmp_path: Path) -> None:
    save({"w": weight}, tmp_path / "c", compressor=name)
    codecs = json.loads((tmp_path / "c" / "w" / "zarr.json").read_text())["codecs"]
    assert [codec["name"] for codec in codecs] == ["bytes", name.split("-")[0].split(":")[0], "crc32c"]
    assert difference({"w": weight}, tensorkeep.load(tmp_path / "c")) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressor": "as-documented"}, "zarr=2"),
        ({"compressor": "bz2"}, "choose one of: None, gzip, zstd, blosc-lz4"),
        ({"compressor": "lz4", "zarr": 2}, "as-documented, gzip, zlib, zstd, bz2"),
        ({"compressor": "zstd:99"}, "-131072 to 22"),
        ({"compression": "lossless"}, "compressor="),
        ({"zarr": 2, "checksum": "crc32c"}, "zarr=3"),
        ({"zarr": 2, "shard_bytes": "1MiB"}, "zarr=3"),
        ({"zarr": True}, "2, 3"),
        ({"concurrency": 0}, "1 or more"),
        ({"dtype": "float16"}, "'keep', 'float32'"),
    ],
)
def test_what_means_nothing_is_refused_with_what_does(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        save({"w": torch.zeros(2)}, tmp_path / "c", **options)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_float32_converts_what_floats_and_remembers_what_it_was(tmp_path: Path) -> None:
    values = torch.linspace(-3, 3, 50)
    state = {"half": values.half(), "brain": values.bfloat16(), "int": torch.arange(5), "double": values.double()}
    save(state, tmp_path / "c", dtype="float32", zarr=2)
    dtypes = {name: json.loads((tmp_path / "c" / name / ".zarray").read_text())["dtype"] for name in state}
    assert dtypes == {"half": "<f4", "brain": "<f4", "int": "<i8", "double": "<f4"}
    expected = state | {"double": values.float().double()}
    for loaded in (tensorkeep.load(tmp_path / "c"), load_arrays(tmp_path / "c")):
        assert difference(expected, loaded) is None


@pytest.mark.parametrize("kvstore", ["file", "ocdbt"])
@pytest.mark.parametrize("in_flight", ["all", "one"])
def test_arrays_larger_than_the_budget_pass_and_nothing_else_exceeds_it(
    kvstore: str, in_flight: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorkeep.formats.tensorstore.saving.ByteBudget", _small_budget)
    state = {f"small{i}": noise("float32", 40, 100, seed=i) for i in range(6)}
    state |= {"large": noise("float32", 900, 100), "turned": noise("float32", 100, 900, seed=1).t()}
    report = save(state, tmp_path / "c", kvstore=kvstore, in_flight=in_flight, chunk="10kB")
    assert 0 < report.peak_buffer_bytes <= 100_000
    assert difference(state, tensorkeep.load(tmp_path / "c")) is None
    # A chunk that is larger goes alone.
    report = save(state, tmp_path / "whole", kvstore=kvstore, in_flight=in_flight, chunk=None)
    assert report.peak_buffer_bytes == 2 * 360_000
    assert difference(state, tensorkeep.load(tmp_path / "whole")) is None


def _small_budget(limit: int) -> writer.ByteBudget:
    return writer.ByteBudget(100_000)


def test_memory_that_is_stored_as_it_is_is_handed_over_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = noise("bfloat16", 64, 32)
    seen: list[Any] = []
    original = writer._content
    monkeypatch.setattr(writer, "_content", lambda job, box: seen.append(original(job, box)) or seen[-1])
    save({"w": tensor}, tmp_path / "c", chunk=600)
    assert len(seen) >= 1
    memory = tensor.view(torch.int16).numpy()
    assert all(np.shares_memory(array.view(np.int16), memory) for array in seen)


@pytest.mark.parametrize("sync", [True, False])
def test_limits_and_syncing_reach_tensorstore(sync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[Any] = []
    original = specs.context

    def noted(**limits: Any) -> Any:
        contexts.append(original(**limits))
        return contexts[-1]

    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(writer.specs, "context", noted)
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), fsync(fd)))
    save({"w": torch.zeros(9), "v": torch.ones(3)}, tmp_path / "c", concurrency=7, copy_concurrency=3, sync=sync)
    assert contexts[0]["file_io_concurrency"].to_json() == {"limit": 7}
    assert contexts[0]["data_copy_concurrency"].to_json() == {"limit": 3}
    assert contexts[0]["file_io_sync"].to_json() is sync
    # Two files of ours, the directories w, w/c, v, v/c and their parent; then the two of the commit.
    assert len(synced) == (2 + 5 + 2 if sync else 2)


def test_shards_hold_many_chunks(weight: torch.Tensor, tmp_path: Path) -> None:
    save({"w": weight}, tmp_path / "c", chunk=256, shard_bytes="8KiB", compressor="zstd:1")
    metadata = json.loads((tmp_path / "c" / "w" / "zarr.json").read_text())
    (codec,) = metadata["codecs"]
    inner = codec["configuration"]["chunk_shape"]
    shard = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    assert int(np.prod(inner)) <= 256 < int(np.prod(shard)) <= 4096
    assert tensorkeep.verify(tmp_path / "c").checked == "CRC-32C of every chunk"
    assert difference({"w": weight}, tensorkeep.load(tmp_path / "c")) is None


def test_dtypes_that_tensorstore_lacks_are_the_listed_ones() -> None:
    found = set()
    for name in BY_NAME:
        try:
            ts.dtype(name)
        except (ValueError, TypeError):
            found.add(name)
    assert found == TENSORSTORE_LACKS


def test_keys_are_safe_and_never_collide() -> None:
    names = [
        "a",
        "A",
        "",
        ".",
        "..",
        "../up",
        "c",
        "zarr.json",
        "tensorkeep.json",
        "d",
        "x/y",
        "x%2Fy",
        "é" * 90,
        "\0",
        "%",
    ]
    keys = array_keys(names)
    assert len({key.lower() for key in keys.values()}) == len(names)
    assert all(is_key(key) for key in keys.values())
    assert keys["x/y"] != keys["x%2Fy"]
    assert array_keys(["model.layers.0.weight"]) == {"model.layers.0.weight": "model.layers.0.weight"}


def damaged(tmp_path: Path, file: str, damage: Callable[[Path], object], **options: Any) -> Path:
    path = tmp_path / "c"
    save({"w": torch.arange(1.0, 401.0).reshape(20, 20)}, path, chunk=100, **options)
    damage(path / file)
    return path


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_a_flipped_bit_is_found_by_the_crc_and_its_file_is_named(tmp_path: Path) -> None:
    path = damaged(tmp_path, "w/c/1/0", flip)
    with pytest.raises(CorruptCheckpointError, match="Digest mismatch") as caught:
        tensorkeep.load(path)
    assert caught.value.name == "w"
    assert caught.value.path == str(path / "w" / "c" / "1" / "0")
    assert "[" not in caught.value.message
    with pytest.raises(CorruptCheckpointError, match="Digest mismatch"):
        load_arrays(path)
    assert not tensorkeep.verify(path).ok


@pytest.mark.parametrize("options", [{}, {"zarr": 2}, {"chunk": 10, "shard_bytes": 400}])
def test_a_lost_chunk_does_not_come_back_as_zeros(options: dict[str, Any], tmp_path: Path) -> None:
    save({"w": torch.ones(20, 20)}, tmp_path / "c", **{"chunk": 100, **options})
    chunk = next(f for f in files(tmp_path / "c" / "w") if not f.endswith((".zarray", "zarr.json")))
    (tmp_path / "c" / "w" / chunk).unlink()
    for read in (tensorkeep.load, load_arrays):
        with pytest.raises(CorruptCheckpointError, match="missing") as caught:
            read(tmp_path / "c")
        assert caught.value.name == "w"


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_chunks_of_zeros_are_stored(value: float, tmp_path: Path) -> None:
    save({"w": torch.full((4, 4), value)}, tmp_path / "c", chunk=4)
    assert len([file for file in files(tmp_path / "c" / "w") if file.startswith("c/")]) == 4
    assert torch.equal(torch.signbit(tensorkeep.load(tmp_path / "c")["w"]), torch.full((4, 4), np.signbit(value)))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("w/zarr.json", "metadata is not what was written"),
        ("tensorkeep.json", "checksum is wrong"),
        ("zarr.json", "not as it was written"),
    ],
)
def test_changed_descriptions_are_found_on_opening(file: str, message: str, tmp_path: Path) -> None:
    path = damaged(tmp_path, file, flip)
    with pytest.raises(CorruptCheckpointError, match=message):
        tensorkeep.open(path)


def test_a_lost_description_is_no_foreign_directory(tmp_path: Path) -> None:
    path = damaged(tmp_path, "tensorkeep.json", Path.unlink)
    with pytest.raises(CorruptCheckpointError, match=r"tensorkeep\.json: is missing"):
        tensorkeep.load(path)


def test_an_array_that_is_a_link_is_refused(tmp_path: Path) -> None:
    def link(place: Path) -> None:
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")

    path = damaged(tmp_path, "w", link)
    with pytest.raises(CorruptCheckpointError, match="symbolic link"):
        tensorkeep.load(path)


def test_a_disk_that_is_full_is_said_so_and_nothing_is_left(tmp_path: Path) -> None:
    code = (
        "import resource, torch, tensorkeep\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try: tensorkeep.save({'w': torch.zeros(100_000)}, 'c', format='tensorstore')\n"
        "except tensorkeep.StoreError as error: print(error.message, '|', error.name)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert out.stdout.startswith("cannot write the arrays: File too large"), out.stdout + out.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_tensorstore_recognising_works_and_reading_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"w": torch.zeros(2)}, tmp_path / "c")
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    assert tensorstore.FORMAT.recognises(tmp_path / "c")
    for call in (tensorkeep.load, lambda path: save({"w": torch.zeros(2)}, tmp_path / "d"), load_arrays):
        with pytest.raises(tensorkeep.MissingExtraError, match=r"pip install 'tensorkeep\[tensorstore\]'"):
            call(tmp_path / "c")


def test_importing_the_format_imports_neither_tensorstore_nor_zarr() -> None:
    code = "import sys, tensorkeep.formats.tensorstore; print({'tensorstore', 'zarr'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    state = {"a": torch.zeros(1000), "b": torch.zeros(10, dtype=torch.int8)}
    save(state, tmp_path / "c", chunk=100, dtype="float32", progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (4010, 4010)
    assert seen == sorted(seen)


def test_an_error_in_progress_ends_the_save(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        save({"a": torch.zeros(1000)}, tmp_path / "c", chunk=10, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_load_arrays_gives_views_and_every_dtype(tmp_path: Path) -> None:
    base = noise("float16", 6, 4)
    state = {"b": base, "t": base.t(), "f8": noise("float8_e5m2", 9), "c": noise("complex64", 3), "s": torch.tensor(3)}
    for options in ({"in_flight": "one", "concurrency": 2}, {"in_flight": "all", "memory": 10}, {}):
        save(state, tmp_path / "c", overwrite=True)
        loaded = load_arrays(tmp_path / "c", **options)
        assert list(loaded) != [] and difference({name: loaded[name] for name in state}, state) is None
        assert loaded["t"].untyped_storage().data_ptr() == loaded["b"].untyped_storage().data_ptr()


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_never_mixed(tmp_path: Path) -> None:
    save({"w": torch.zeros(1000)}, tmp_path / "c", chunk=100)
    with tensorkeep.open(tmp_path / "c") as opened:
        save({"w": torch.ones(1000)}, tmp_path / "c", chunk=100, overwrite=True)
        with pytest.raises(StoreError, match="replaced while it was read"):
            opened["w"][:]
    assert tensorkeep.load(tmp_path / "c")["w"].sum() == 1000


# Others' arrays.


def write_array(path: Path, array: Any, driver: str = "zarr3", base: str | None = None) -> None:
    kvstore: Any = {"driver": "file", "path": f"{path}/"}
    if base:
        kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{base}/"}, "path": f"{path}/"}
    spec = {"driver": driver, "kvstore": kvstore}
    ts.open(spec, create=True, dtype=array.dtype, shape=array.shape).result().write(array).result()


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_foreign_directories_are_read_by_their_paths(driver: str, tmp_path: Path) -> None:
    arrays = {"w": np.arange(6.0).reshape(2, 3), "deep/er/b": np.ones(3, ml_dtypes.bfloat16), "z": np.zeros(4, "i2")}
    root = tmp_path / "made"
    (root / "deep").mkdir(parents=True)
    group = (".zgroup", '{"zarr_format": 2}') if driver == "zarr" else ("zarr.json", '{"node_type": "group"}')
    for place in (root, root / "deep"):
        (place / group[0]).write_text(group[1])
    for name, array in arrays.items():
        write_array(root / name, array, driver)
    assert tensorstore.FORMAT.recognises(root)
    expected = {name.replace("/", "."): array for name, array in arrays.items()}
    for loaded in (tensorkeep.load(root), load_arrays(root)):
        assert set(loaded) == set(expected)
        for name, array in expected.items():
            assert np.array_equal(loaded[name].float().numpy(), array.astype("f4"))
    # One array is a checkpoint, too; what has no chunks is full of its fill value.
    assert list(tensorkeep.load(root / "z")) == ["z"]
    assert tensorkeep.info(root / "z").format == "tensorstore"


def test_a_foreign_database_is_read(tmp_path: Path) -> None:
    write_array(Path("a/b"), np.arange(5), base=str(tmp_path / "db"))
    write_array(Path("c"), np.ones((2, 2), "f2"), "zarr", base=str(tmp_path / "db"))
    loaded = tensorkeep.load(tmp_path / "db")
    assert loaded["a.b"].tolist() == [0, 1, 2, 3, 4]
    assert loaded["c"].dtype == torch.float16


def test_what_other_formats_own_is_left_to_them(tmp_path: Path) -> None:
    for mark in ("_METADATA", "_CHECKPOINT_METADATA", "checkpoint"):
        root = tmp_path / mark
        write_array(root / "w", np.ones(2))
        assert tensorstore.FORMAT.recognises(root)
        (root / mark).write_text("{}")
        assert not tensorstore.FORMAT.recognises(root)
    (tmp_path / "mixed" / "data").mkdir(parents=True)
    write_array(tmp_path / "mixed" / "w", np.ones(2))
    assert not tensorstore.FORMAT.recognises(tmp_path / "mixed")


def test_groups_that_zarr_python_wrote_are_read(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    for version in (2, 3):
        path = tmp_path / f"v{version}"
        group = zarr.open_group(path, mode="w", zarr_format=version)
        group.create_array("layer/weight", data=np.arange(12.0).reshape(3, 4), chunks=(2, 2))
        group.create_array("bias", data=np.arange(3, dtype="i4"))
        loaded = tensorkeep.load(path)
        assert loaded["layer.weight"].tolist() == np.arange(12.0).reshape(3, 4).tolist()
        assert loaded["bias"].dtype == torch.int32


@pytest.mark.parametrize("compressor", [None, "zstd", "blosc-lz4", "gzip"])
@pytest.mark.parametrize("version", [2, 3])
def test_zarr_python_reads_ours_bit_for_bit(version: int, compressor: str | None, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    zarr_bfloat16.register()
    state = {"b": noise("bfloat16", 70, 33), "f": noise("float32", 41, 7), "one": noise("bfloat16")}
    save(state, tmp_path / "c", zarr=version, compressor=compressor, chunk=500)
    group = zarr.open_group(tmp_path / "c", mode="r")
    for name, tensor in state.items():
        found = np.asarray(group[name][...])
        bits = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).numpy()
        assert found.dtype == (ml_dtypes.bfloat16 if tensor.dtype == torch.bfloat16 else np.float32)
        assert np.array_equal(found.view(bits.dtype), bits)


def hostile(path: Path, **changes: Any) -> Path:
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [4],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    path.mkdir()
    (path / "zarr.json").write_text(json.dumps(metadata | changes))
    return path


def grid(*chunk: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"shape": [2**50], "chunk_grid": grid(1024)}, StoreError, "needs 4.50 PB"),
        ({"chunk_grid": grid(2**40)}, UnsupportedError, "4,398,046,511,104 bytes each"),
        ({"shape": [2**41], "chunk_grid": grid(2**40)}, UnsupportedError, "4,398,046,511,104 bytes each"),
        ({"chunk_grid": grid(2**27)}, UnsupportedError, "536,870,912 bytes each"),
        ({"shape": [2**40, 2**40], "chunk_grid": grid(9, 9)}, CorruptCheckpointError, "impossible shape"),
        ({"shape": [-1]}, CorruptCheckpointError, "shape"),
        ({"data_type": "string"}, UnsupportedError, "string data type"),
        ({"codecs": [{"name": "lz9"}]}, UnsupportedError, "lz9"),
    ],
)
def test_hostile_metadata_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        tensorkeep.load(hostile(tmp_path / "h", **changes))


def test_nothing_is_no_directory_of_arrays(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in ("empty", "missing"):
        with pytest.raises(NotACheckpointError):
            load_arrays(tmp_path / place)
    assert not tensorstore.FORMAT.recognises(tmp_path / "empty")


def test_chunks_larger_than_a_read_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorkeep.formats.tensorstore.opened.BLOCK_BYTES", 4096)
    state = {"w": noise("float32", 128, 256), "rows": noise("float32", 128, 256, seed=1)}
    save({"w": state["w"]}, tmp_path / "w", chunk=None)
    save({"rows": state["rows"]}, tmp_path / "rows", chunk=1024, chunking="divisors")
    from tensorkeep.formats.base import OpenSettings
    from tensorkeep.io.buffers import BufferPool

    class Pool(BufferPool):
        def __init__(self) -> None:
            super().__init__()
            self.budget = 8 * 4096

    with tensorstore.FORMAT.open(tmp_path / "w", OpenSettings(pool=Pool())) as reader:
        assert reader.block_bytes("w") == 4096
        out = np.empty(4096, np.uint8)
        before = _decoded(ts)
        for start in range(0, 128 * 1024, 4096):
            reader.read("w", start, start + 4096, out)
            assert np.array_equal(out, state["w"].numpy().reshape(-1).view(np.uint8)[start : start + 4096])
        assert 1 <= _decoded(ts) - before <= 2
    with tensorstore.FORMAT.open(tmp_path / "rows", OpenSettings()) as reader:
        assert reader.block_bytes("rows") % 1024 == 0
        assert difference({"rows": state["rows"]}, tensorkeep.load(tmp_path / "rows")) is None


def _decoded(module: Any) -> int:
    """Return how many chunks' files TensorStore has read in this process."""
    metrics = module.experimental_collect_matching_metrics("/tensorstore/kvstore/file/read")
    return sum(value["value"] for metric in metrics if metric["name"].endswith("/read") for value in metric["values"])


def test_a_nested_state_comes_back_whole(tmp_path: Path) -> None:
    for options in ({}, {"kvstore": "ocdbt", "compressor": "zstd:1"}, {"zarr": 2, "in_flight": "one"}):
        save(training_state(), tmp_path / "c", overwrite=True, metadata={"run": 7}, **options)
        assert difference(training_state(), tensorkeep.load(tmp_path / "c")) is None
        assert tensorkeep.info(tmp_path / "c").metadata == {"run": 7}


# What would be lost without a word, or lead elsewhere.


def foreign_group(root: Path) -> Path:
    """Make a group of two arrays with zarr v3's metadata, the second in a group of its own."""
    for name in ("w", "deep/b"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_array(root / name, np.arange(4.0, dtype="f4"))
    for place in (root, root / "deep"):
        (place / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    return root


def readers() -> list[Callable[[Path], Any]]:
    return [tensorkeep.load, load_arrays, tensorkeep.info]


@pytest.mark.parametrize("content", [b"", b'{"zarr_format": 3, "node_ty', b"[]", b"\xff", b"[" * 100_000, b'{"a": 1}'])
@pytest.mark.parametrize("file", ["zarr.json", ".zarray"])
def test_a_foreign_array_with_broken_metadata_is_not_left_out(content: bytes, file: str, tmp_path: Path) -> None:
    root = foreign_group(tmp_path / "g")
    (root / "deep" / "b" / "zarr.json").unlink()
    (root / "deep" / "b" / file).write_bytes(content)
    for read in readers():
        with pytest.raises(CorruptCheckpointError) as caught:
            read(root)
        assert caught.value.name == "deep.b"
    assert not tensorkeep.verify(root).ok


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names of folders that cannot be listed: permissions mean nothing to a superuser."""
    names: set[str] = set()
    original = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path).rstrip("/").rsplit("/", 1)[-1] in names:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    yield names


def test_a_foreign_folder_that_cannot_be_listed_is_not_left_out(unreadable: set[str], tmp_path: Path) -> None:
    root = foreign_group(tmp_path / "g")
    unreadable.add("deep")
    for read in readers():
        with pytest.raises(StoreError, match="cannot list the directory: Permission denied") as caught:
            read(root)
        assert caught.value.path == str(root / "deep")


def test_folders_that_cannot_be_listed_are_not_taken_for_synced(unreadable: set[str], tmp_path: Path) -> None:
    (tmp_path / "w" / "inner").mkdir(parents=True)
    unreadable.add("inner")
    for call in (saving.sync_directories, walking.files_below):
        with pytest.raises(StoreError, match="cannot list"):
            call(tmp_path)


@pytest.mark.parametrize("filling", ["", "x" * 100_000])
def test_a_consolidated_group_is_no_array(filling: str, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    path = tmp_path / "g"
    # zarr-python writes NaN as no JSON has it; the kind of a group may stand behind all of that.
    group = zarr.open_group(path, mode="w", zarr_format=3, attributes={"lowest": float("nan"), "note": filling})
    group.create_array("layer/weight", data=np.arange(12.0).reshape(3, 4))
    group.create_array("bias", data=np.arange(3, dtype="i4"))
    with pytest.warns(match="Consolidated metadata"):
        zarr.consolidate_metadata(path)
    assert b'"array"' in (path / "zarr.json").read_bytes()
    assert tensorstore.FORMAT.recognises(path)
    for loaded in (tensorkeep.load(path), load_arrays(path)):
        assert sorted(loaded) == ["bias", "layer.weight"]


def test_a_consolidated_group_in_a_database_is_no_array(tmp_path: Path) -> None:
    write_array(Path("w"), np.arange(5), base=str(tmp_path / "db"))
    place = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{tmp_path}/db/"}}
    store = ts.KvStore.open(place).result()
    inner = {"w": {"node_type": "array"}}
    store.write("zarr.json", json.dumps({"consolidated_metadata": inner, "node_type": "group"})).result()
    assert list(tensorkeep.load(tmp_path / "db")) == ["w"]


def linked(place: Path, tmp_path: Path) -> None:
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")


@pytest.mark.parametrize("where", ["w", "w/c", "w/c/0", "w/c/0/0", "w/zarr.json"])
@pytest.mark.parametrize("own", [True, False])
def test_links_in_arrays_are_refused(where: str, own: bool, tmp_path: Path) -> None:
    path = tmp_path / "c"
    save({"w": torch.ones(4, 4)}, path)
    if not own:
        (path / "tensorkeep.json").unlink()
        (path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    linked(path / where, tmp_path)
    for read in readers():
        with pytest.raises(CorruptCheckpointError, match="symbolic link") as caught:
            read(path)
        assert caught.value.path == str(path / where)


def test_links_in_databases_are_refused(tmp_path: Path) -> None:
    save({"w": torch.ones(4, 4)}, tmp_path / "own", kvstore="ocdbt")
    write_array(Path("w"), np.arange(5), base=str(tmp_path / "foreign"))
    for name in ("own", "foreign"):
        (tmp_path / name / "d").rename(tmp_path / f"{name}-elsewhere")
        (tmp_path / name / "d").symlink_to(tmp_path / f"{name}-elsewhere")
        for read in readers():
            with pytest.raises(CorruptCheckpointError, match="symbolic link"):
                read(tmp_path / name)


def test_a_checkpoint_may_itself_be_reached_through_a_link(tmp_path: Path) -> None:
    save({"w": torch.ones(4)}, tmp_path / "own")
    write_array(tmp_path / "one", np.ones(4, "f4"))
    for name, key in (("own", "w"), ("one", "latest-one")):
        link = tmp_path / f"latest-{name}"
        link.symlink_to(tmp_path / name)
        for read in (tensorkeep.load, load_arrays):
            assert read(link)[key].tolist() == [1] * 4


def test_a_pipe_in_an_array_is_not_waited_for(tmp_path: Path) -> None:
    save({"w": torch.ones(4)}, tmp_path / "c")
    chunk = tmp_path / "c" / "w" / "c" / "0"
    chunk.unlink()
    os.mkfifo(chunk)
    for read in readers():
        with pytest.raises(CorruptCheckpointError, match="neither a file nor a folder"):
            read(tmp_path / "c")


@pytest.mark.parametrize("own", [True, False])
def test_impossibly_large_metadata_is_not_read(own: bool, tmp_path: Path) -> None:
    path = tmp_path / "c"
    if own:
        save({"w": torch.ones(4)}, path)
    else:
        foreign_group(path)
    os.truncate(path / "w" / "zarr.json", 2**40)
    for read in readers():
        with pytest.raises(UnsupportedError, match="bytes of metadata") as caught:
            read(path)
        assert caught.value.path == str(path / "w" / "zarr.json")


def test_databases_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "/".join("deep")):
        write_array(Path(name), np.arange(5), base=str(tmp_path / "db"))
    for limit, message in (("_MOST_ARRAYS", "more than 2 arrays"), ("_MOST_DEPTH", "more than 2 deep")):
        with monkeypatch.context() as patched:
            patched.setattr(f"tensorkeep.formats.tensorstore.discovery.{limit}", 2)
            for read in readers():
                with pytest.raises(UnsupportedError, match=message):
                    read(tmp_path / "db")
    monkeypatch.setattr("tensorkeep.formats.tensorstore.walking.MOST_METADATA", 50)
    with pytest.raises(UnsupportedError, match="bytes of metadata"):
        tensorkeep.load(tmp_path / "db")


@pytest.mark.parametrize("in_flight", ["one", "all"])
def test_loading_whole_refuses_what_reading_refuses(in_flight: str, tmp_path: Path) -> None:
    path = hostile(tmp_path / "shape", shape=[-1])
    with pytest.raises(CorruptCheckpointError, match="shape"):
        load_arrays(path, in_flight=in_flight)
    # TensorStore itself ends the process here.
    path = hostile(tmp_path / "large", shape=[2**42], chunk_grid=grid(1024))
    with pytest.raises(StoreError, match="more than there is memory"):
        load_arrays(path, in_flight=in_flight)
    path = damaged(tmp_path, "w/zarr.json", lambda file: file.write_bytes(file.read_bytes() + b" "))
    with pytest.raises(CorruptCheckpointError, match="metadata is not what was written"):
        load_arrays(path, in_flight=in_flight)


def test_an_impossible_view_is_refused(tmp_path: Path) -> None:
    base = torch.ones(4)
    path = tmp_path / "c"
    save({"w": base, "v": base[1:]}, path)
    with Directory(path) as directory:
        found = sealed.read(directory, "tensorkeep.json")
    found["structure"]["aliases"]["v"]["of"] = "nothing"
    (path / "tensorkeep.json").write_bytes(sealed.seal(found))
    for read in readers():
        with pytest.raises(CorruptCheckpointError, match="what it says of the state is wrong"):
            read(path)


def test_dtypes_without_torch_are_refused_by_name(tmp_path: Path) -> None:
    write_array(tmp_path / "w", np.ones(4, ml_dtypes.float8_e4m3b11fnuz))
    with pytest.raises(UnsupportedError, match="torch has no dtype float8_e4m3b11fnuz") as caught:
        load_arrays(tmp_path / "w")
    assert caught.value.name == "w"


def test_an_interrupt_does_not_wait_for_the_whole_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorkeep.formats.tensorstore.saving.ByteBudget", _small_budget)
    submitted: list[Any] = []
    original = writer._Writer.submit

    def submit(self: Any, job: Any, box: Any) -> None:
        submitted.append(box)
        if len(submitted) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert self.cancellation._set.wait(10)
        original(self, job, box)

    monkeypatch.setattr(writer._Writer, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        save({"w": noise("float32", 900, 100)}, tmp_path / "c", chunk="10kB", in_flight="one")
    assert len(submitted) == 1
    assert list(tmp_path.iterdir()) == []
