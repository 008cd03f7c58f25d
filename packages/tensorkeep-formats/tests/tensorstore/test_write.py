"""The effect of each option of the format, and the cleanup after failed saves."""

import json
import os
import resource
import signal
import threading
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tensorkeep
from array_files import files, forbid_listing, save
from tensorkeep import StoreError, UsageError
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference
from tensorkeep.testing.format_suite import noise
from tensorkeep_formats.tensorstore import library, writer, zarr_bfloat16
from tensorkeep_formats.tensorstore.specs import UNSUPPORTED_DTYPES, array_keys, is_key
from tiers import exhaustive

ts = pytest.importorskip("tensorstore")


def metadata(path: Path, name: str = "w") -> Any:
    """Return the metadata of an array of a checkpoint."""
    file = path / name / ".zarray"
    return json.loads((file if file.exists() else path / name / "zarr.json").read_text())


ZARR_2: dict[str | None, dict[str, Any] | None] = {
    "as-documented": {"id": "blosc", "cname": "lz4"},
    None: None,
    "none": None,
    "gzip:6": {"id": "gzip", "level": 6},
    "zlib": {"id": "zlib", "level": 1},
    "bz2:3": {"id": "bz2", "level": 3},
    "zstd:-5": {"id": "zstd", "level": -5},
    "blosc-zstd:7": {"id": "blosc", "cname": "zstd", "clevel": 7, "blocksize": 0, "shuffle": -1},
}
ZARR_3 = ["gzip:1", "zstd", "zstd:1", *(f"blosc-{n}" for n in ("lz4", "lz4hc", "zstd", "zlib"))]


def test_the_suffix_zarr_means_tensorstore(tmp_path: Path) -> None:
    source = tensorkeep.save({"w": torch.ones(3)}, tmp_path / "a").path
    assert tensorkeep.convert(source, tmp_path / "b.zarr").format == "tensorstore"
    assert tensorkeep.save({"w": torch.ones(3)}, tmp_path / "c.ZARR").format == "tensorstore"


@pytest.mark.parametrize("format", ["tensorstore", "t5x"])
def test_freed_memory_is_refused_and_leaves_nothing(tmp_path: Path, format: str) -> None:
    flat = torch.arange(2048.0)
    view = flat[1024:]
    flat.untyped_storage().resize_(0)
    with pytest.raises(tensorkeep.UnsupportedLeafError, match="freed or made smaller"):
        tensorkeep.save({"a": torch.ones(3), "w": view}, tmp_path / "c", format=format)
    assert not any(tmp_path.iterdir())


def test_compressors_of_zarr_2(tmp_path: Path) -> None:
    weight, path = noise("float32", 30, 20), tmp_path / "c"
    for given, expected in ZARR_2.items():
        with case(given):
            save({"w": weight}, path, zarr=2, compressor=given, chunk=None, overwrite=True)
            found = metadata(path)["compressor"]
            assert found == expected or found.items() > expected.items()
            assert expected or (path / "w" / "0.0").read_bytes() == weight.numpy().tobytes()
            assert difference({"w": weight}, tensorkeep.load(path)) is None


def test_compressors_of_zarr_3(tmp_path: Path) -> None:
    weight, path = noise("bfloat16", 200, 96), tmp_path / "c"
    for name in ZARR_3:
        with case(name):
            save({"w": weight}, path, compressor=name, overwrite=True)
            codecs = [codec["name"] for codec in metadata(path)["codecs"]]
            assert codecs == ["bytes", name.split("-")[0].split(":")[0], "crc32c"]
            assert difference({"w": weight}, tensorkeep.load(path)) is None


