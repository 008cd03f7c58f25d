"""The `tensorkeep` entry in the metadata of a safetensors file: valid notes are read, invalid ones refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorkeep.errors import CorruptCheckpointError, TensorkeepError, UnsupportedError
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.safetensors import FORMAT
from tensorkeep.formats.safetensors.writer import SafetensorsOptions
from tensorkeep.formats.write import WriteSettings
from tensorkeep.io.source_file import SourceFile
from tensorkeep.state.tree import flatten
from tensorkeep.testing.equality import leaf_bytes
from tensorkeep.testing.format_states import load, noise, training_state


def save(state: Any, path: Path, **settings: Any) -> None:
    FORMAT.write(flatten(state), path, WriteSettings(threads=2, **settings))


def read(path: Path) -> Any:
    with FORMAT.open(path, OpenSettings()) as reader:
        return load(reader)


def raw(path: Path, header: dict[str, Any], data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


NOTE = {
    "version": 1,
    "block_bytes": 16,
    "tensors": {"w": {"dtype": "float64", "shape": [3], "blocks": [["raw", 16], ["raw", 8]]}},
}
STRUCTURE = {
    "skeleton": {"dict": {"a": {"tensor": "w"}, "b": {"tensor": "v"}}},
    "aliases": {"v": {"of": "w", "offset": 0, "shape": [2], "strides": [1], "part": "model"}},
    "parts": {"w": ["model", "w"], "v": ["model", "v"]},
}


def changed(base: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(base))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return copy


class TestUntrustedNotes:
    def write(self, path: Path, note: Any, tag: str = "U8", shape: Any = (24,)) -> Path:
        text = note if isinstance(note, str) else json.dumps(note)
        header = {"__metadata__": {"tensorkeep": text}, "w": {"dtype": tag, "shape": shape, "data_offsets": [0, 24]}}
        return raw(path / "x.safetensors", header, bytes(range(24)))

    def test_valid_notes_are_read(self, tmp_path: Path) -> None:
        assert leaf_bytes(read(self.write(tmp_path, NOTE))["w"]) == bytes(range(24))
        note = {**NOTE, "structure": STRUCTURE}
        found = read(self.write(tmp_path, note))
        assert list(found) == ["a", "b"]
        assert found["b"].untyped_storage().data_ptr() == found["a"].untyped_storage().data_ptr()

    @pytest.mark.parametrize(
        "note",
        [
            "",
            "[]",
            "{",
            "[" * 100_000,
            {},
            changed(NOTE, "version", to="1"),
            changed(NOTE, "block_bytes", to=0),
            changed(NOTE, "block_bytes", to=-16),
            changed(NOTE, "block_bytes", to=2**63),
            changed(NOTE, "block_bytes", to=20),
            changed(NOTE, "tensors", to={"other": NOTE["tensors"]["w"]}),  # type: ignore[index]
            changed(NOTE, "tensors", "w", "shape", to=[4]),
            changed(NOTE, "tensors", "w", "shape", to=[-3]),
            changed(NOTE, "tensors", "w", "shape", to=[1] * 65 + [3]),
            changed(NOTE, "tensors", "w", "shape", to=[2**62, 2**62]),
            changed(NOTE, "tensors", "w", "blocks", to=[["raw", 24]]),
            changed(NOTE, "tensors", "w", "blocks", to=[["raw", 32], ["raw", -8]]),
            changed(NOTE, "tensors", "w", "blocks", to=[["raw", 0], ["raw", 24]]),
            changed(NOTE, "tensors", "w", "blocks", to=[["raw", 8], ["raw", 16]]),
            changed(NOTE, "tensors", "w", "blocks", to=[["zstd", 16], ["raw", 8]]),
            changed(NOTE, "tensors", "w", "blocks", to=[["planes", 16], ["raw", 8]]),
        ],
        ids=lambda note: str(note)[:100],
    )
    def test_invalid_notes_are_refused(self, tmp_path: Path, note: Any) -> None:
        with pytest.raises(CorruptCheckpointError):
            read(self.write(tmp_path, note))

    def test_note_about_a_tensor_other_than_a_byte_vector_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CorruptCheckpointError):
            read(self.write(tmp_path, NOTE, tag="F32", shape=(6,)))

    @pytest.mark.parametrize(
        "note",
        [
            changed(NOTE, "version", to=4),
            changed(NOTE, "tensors", "w", "dtype", to="float7"),
            changed(NOTE, "tensors", "w", "blocks", to=[["no-such-codec", 16], ["raw", 8]]),
        ],
        ids=["version", "dtype", "codec"],
    )
    def test_notes_of_later_versions_are_unsupported(self, tmp_path: Path, note: Any) -> None:
        with pytest.raises(UnsupportedError):
            read(self.write(tmp_path, note))

    @pytest.mark.parametrize(
        "structure",
        [
            7,
            {},
            changed(STRUCTURE, "skeleton", to={}),
            changed(STRUCTURE, "skeleton", to={"pickle": "x"}),
            changed(STRUCTURE, "skeleton", to={"dict": {"a": {"tensor": "w"}}}),
            changed(STRUCTURE, "skeleton", "dict", "a", to={"tensor": "other"}),
            changed(STRUCTURE, "skeleton", "dict", "c", to={"tensor": "w"}),
            changed(STRUCTURE, "aliases", to={}),
            changed(STRUCTURE, "aliases", "v", "of", to="other"),
            changed(STRUCTURE, "aliases", "v", "of", to="v"),
            changed(STRUCTURE, "aliases", "v", "offset", to=2),
            changed(STRUCTURE, "aliases", "v", "offset", to=-1),
            changed(STRUCTURE, "aliases", "v", "shape", to=[2**62]),
            changed(STRUCTURE, "aliases", "v", "strides", to=[2**40]),
            changed(STRUCTURE, "aliases", "v", "strides", to=[1, 1]),
            changed(STRUCTURE, "aliases", "w", to=STRUCTURE["aliases"]["v"]),  # type: ignore[index]
            changed(STRUCTURE, "parts", to={}),
            changed(STRUCTURE, "parts", "v", to=["model", "w"]),
            changed(STRUCTURE, "parts", "v", to=["model", "__metadata__"]),
            changed(STRUCTURE, "parts", "v", to=["", "v"]),
            changed(STRUCTURE, "parts", "v", to=["model", ""]),
            changed(STRUCTURE, "parts", "v", to=["model"]),
            changed(STRUCTURE, "skeleton", "dict", "b", to={"ndarray": "v"}),
            changed(STRUCTURE, "skeleton", "dict", "a", to={"npscalar": "w"}),
            {
                **changed(STRUCTURE, "aliases", "v", "strides", to=[-1]),
                "aliases": {"v": {**STRUCTURE["aliases"]["v"], "strides": [-1], "offset": 2}},  # type: ignore[index]
            },
        ],
        ids=lambda structure: str(structure)[-100:],
    )
    def test_invalid_structures_are_refused(self, tmp_path: Path, structure: Any) -> None:
        with pytest.raises(CorruptCheckpointError):
            read(self.write(tmp_path, {**NOTE, "structure": structure}))

    def test_structure_in_a_second_file_is_refused(self, tmp_path: Path) -> None:
        save(
            {"a": {"x": noise("float32", 10), "y": noise("float32", 10)}},
            tmp_path / "m",
            options=SafetensorsOptions(shard_bytes=40),
        )
        first, second = sorted((tmp_path / "m").glob("*.safetensors"))
        length = int.from_bytes(first.read_bytes()[:8], "little")
        header = json.loads(first.read_bytes()[8 : 8 + length])
        other = json.loads(second.read_bytes()[8 : 8 + int.from_bytes(second.read_bytes()[:8], "little")])
        raw(second, {**other, "__metadata__": header["__metadata__"]}, bytes(40))
        with pytest.raises(CorruptCheckpointError, match="second file"):
            read(tmp_path / "m")


@pytest.mark.parametrize("shape", [[2**63, 0], [2**40, 2**40, 0]])
def test_empty_tensor_of_an_impossible_shape_is_refused(tmp_path: Path, shape: list[int]) -> None:
    entry = {"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
    with pytest.raises(CorruptCheckpointError, match="impossible shape"):
        read(raw(tmp_path / "x.safetensors", entry))


def test_random_damage_raises_only_tensorkeep_errors(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    save(training_state(), tmp_path / "x.safetensors", compression="lossless")
    whole = (tmp_path / "x.safetensors").read_bytes()
    with SourceFile(tmp_path / "x.safetensors") as file:
        header_bytes = int.from_bytes(file.read(0, 8), "little")
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for place in random.integers(0, header_bytes, random.integers(1, 4)):
            damaged[place] = random.integers(256)
        (tmp_path / "x.safetensors").write_bytes(damaged)
        try:
            read(tmp_path / "x.safetensors")
        except TensorkeepError:
            refused += 1
    # Most of the damage is detected, which shows that the checks were reached.
    assert refused > 150
