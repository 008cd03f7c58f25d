"""Reading our arrays: every kind of damage is found, and nothing outside of the checkpoint is read."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from array_files import damaged, files, flip, foreign_group, save, write_array
from tensorkeep import CorruptCheckpointError, StoreError, UnsupportedError
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.base import OpenSettings
from tensorkeep.storage.buffers import BufferPool
from tensorkeep.storage.local import LocalDirectory
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference
from tensorkeep.testing.format_suite import noise, training_state
from tensorkeep_formats import t5x, tensorstore

ts = pytest.importorskip("tensorstore")


READERS: list[Callable[[Path], Any]] = [tensorkeep.load, tensorkeep.info]


def test_nested_state_round_trips(tmp_path: Path) -> None:
    for options in ({}, {"kvstore": "ocdbt", "compressor": "zstd:1"}, {"zarr": 2, "in_flight": "one"}):
        save(training_state(), tmp_path / "c", overwrite=True, metadata={"run": 7}, **options)
        assert difference(training_state(), tensorkeep.load(tmp_path / "c")) is None
        assert tensorkeep.info(tmp_path / "c").metadata == {"run": 7}


def test_chunk_larger_than_a_read_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorkeep_formats.tensorstore.reader.BLOCK_BYTES", 4096)
    state = {"w": noise("float32", 128, 256), "rows": noise("float32", 128, 256, seed=1)}
    save({"w": state["w"]}, tmp_path / "w", chunk=None)
    save({"rows": state["rows"]}, tmp_path / "rows", chunk=1024, chunking="divisors")
    pool = BufferPool()
    pool.budget = 8 * 4096
    with tensorstore.FORMAT.open(tmp_path / "w", OpenSettings(pool=pool)) as reader:
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


def test_replaced_checkpoint_is_never_mixed_with_the_new_one(tmp_path: Path) -> None:
    save({"w": torch.zeros(1000)}, tmp_path / "c", chunk=100)
    with tensorkeep.open(tmp_path / "c") as opened:
        save({"w": torch.ones(1000)}, tmp_path / "c", chunk=100, overwrite=True)
        with pytest.raises(StoreError, match="replaced while it was read"):
            opened["w"][:]
    assert tensorkeep.load(tmp_path / "c")["w"].sum() == 1000


def test_flipped_bit_is_found_by_the_crc_and_its_file_is_named(tmp_path: Path) -> None:
    path = damaged(tmp_path, "w/c/1/0", flip)
    with pytest.raises(CorruptCheckpointError, match="Digest mismatch") as caught:
        tensorkeep.load(path)
    assert caught.value.name == "w"
    assert caught.value.path == str(path / "w" / "c" / "1" / "0")
    assert "[" not in caught.value.message
    assert not tensorkeep.verify(path).ok


def test_missing_chunk_is_an_error(tmp_path: Path) -> None:
    for number, options in enumerate([{}, {"zarr": 2}, {"chunk": 10, "shard_bytes": 400}]):
        path = tmp_path / str(number)
        save({"w": torch.ones(20, 20)}, path, **{"chunk": 100, **options})
        chunk = next(f for f in files(path / "w") if not f.endswith((".zarray", "zarr.json")))
        (path / "w" / chunk).unlink()
        with case(options):
            with pytest.raises(CorruptCheckpointError, match="missing") as caught:
                tensorkeep.load(path)
            assert caught.value.name == "w"


def test_changed_or_missing_metadata_is_found_on_opening(tmp_path: Path) -> None:
    for number, (file, damage, message) in enumerate(
        [
            ("w/zarr.json", flip, "metadata has changed since the save"),
            ("tensorkeep.json", flip, "checksum is wrong"),
            ("zarr.json", flip, "checksum is wrong"),
            ("tensorkeep.json", Path.unlink, r"tensorkeep\.json: is missing"),
        ]
    ):
        path = damaged(tmp_path / str(number), file, damage)
        with case(f"{file}: {message}"), pytest.raises(CorruptCheckpointError, match=message):
            tensorkeep.open(path)


def test_impossible_view_is_refused(tmp_path: Path) -> None:
    base = torch.ones(4)
    path = tmp_path / "c"
    save({"w": base, "v": base[1:]}, path)
    with LocalDirectory(path) as directory:
        found = checksummed_json.read(directory, "tensorkeep.json")
    found["structure"]["aliases"]["v"]["of"] = "nothing"
    (path / "tensorkeep.json").write_bytes(checksummed_json.seal(found))
    for read in READERS:
        with pytest.raises(CorruptCheckpointError, match="cannot be a view of 'nothing'"):
            read(path)


@pytest.mark.parametrize("own", [True, False])
def test_links_to_files_are_followed_and_others_refused(own: bool, tmp_path: Path) -> None:
    path = tmp_path / "c"
    save({"w": torch.ones(4, 4)}, path)
    if not own:
        (path / "tensorkeep.json").unlink()
        (path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    for where, read in product(("w", "w/c", "w/c/0", "w/c/0/0", "w/zarr.json"), READERS):
        place = path / where
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
        with case(where):
            if where.endswith(("0/0", "json")):
                read(path)
                (tmp_path / "elsewhere").rename(tmp_path / "hidden")
            with pytest.raises(UnsupportedError, match="symbolic link") as caught:
                read(path)
            assert caught.value.path == str(place)
            if (tmp_path / "hidden").exists():
                (tmp_path / "hidden").rename(tmp_path / "elsewhere")
        place.unlink()
        (tmp_path / "elsewhere").rename(place)
    (path / "self").symlink_to("self")
    assert tensorkeep.load(path)["w"].shape == (4, 4)
    (path / "w" / "self").symlink_to("self")
    with pytest.raises(UnsupportedError, match="to a folder or to nothing"):
        tensorkeep.load(path)


def test_links_in_databases_and_pipes_in_arrays_are_refused(tmp_path: Path) -> None:
    save({"w": torch.ones(4, 4)}, tmp_path / "own", kvstore="ocdbt")
    write_array(Path("w"), np.arange(5), base=str(tmp_path / "foreign"))
    for name in ("own", "foreign"):
        (tmp_path / name / "d").rename(tmp_path / f"{name}-elsewhere")
        (tmp_path / name / "d").symlink_to(tmp_path / f"{name}-elsewhere")
        for read in READERS:
            with pytest.raises(UnsupportedError, match="symbolic link"):
                read(tmp_path / name)
    save({"w": torch.ones(4)}, tmp_path / "c")
    (tmp_path / "c/w/c/0").unlink()
    os.mkfifo(tmp_path / "c/w/c/0")
    for read in READERS:
        with pytest.raises(UnsupportedError, match="neither a file nor a folder"):
            read(tmp_path / "c")


def test_checkpoint_may_be_opened_through_a_link(tmp_path: Path) -> None:
    save({"w": torch.ones(4)}, tmp_path / "own")
    write_array(tmp_path / "one", np.ones(4, "f4"))
    for name, key in (("own", "w"), ("one", "latest-one")):
        link = tmp_path / f"latest-{name}"
        link.symlink_to(tmp_path / name)
        assert tensorkeep.load(link)[key].tolist() == [1] * 4


def test_metadata_of_more_than_16_mib_is_not_read(tmp_path: Path) -> None:
    save({"w": torch.ones(4)}, tmp_path / "own")
    foreign_group(tmp_path / "foreign")
    for name, read in product(("own", "foreign"), READERS):
        path = tmp_path / name / "w" / "zarr.json"
        os.truncate(path, 2**40)
        with pytest.raises(UnsupportedError, match="bytes of metadata") as caught:
            read(tmp_path / name)
        assert caught.value.path == str(path)


def test_without_tensorstore_errors_name_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.zeros(2)}
    for format in (tensorstore.FORMAT, t5x.FORMAT):
        path = tmp_path / format.name
        tensorkeep.save(state, path, format=format.name)
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "tensorstore", None)
            assert format.recognises(path)
            for call in (tensorkeep.load, lambda path: tensorkeep.save(state, f"{path}-2", format=path.name)):
                with pytest.raises(tensorkeep.MissingExtraError, match=r"pip install \./packages/tensorkeep-formats"):
                    call(path)


@pytest.mark.integration
def test_importing_the_format_imports_neither_tensorstore_nor_zarr() -> None:
    code = "import sys, tensorkeep_formats.tensorstore; print({'tensorstore', 'zarr'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_what_lies_beside_the_arrays_is_not_looked_at(tmp_path: Path) -> None:
    for name in ("tensorstore", "t5x"):
        path = tmp_path / name
        tensorkeep.save({"w": torch.ones(4)}, path, format=name)
        (path / "link").symlink_to(tmp_path)
        os.mkfifo(path / "pipe")
        (path / "other").mkdir()
        (path / "other" / "zarr.json").write_bytes(b" " * (16 * 1024**2 + 1))
        with case(name):
            assert tensorkeep.load(path)["w"].tolist() == [1] * 4


def test_arrays_of_a_directory_come_in_the_order_of_its_folders(tmp_path: Path) -> None:
    for key in ("w", "w-x", "w.y", "v/w"):
        write_array(tmp_path / "c" / key, np.ones(4, "f4"))
    (tmp_path / "c" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    # TensorStore has no such keys, and they need not be read.
    for key in (b"g.__lock", b"\xff"):
        os.mkdir(os.fsencode(tmp_path / "c") + b"/" + key)
        Path(os.fsdecode(os.fsencode(tmp_path / "c") + b"/" + key), "zarr.json").write_text('{"node_type": "group"}')
    os.mkfifo(tmp_path / "c" / "pipe")
    assert [*tensorkeep.load(tmp_path / "c")] == ["v.w", "w", "w-x", "w.y"]