def test_invalid_options_are_refused_with_the_valid_ones(tmp_path: Path) -> None:
    for options, message in (
        ({"compressor": "as-documented"}, "zarr=2"),
        ({"compressor": "bz2"}, "choose one of: None, gzip, zstd, blosc-lz4"),
        ({"compressor": "lz4", "zarr": 2}, "as-documented, gzip, zlib, zstd, bz2"),
        ({"compressor": "zstd:99"}, "-131072 to 22"),
        ({"compression": "lossless"}, "compressor="),
        ({"zarr": 2, "checksum": "crc32c"}, "zarr=3"),
        ({"zarr": 2, "shard_bytes": "1MiB"}, "zarr=3"),
        ({"zarr": True}, "2, 3"),
        ({"zarr": 4}, "2, 3"),
        ({"concurrency": 0}, "`int` >= 1"),
        ({"dtype": "float16"}, "'keep', 'float32'"),
    ):
        with case(options):
            with pytest.raises(UsageError) as caught:
                save({"w": torch.zeros(2)}, tmp_path / "c", **options)
            assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_float32_converts_floats_and_load_restores_their_dtype(tmp_path: Path) -> None:
    values = torch.linspace(-3, 3, 50)
    state = {"half": values.half(), "brain": values.bfloat16(), "int": torch.arange(5), "double": values.double()}
    save(state, tmp_path / "c", dtype="float32", zarr=2)
    dtypes = {name: metadata(tmp_path / "c", name)["dtype"] for name in state}
    assert dtypes == {"half": "<f4", "brain": "<f4", "int": "<i8", "double": "<f4"}
    expected = state | {"double": values.float().double()}
    assert difference(expected, tensorkeep.load(tmp_path / "c")) is None


def small_budget(limit: int, *, real: type[writer.ByteBudget] = writer.ByteBudget) -> writer.ByteBudget:
    return real(100_000)


@pytest.mark.parametrize(
    ("kvstore", "in_flight"),
    [("file", "one"), ("ocdbt", "all"), *exhaustive(("file", "all"), ("ocdbt", "one"))],
)
def test_memory_stays_within_the_budget_except_for_a_larger_chunk(
    kvstore: str, in_flight: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorkeep_formats.tensorstore.writer.ByteBudget", small_budget)
    state = {f"small{i}": noise("float32", 40, 100, seed=i) for i in range(6)}
    state |= {"large": noise("float32", 900, 100), "turned": noise("float32", 100, 900, seed=1).t()}
    report = save(state, tmp_path / "c", kvstore=kvstore, in_flight=in_flight, chunk="10kB")
    assert 0 < report.peak_buffer_bytes <= 100_000
    assert difference(state, tensorkeep.load(tmp_path / "c")) is None
    # A larger chunk is written alone.
    report = save(state, tmp_path / "whole", kvstore=kvstore, in_flight=in_flight, chunk=None)
    assert report.peak_buffer_bytes == 2 * 360_000
    assert difference(state, tensorkeep.load(tmp_path / "whole")) is None


def test_tensors_in_stored_form_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = noise("bfloat16", 64, 32)
    seen: list[Any] = []
    original = writer._Job.content
    monkeypatch.setattr(writer._Job, "content", lambda job, box: seen.append(original(job, box)) or seen[-1])
    save({"w": tensor}, tmp_path / "c", chunk=600)
    assert len(seen) >= 1
    memory = tensor.view(torch.int16).numpy()
    assert all(np.shares_memory(array.view(np.int16), memory) for array in seen)


@pytest.mark.parametrize("sync", [True, False])
def test_limits_and_syncing_reach_tensorstore(sync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[Any] = []
    original = library.context

    def noted(**limits: Any) -> Any:
        contexts.append(original(**limits))
        return contexts[-1]

    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(library, "context", noted)
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), fsync(fd)))
    save({"w": torch.zeros(9), "v": torch.ones(3)}, tmp_path / "c", concurrency=7, copy_concurrency=3, sync=sync)
    assert contexts[0]["file_io_concurrency"].to_json() == {"limit": 7}
    assert contexts[0]["data_copy_concurrency"].to_json() == {"limit": 3}
    assert contexts[0]["file_io_sync"].to_json() is sync
    # Our two files; the directories w, w/c, v, v/c and their parent; then the commit's two.
    assert len(synced) == (2 + 5 + 2 if sync else 2)


def test_sync_reports_folders_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w" / "inner").mkdir(parents=True)
    forbid_listing(monkeypatch, "inner")
    for call in (library.sync_directories, lambda path: library.list_tree(str(path), path)):
        with pytest.raises(StoreError, match="cannot list"):
            call(tmp_path)


