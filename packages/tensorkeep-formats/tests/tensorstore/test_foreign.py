"""Reading arrays of other programs, and hostile ones."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tensorkeep
from array_files import forbid_listing, foreign_group, write_array
from tensorkeep import CorruptCheckpointError, NotACheckpointError, OutOfMemoryError, StoreError, UnsupportedError
from tensorkeep.testing.cases import case
from tensorkeep_formats import tensorstore

ts = pytest.importorskip("tensorstore")


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_arrays_of_other_programs_are_named_by_their_paths(driver: str, tmp_path: Path) -> None:
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
    loaded = tensorkeep.load(root)
    assert set(loaded) == set(expected)
    for name, array in expected.items():
        assert np.array_equal(loaded[name].float().numpy(), array.astype("f4"))
    # A single array is a checkpoint, too; without chunks it is full of its fill value.
    assert list(tensorkeep.load(root / "z")) == ["z"]
    assert tensorkeep.info(root / "z").format == "tensorstore"


def test_database_of_another_program_is_read(tmp_path: Path) -> None:
    write_array(Path("a/b"), np.arange(5), base=str(tmp_path / "db"))
    write_array(Path("c"), np.ones((2, 2), "f2"), "zarr", base=str(tmp_path / "db"))
    loaded = tensorkeep.load(tmp_path / "db")
    assert loaded["a.b"].tolist() == [0, 1, 2, 3, 4]
    assert loaded["c"].dtype == torch.float16


def test_directories_that_are_of_other_formats_empty_or_missing_are_not_recognised(tmp_path: Path) -> None:
    for mark in ("_METADATA", "_CHECKPOINT_METADATA", "checkpoint"):
        root = tmp_path / mark
        write_array(root / "w", np.ones(2))
        assert tensorstore.FORMAT.recognises(root)
        (root / mark).write_text("{}")
        assert not tensorstore.FORMAT.recognises(root)
    (tmp_path / "mixed" / "data").mkdir(parents=True)
    write_array(tmp_path / "mixed" / "w", np.ones(2))
    assert not tensorstore.FORMAT.recognises(tmp_path / "mixed")
    (tmp_path / "empty").mkdir()
    for place in ("empty", "missing"):
        assert not tensorstore.FORMAT.recognises(tmp_path / place)
        with pytest.raises(NotACheckpointError):
            tensorkeep.load(tmp_path / place, format="tensorstore")


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
    # A group with the metadata of its arrays is not an array. zarr-python writes NaN, which is not JSON, and the node
    # type may come after all attributes.
    for filling in ("", "x" * 100_000):
        zarr.open_group(path, mode="a").attrs.update({"lowest": float("nan"), "note": filling})
        with pytest.warns(match="Consolidated metadata"):
            zarr.consolidate_metadata(path)
        assert b'"array"' in (path / "zarr.json").read_bytes()
        assert tensorstore.FORMAT.recognises(path)
        assert sorted(tensorkeep.load(path)) == ["bias", "layer.weight"]
    zarr.open_group(tmp_path / "v2").create_array("names", data=np.array(["a", "bc"]))
    assert tensorkeep.info(tmp_path / "v2").placeholders["names"].startswith("an array that is not supported")
    assert sorted(tensorkeep.load(tmp_path / "v2", select="*")) == ["bias", "layer.weight"]


def test_consolidated_group_in_a_database_is_not_an_array(tmp_path: Path) -> None:
    write_array(Path("w"), np.arange(5), base=str(tmp_path / "db"))
    place = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{tmp_path}/db/"}}
    store = ts.KvStore.open(place).result()
    inner = {"w": {"node_type": "array"}}
    store.write("zarr.json", json.dumps({"consolidated_metadata": inner, "node_type": "group"})).result()
    assert list(tensorkeep.load(tmp_path / "db")) == ["w"]


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
    if changes.get("zarr_format") == 2:
        metadata = {"shape": [4], "chunks": [4], "dtype": "<f4", "fill_value": 0, "order": "C"}
        metadata |= {"compressor": None, "filters": None}
    path.mkdir()
    (path / ("zarr.json" if "codecs" in metadata else ".zarray")).write_text(json.dumps(metadata | changes))
    return path


def grid(*chunk: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}


HOSTILE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"shape": [2**50], "chunk_grid": grid(1024)}, OutOfMemoryError, "needs 4.50 PB"),
    ({"chunk_grid": grid(2**40)}, UnsupportedError, "4,398,046,511,104 bytes each"),
    ({"shape": [2**41], "chunk_grid": grid(2**40)}, UnsupportedError, "4,398,046,511,104 bytes each"),
    ({"chunk_grid": grid(2**27)}, UnsupportedError, "536,870,912 bytes each"),
    ({"shape": [2**40, 2**40], "chunk_grid": grid(9, 9)}, CorruptCheckpointError, "impossible shape"),
    ({"shape": [-1]}, CorruptCheckpointError, "shape"),
    ({"data_type": "string"}, UnsupportedError, "string data type"),
    ({"codecs": [{"name": "lz9"}]}, UnsupportedError, "lz9"),
    ({"chunk_grid": {"name": "rectangular", "configuration": {}}}, UnsupportedError, "rectangular"),
    ({"storage_transformers": [{"name": "x"}]}, UnsupportedError, "storage transformers"),
    ({"chunk_key_encoding": {"name": "x"}}, UnsupportedError, "chunk_key_encoding"),
    ({"new": {"must_understand": True}}, UnsupportedError, "must_understand"),
    ({"zarr_format": 4}, UnsupportedError, "zarr_format"),
    *(
        ({"zarr_format": 2} | changes, UnsupportedError, words)
        for changes, words in (
            ({"filters": [{"id": "delta", "dtype": "<f4"}]}, "filters"),
            ({"dtype": "|O", "filters": [{"id": "vlen-utf8"}], "fill_value": ""}, "dtype"),
            ({"dtype": "<U5", "fill_value": ""}, "dtype"),
            ({"dtype": [["a", "<f4"], ["b", "<i4"]], "fill_value": None}, "field"),
            ({"dtype": "<f4", "compressor": {"id": "lzma"}}, "lzma"),
            ({"dtype": "<f4", "compressor": {"id": "blosc", "cname": "x", "clevel": 5, "shuffle": 1}}, "cname"),
        )
    ),
]


def test_hostile_metadata_is_refused(tmp_path: Path) -> None:
    for number, (changes, error, message) in enumerate(HOSTILE):
        with case(changes), pytest.raises(error, match=message):
            tensorkeep.load(hostile(tmp_path / str(number), **changes))


def test_array_with_broken_metadata_is_an_error(tmp_path: Path) -> None:
    root = foreign_group(tmp_path / "g")
    (root / "deep" / "b" / "zarr.json").unlink()
    contents = [b"", b'{"zarr_format": 3, "node_ty', b"[]", b"\xff", b"[" * 100_000, b'{"a": 1}']
    for file, content in product(("zarr.json", ".zarray"), contents):
        (root / "deep" / "b" / file).write_bytes(content)
        with case(f"{file}: {content[:20]}"):
            for read in (tensorkeep.load, tensorkeep.info):
                with pytest.raises(CorruptCheckpointError) as caught:
                    read(root)
                assert caught.value.name == "deep.b"
            assert not tensorkeep.verify(root).ok
        (root / "deep" / "b" / file).unlink()


def test_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = foreign_group(tmp_path / "g")
    forbid_listing(monkeypatch, "deep")
    for read in (tensorkeep.load, tensorkeep.info):
        with pytest.raises(StoreError, match="cannot list the directory: Permission denied") as caught:
            read(root)
        assert caught.value.path == str(root / "deep")


def test_databases_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "/".join("deep")):
        write_array(Path(name), np.arange(5), base=str(tmp_path / "db"))
    for limit, message in (("_MAX_ARRAYS", "more than 2 arrays"), ("_MAX_DEPTH", "more than 2 deep")):
        with monkeypatch.context() as patched:
            patched.setattr(f"tensorkeep_formats.tensorstore.reader.{limit}", 2)
            for read in (tensorkeep.load, tensorkeep.info):
                with pytest.raises(UnsupportedError, match=message):
                    read(tmp_path / "db")
    monkeypatch.setattr("tensorkeep_formats.tensorstore.library.MAX_METADATA_BYTES", 50)
    with pytest.raises(UnsupportedError, match="bytes of metadata"):
        tensorkeep.load(tmp_path / "db")
