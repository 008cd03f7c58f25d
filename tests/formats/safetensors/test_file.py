"""Safetensors files: exchanged with the official library, sharded, nested, coded and malformed."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from tensorkeep.errors import (
    CorruptCheckpointError,
    DestinationExistsError,
    NotACheckpointError,
    UnsupportedError,
    UsageError,
)
from tensorkeep.formats import native
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.safetensors import FORMAT
from tensorkeep.formats.safetensors.writer import SafetensorsOptions
from tensorkeep.formats.write import WriteSettings
from tensorkeep.state.dtypes import BY_SAFETENSORS
from tensorkeep.state.tree import flatten
from tensorkeep.testing.equality import difference, leaf_bytes, same
from tensorkeep.testing.format_states import load, noise, training_state

KNOWN = [dtype.name for dtype in BY_SAFETENSORS.values()]


def save(state: Any, path: Path, **settings: Any) -> None:
    FORMAT.write(flatten(state), path, WriteSettings(threads=2, **settings))


def read(path: Path) -> Any:
    with FORMAT.open(path, OpenSettings()) as reader:
        return load(reader)


def plain_state() -> dict[str, torch.Tensor]:
    """Return one tensor of each dtype, narrow ones first, 0-d and empty ones too."""
    state = {f"layer.{name}": noise(name, 5, 7) for name in reversed(KNOWN)}
    return {**state, "scalar": noise("float32"), "none": noise("bfloat16", 0, 4)}


def raw(path: Path, header: dict[str, Any], data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


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

    def test_four_bit_floats_load_as_pairs(self, tmp_path: Path) -> None:
        data = bytes(range(6))
        path = raw(tmp_path / "x.safetensors", {"w": {"dtype": "F4", "shape": [3, 4], "data_offsets": [0, 6]}}, data)
        found = read(path)["w"]
        assert (found.dtype, tuple(found.shape)) == (torch.float4_e2m1fn_x2, (3, 2))
        assert found.view(torch.uint8).flatten().tolist() == list(data)

    def test_other_narrow_floats_load_as_bytes(self, tmp_path: Path) -> None:
        header = {
            "w": {"dtype": "F6_E2M3", "shape": [2, 4], "data_offsets": [0, 6]},
            "odd": {"dtype": "F4", "shape": [2, 3], "data_offsets": [6, 9]},
        }
        found = read(raw(tmp_path / "x.safetensors", header, bytes(range(9))))
        assert found["w"].tolist() == [0, 1, 2, 3, 4, 5]
        assert found["odd"].tolist() == [6, 7, 8]
        assert found["w"].dtype == torch.uint8

    def test_safetensors_reads_every_tensor_of_a_nested_state(self, tmp_path: Path) -> None:
        save(training_state(), tmp_path / "x.safetensors")
        loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
        assert {"model.embed", "optimizer.state.0.exp_avg", "parameter"} <= loaded.keys()
        assert leaf_bytes(loaded["model.embed"]) == leaf_bytes(training_state()["model"]["embed"])


class TestNames:
    def test_unusual_names_are_loaded(self, tmp_path: Path) -> None:
        names = ["", "\0", "a.b", "__metadata", "☃"]
        header = {name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, name in enumerate(names)}
        found = read(raw(tmp_path / "x.safetensors", header, bytes(range(5))))
        assert {name: int(tensor) for name, tensor in found.items()} == dict(zip(names, range(5), strict=True))

    def test_order_of_a_flat_dict_is_preserved(self, tmp_path: Path) -> None:
        state = {"z": noise("uint8", 3), "a": noise("float64", 2), "m": noise("bfloat16", 9)}
        save(state, tmp_path / "x.safetensors")
        save(state, tmp_path / "shards", options=SafetensorsOptions(shard_bytes=16))
        assert difference(state, read(tmp_path / "x.safetensors")) is None
        assert difference(state, read(tmp_path / "shards")) is None

    def test_ordered_dict_is_restored_as_ordered_dict(self, tmp_path: Path) -> None:
        state = torch.nn.Linear(3, 2).state_dict()
        assert type(state) is OrderedDict
        save(state, tmp_path / "x.safetensors")
        assert difference(state, read(tmp_path / "x.safetensors")) is None


class TestShards:
    def test_shards_and_index_have_the_names_of_hugging_face(self, tmp_path: Path) -> None:
        state = {f"w{number}": noise("float32", 10, seed=number) for number in range(5)}
        save(state, tmp_path / "model", options=SafetensorsOptions(shard_bytes="80"))
        names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
        index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
        assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [*names, "model.safetensors.index.json"]
        assert index["metadata"]["total_size"] == 200
        assert list(index["weight_map"]) == list(state)
        for name, file in index["weight_map"].items():
            with safe_open(tmp_path / "model" / file, "pt") as opened:
                assert leaf_bytes(opened.get_tensor(name)) == leaf_bytes(state[name])

    def test_one_file_in_a_directory_needs_no_index(self, tmp_path: Path) -> None:
        save({"w": noise("int8", 3)}, tmp_path / "model")
        assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]
        assert difference({"w": noise("int8", 3)}, read(tmp_path / "model")) is None

    def test_hugging_face_cache_of_links_is_read(self, tmp_path: Path) -> None:
        """The Hugging Face cache: a snapshot of symbolic links to files named by their hashes."""
        save(plain_state(), tmp_path / "model", options=SafetensorsOptions(shard_bytes=100))
        (tmp_path / "blobs").mkdir()
        (tmp_path / "snapshot").mkdir()
        for number, path in enumerate((tmp_path / "model").iterdir()):
            blob = tmp_path / "blobs" / f"{number:x}"
            path.rename(blob)
            (tmp_path / "snapshot" / path.name).symlink_to(blob)
        index = tmp_path / "snapshot" / "model.safetensors.index.json"
        for place in (tmp_path / "snapshot", index):
            assert FORMAT.recognises(place)
            assert difference(plain_state(), read(place)) is None

    @pytest.fixture
    def shards(self, tmp_path: Path) -> Path:
        save(
            {f"w{number}": noise("float32", 10) for number in range(3)},
            tmp_path / "m",
            options=SafetensorsOptions(shard_bytes=80),
        )
        return tmp_path / "m"

    @pytest.mark.parametrize(
        "name",
        [
            "../x.safetensors",
            "/etc/passwd",
            "a/b.safetensors",
            "a\\b.safetensors",
            "..",
            ".",
            "",
            "C:x",
            "a\0b",
            7,
            None,
        ],
    )
    def test_index_with_a_file_outside_the_directory_is_refused(self, shards: Path, name: Any) -> None:
        index = json.loads((shards / "model.safetensors.index.json").read_text())
        index["weight_map"]["w1"] = name
        (shards / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CorruptCheckpointError) as caught:
            read(shards)
        assert caught.value.name == "w1"

    @pytest.mark.parametrize(
        "text",
        ["", "[]", "{", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": ' + "[" * 100_000]
        + ['{"weight_map": {"w0": "a.safetensors", "w0": "b.safetensors"}}'],
        ids=lambda text: text[:20],
    )
    def test_malformed_index_is_refused(self, shards: Path, text: str) -> None:
        (shards / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CorruptCheckpointError):
            read(shards)

    def test_missing_shard_is_reported_with_file_and_tensor(self, shards: Path) -> None:
        (shards / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(CorruptCheckpointError, match="missing") as caught:
            read(shards)
        assert caught.value.name == "w2"
        assert caught.value.path is not None and caught.value.path.endswith("model-00002-of-00002.safetensors")

    @pytest.mark.parametrize("change", ["elsewhere", "unlisted", "absent"])
    def test_index_that_contradicts_the_files_is_refused(self, shards: Path, change: str) -> None:
        index = json.loads((shards / "model.safetensors.index.json").read_text())
        if change == "elsewhere":
            index["weight_map"]["w2"] = index["weight_map"]["w0"]
            index["weight_map"]["w3"] = "model-00002-of-00002.safetensors"
        elif change == "unlisted":
            del index["weight_map"]["w1"]
        else:
            index["weight_map"]["w9"] = index["weight_map"]["w0"]
        (shards / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CorruptCheckpointError) as caught:
            read(shards)
        assert caught.value.name in {"elsewhere": {"w2", "w3"}, "unlisted": {"w1"}, "absent": {"w9"}}[change]

    def test_tensor_in_two_shards_is_refused(self, shards: Path) -> None:
        first, second = sorted(shards.glob("*.safetensors"))
        second.write_bytes(first.read_bytes())
        with pytest.raises(CorruptCheckpointError):
            read(shards)

    def test_directory_of_several_files_without_an_index_is_not_a_checkpoint(self, shards: Path) -> None:
        (shards / "model.safetensors.index.json").unlink()
        assert not FORMAT.recognises(shards)
        with pytest.raises(NotACheckpointError):
            read(shards)

    def test_directory_with_other_files_is_not_replaced(self, shards: Path) -> None:
        (shards / "tokenizer.json").write_text("{}")
        with pytest.raises(DestinationExistsError):
            save({"w": noise("int8", 3)}, shards, overwrite=True)
        assert (shards / "tokenizer.json").exists()


class TestSettings:
    def test_shard_size_is_refused_for_a_single_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="directory"):
            save({}, tmp_path / "x.safetensors", options=SafetensorsOptions(shard_bytes=100))

    @pytest.mark.parametrize("size", [0, -1, "many"])
    def test_invalid_shard_size_is_refused(self, tmp_path: Path, size: Any) -> None:
        with pytest.raises(UsageError):
            save({}, tmp_path / "x", options=SafetensorsOptions(shard_bytes=size))

    @pytest.mark.parametrize("metadata", [{"a": 1}, {"a": {"b": "c"}}, {"a": None}, {"tensorkeep": "x"}])
    def test_metadata_other_than_strings_is_refused(self, tmp_path: Path, metadata: dict[str, Any]) -> None:
        with pytest.raises(UnsupportedError):
            save({}, tmp_path / "x.safetensors", metadata=metadata)
        assert list(tmp_path.iterdir()) == []


class TestCoded:
    def test_data_file_of_the_native_format_opens_alone(self, tmp_path: Path) -> None:
        weights = (torch.randn(300, 200) * 0.02).to(torch.bfloat16)
        state = {"model": {"w": weights, "c": noise("complex128", 3)}, "step": 1}
        native.FORMAT.write(flatten(state), tmp_path / "step", WriteSettings(compression="lossless"))
        file = tmp_path / "step" / "model.tensorkeep"
        assert not FORMAT.recognises(tmp_path / "step")
        assert difference(dict(sorted(state["model"].items())), dict(sorted(read(file).items()))) is None
        with FORMAT.open(file, OpenSettings()) as reader:
            assert reader.entries["w"].stored_bytes < weights.nbytes
            assert "planes" in reader.entries["w"].codec

    def test_dtype_that_safetensors_lacks_is_stored_as_bytes(self, tmp_path: Path) -> None:
        save({"c": noise("complex128", 3, 2)}, tmp_path / "x.safetensors")
        assert safetensors.torch.load_file(tmp_path / "x.safetensors")["c"].dtype == torch.uint8
        assert same(read(tmp_path / "x.safetensors")["c"], noise("complex128", 3, 2))