def test_shards_hold_many_chunks(tmp_path: Path) -> None:
    weight = noise("bfloat16", 200, 96)
    save({"w": weight}, tmp_path / "c", chunk=256, shard_bytes="8KiB", compressor="zstd:1")
    (codec,) = metadata(tmp_path / "c")["codecs"]
    inner = codec["configuration"]["chunk_shape"]
    shard = metadata(tmp_path / "c")["chunk_grid"]["configuration"]["chunk_shape"]
    assert int(np.prod(inner)) <= 256 < int(np.prod(shard)) <= 4096
    assert tensorkeep.verify(tmp_path / "c").checked == "CRC-32C of every chunk"
    assert difference({"w": weight}, tensorkeep.load(tmp_path / "c")) is None


def test_chunks_of_zeros_are_stored(tmp_path: Path) -> None:
    state = {"plus": torch.zeros(4, 4), "minus": -torch.zeros(4, 4)}
    save(state, tmp_path / "c", chunk=4)
    for name in state:
        assert len([file for file in files(tmp_path / "c" / name) if file.startswith("c/")]) == 4
    assert difference(state, tensorkeep.load(tmp_path / "c")) is None


def test_unsupported_dtypes_are_those_of_tensorstore() -> None:
    for name in BY_NAME:
        with pytest.raises((ValueError, TypeError)) if name in UNSUPPORTED_DTYPES else nullcontext():
            ts.dtype(name)
    assert set(BY_NAME) >= UNSUPPORTED_DTYPES


def test_keys_are_safe_and_unique() -> None:
    places = ("", ".", "..", "../up", "x/y", "x%2Fy", "\0", "%", "é" * 90)
    names = ["a", "A", "c", "d", "zarr.json", "tensorkeep.json", *places]
    keys = array_keys(names)
    assert len({key.lower() for key in keys.values()}) == len(names)
    assert all(is_key(key) for key in keys.values())
    assert keys["x/y"] != keys["x%2Fy"]
    assert array_keys(["model.layers.0.weight"]) == {"model.layers.0.weight": "model.layers.0.weight"}


def test_failed_write_is_reported_and_nothing_is_left(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(StoreError, match="cannot write the arrays: File too large"):
            save({"w": torch.zeros(100_000)}, tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_progress_ends_with_all_bytes_and_an_error_in_it_ends_the_save(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    state = {"a": torch.zeros(1000), "b": torch.zeros(10, dtype=torch.int8)}
    save(state, tmp_path / "c", chunk=100, dtype="float32", progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (4010, 4010)
    assert seen == sorted(seen)

    def stop(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        save(state, tmp_path / "d", chunk=10, progress=stop)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_interrupt_ends_the_save_in_the_middle_of_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorkeep_formats.tensorstore.writer.ByteBudget", small_budget)
    submitted: list[Any] = []
    original = writer._ArrayWriter.submit

    def submit(self: Any, job: Any, box: Any) -> None:
        submitted.append(box)
        if len(submitted) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert self.cancellation._set.wait(60)
        original(self, job, box)

    monkeypatch.setattr(writer._ArrayWriter, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        save({"w": noise("float32", 900, 100)}, tmp_path / "c", chunk="10kB", in_flight="one")
    assert (len(submitted), list(tmp_path.iterdir())) == (1, [])


def test_zarr_python_reads_our_arrays_bit_for_bit(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    zarr_bfloat16.register()
    state = {"b": noise("bfloat16", 70, 33), "f": noise("float32", 41, 7), "one": noise("bfloat16")}
    for version, compressor in product((2, 3), (None, "zstd", "blosc-lz4", "gzip")):
        save(state, tmp_path / "c", zarr=version, compressor=compressor, chunk=500, overwrite=True)
        group = zarr.open_group(tmp_path / "c", mode="r")
        for name, tensor in state.items():
            with case(f"{name}, {compressor}, version {version}"):
                found = np.asarray(group[name][...])
                bits = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).numpy()
                assert found.dtype == (ml_dtypes.bfloat16 if tensor.dtype == torch.bfloat16 else np.float32)
                assert np.array_equal(found.view(bits.dtype), bits)
