"""Safetensors files: exchanged with the official library, sharded, nested, coded and malformed."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import tensorkeep.safetensors
from formats.safetensors.files import raw, read, save
from tensorkeep.errors import CorruptCheckpointError, DestinationExistsError, NotACheckpointError, UnsupportedError
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.safetensors import FORMAT, SafetensorsOptions
from tensorkeep.state.dtypes import BY_SAFETENSORS
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference, leaf_bytes, same
from tensorkeep.testing.format_suite import names_in, noise, training_state

KNOWN = [dtype.name for dtype in BY_SAFETENSORS.values()]


def plain_state() -> dict[str, torch.Tensor]:
    """Return one tensor of each dtype, narrow ones first, 0-d and empty ones too."""
    state = {f"layer.{name}": noise(name, 5, 7) for name in reversed(KNOWN)}
    return {**state, "scalar": noise("float32"), "none": noise("bfloat16", 0, 4)}


class TestOfficialLibrary:
    def test_safetensors_reads_saved_files(self, tmp_path: Path) -> None:
        state = plain_state()
        save(state, tmp_path / "x.safetensors", metadata={"run": "7"})
        with safe_open(tmp_path / "x.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt", "run": "7"}
            assert set(file.keys()) == set(state)
            for name, tensor in state.items():
                found = file.get_tensor(name)
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert leaf_bytes(found) == leaf_bytes(tensor), name
        loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
        assert all(leaf_bytes(loaded[name]) == leaf_bytes(tensor) for name, tensor in state.items())

    def test_files_written_by_safetensors_load_exactly(self, tmp_path: Path) -> None:
        state = plain_state()
        safetensors.torch.save_file(state, tmp_path / "x.safetensors", metadata={"run": "7"})
        found = read(tmp_path / "x.safetensors")
        assert set(found) == set(state)
        assert all(same(found[name], tensor) for name, tensor in state.items())
        with FORMAT.open(tmp_path / "x.safetensors", OpenSettings()) as reader:
            assert reader.metadata == {"run": "7"}
            assert reader.verifiable is None

    def test_four_bit_floats_load_as_pairs_and_other_dtypes_are_placeholders(self, tmp_path: Path) -> None:
        header = {
            "w": {"dtype": "F6_E2M3", "shape": [2, 4], "data_offsets": [0, 6]},
            "odd": {"dtype": "F4", "shape": [2, 3], "data_offsets": [6, 9]},
            "pairs": {"dtype": "F4", "shape": [3, 4], "data_offsets": [9, 15]},
            "later": {"dtype": "F2" * 99, "shape": [3, 4], "data_offsets": [15, 18]},
        }
        path = raw(tmp_path / "x.safetensors", header, bytes(range(18)))
        found = tensorkeep.load(path, select="pairs")["pairs"]
        assert found.dtype is torch.float4_e2m1fn_x2
        assert found.view(torch.uint8).tolist() == [[9, 10], [11, 12], [13, 14]]
        placeholders = tensorkeep.info(path).placeholders
        assert placeholders["w"].startswith("a tensor of F6_E2M3 and shape [2, 4]") and len(placeholders["later"]) < 150
        assert not tensorkeep.diff(path, path) and placeholders.keys() == {"w", "odd", "later"}
        for load in (tensorkeep.safetensors.load_file, lambda path: tensorkeep.safetensors.load(path.read_bytes())):
            with pytest.raises(safetensors.SafetensorError, match=r"'w': cannot be read: a tensor of F6_E2M3"):
                load(path)
        with tensorkeep.safetensors.safe_open(path, "pt") as opened:
            assert opened.keys() == ["later", "odd", "pairs", "w"]
            pairs = opened.get_slice("pairs")
            assert (pairs.get_dtype(), pairs.get_shape()) == ("F4", [3, 4])
            assert [pairs[1:, 2:].view(torch.uint8).tolist(), tuple(pairs[...].shape)] == [[[12], [14]], (3, 2)]
            for index in ((slice(None), slice(1, 4)), (..., 0), (0, 1)):
                with case(index), pytest.raises(safetensors.SafetensorError, match="packs 2 numbers"):
                    pairs[index]

    def test_safetensors_reads_every_tensor_of_a_nested_state(self, tmp_path: Path) -> None:
        save(training_state(), tmp_path / "x.safetensors")
        loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
        assert {"model.embed", "optimizer.state.0.exp_avg", "parameter"} <= loaded.keys()
        assert leaf_bytes(loaded["model.embed"]) == leaf_bytes(training_state()["model"]["embed"])


def test_unusual_names_are_loaded(tmp_path: Path) -> None:
    names = ["", "\0", "a.b", "__metadata", "☃"]
    header = {name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, name in enumerate(names)}
    found = read(raw(tmp_path / "x.safetensors", header, bytes(range(5))))
    assert {name: int(tensor) for name, tensor in found.items()} == dict(zip(names, range(5), strict=True))


class TestShards:
    def test_shards_and_index_have_the_names_of_hugging_face_and_one_file_needs_no_index(self, tmp_path: Path) -> None:
        state = {f"w{number}": noise("float32", 10, seed=number) for number in range(5)}
        save(state, tmp_path / "model", options=SafetensorsOptions(shard_bytes="80"))
        names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
        index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
        assert names_in(tmp_path / "model") == [*names, "model.safetensors.index.json"]
        assert index["metadata"]["total_size"] == 200
        assert list(index["weight_map"]) == list(state)
        for name, file in index["weight_map"].items():
            with safe_open(tmp_path / "model" / file, "pt") as opened:
                assert leaf_bytes(opened.get_tensor(name)) == leaf_bytes(state[name])
        save({"w": noise("int8", 3)}, tmp_path / "one")
        assert names_in(tmp_path / "one") == ["model.safetensors"]
        assert difference({"w": noise("int8", 3)}, read(tmp_path / "one")) is None

    @pytest.fixture
    def shards(self, tmp_path: Path) -> Path:
        state = {f"w{number}": noise("float32", 10) for number in range(3)}
        save(state, tmp_path / "m", options=SafetensorsOptions(shard_bytes=80))
        return tmp_path / "m"

    def test_index_that_lies_is_refused(self, shards: Path) -> None:
        place = shards / "model.safetensors.index.json"
        first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
        above = ("../x.safetensors", "/etc/passwd", "..", ".", "", "C:x", "a\0b")
        outside = (*above, "a/b.safetensors", "a\\b.safetensors")
        changes: list[tuple[dict[str, Any], set[str]]] = [
            *(({"w1": name}, {"w1"}) for name in (*outside, 7, None)),
            ({"w2": first, "w3": second}, {"w2", "w3"}),
            ({"w1": "unlisted"}, {"w1"}),
            ({"w9": first}, {"w9"}),
        ]
        original = json.loads(place.read_text())
        for change, names in changes:
            files = {name: file for name, file in (original["weight_map"] | change).items() if file != "unlisted"}
            place.write_text(json.dumps({**original, "weight_map": files}))
            with case(change):
                with pytest.raises(CorruptCheckpointError) as caught:
                    read(shards)
                assert caught.value.name in names

    def test_malformed_index_is_refused(self, shards: Path) -> None:
        twice = '{"weight_map": {"w0": "a.safetensors", "w0": "b.safetensors"}}'
        deep = '{"weight_map": ' + "[" * 100_000
        for text in ("", "[]", "{", "{}", '{"weight_map": []}', '{"weight_map": {}}', deep, twice):
            (shards / "model.safetensors.index.json").write_text(text)
            with case(text[:70]), pytest.raises(CorruptCheckpointError):
                read(shards)

    def test_shards_beside_other_files_stay_and_double_or_missing_ones_and_a_missing_index_are_refused(
        self, shards: Path
    ) -> None:
        (shards / "tokenizer.json").write_text("{}")
        with pytest.raises(DestinationExistsError):
            save({"w": noise("int8", 3)}, shards, overwrite=True)
        assert (shards / "tokenizer.json").exists()
        first, second = sorted(shards.glob("*.safetensors"))
        second.write_bytes(first.read_bytes())
        with pytest.raises(CorruptCheckpointError):
            read(shards)
        second.unlink()
        with pytest.raises(CorruptCheckpointError, match="missing") as caught:
            read(shards)
        assert (caught.value.name, Path(caught.value.path).name) == ("w2", "model-00002-of-00002.safetensors")
        second.write_bytes(first.read_bytes())
        (shards / "model.safetensors.index.json").unlink()
        assert not FORMAT.recognises(shards)
        with pytest.raises(NotACheckpointError):
            read(shards)


def test_settings_that_a_file_cannot_have_are_refused(tmp_path: Path) -> None:
    for name, settings, error in (
        *(("x", {"options": SafetensorsOptions(shard_bytes=size)}, tensorkeep.UsageError) for size in (0, -1, "many")),
        ("x.safetensors", {"options": SafetensorsOptions(shard_bytes=100)}, tensorkeep.UsageError),
        *(
            ("x.safetensors", {"metadata": metadata}, UnsupportedError)
            for metadata in ({"a": 1}, {"a": {"b": "c"}}, {"a": None}, {"tensorkeep": "x"})
        ),
    ):
        with case(settings), pytest.raises(error):
            save({}, tmp_path / name, **settings)
        assert list(tmp_path.iterdir()) == []
