"""The `tensorkeep` entry in the metadata of a safetensors file: valid notes are read, invalid ones refused."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.safetensors.files import raw, read, save
from tensorkeep.errors import CorruptCheckpointError, TensorkeepError, UnsupportedError
from tensorkeep.formats.safetensors import SafetensorsOptions
from tensorkeep.storage.local import LocalFile
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import leaf_bytes
from tensorkeep.testing.format_suite import noise, training_state

NOTE = {
    "version": 1,
    "block_bytes": 16,
    "tensors": {"w": {"dtype": "float64", "shape": [3], "blocks": [["raw", 16], ["raw", 8]]}},
}
W = ("tensors", "w")
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


def with_note(path: Path, note: Any, tag: str = "U8", shape: Any = (24,)) -> Path:
    text = note if isinstance(note, str) else json.dumps(note)
    header = {"__metadata__": {"tensorkeep": text}, "w": {"dtype": tag, "shape": shape, "data_offsets": [0, 24]}}
    return raw(path / "x.safetensors", header, bytes(range(24)))


def refuses(folder: Path, notes: Iterable[Any], error: type[Exception] = CorruptCheckpointError) -> None:
    for note in notes:
        with case(str(note)[-100:]), pytest.raises(error):
            read(with_note(folder, note))


def test_valid_notes_are_read(tmp_path: Path) -> None:
    assert leaf_bytes(read(with_note(tmp_path, NOTE))["w"]) == bytes(range(24))
    found = read(with_note(tmp_path, {**NOTE, "structure": STRUCTURE}))
    assert list(found) == ["a", "b"]
    assert found["b"].untyped_storage().data_ptr() == found["a"].untyped_storage().data_ptr()


def test_invalid_notes_impossible_shapes_and_later_versions_are_refused(tmp_path: Path) -> None:
    raw_blocks = [[24], [32, -8], [0, 24], [8, 16]]
    blocks = [[["raw", length] for length in lengths] for lengths in raw_blocks]
    blocks += [[[codec, 16], ["raw", 8]] for codec in ("zstd", "planes")]
    refuses(
        tmp_path,
        [
            *("", "[]", "{", "[" * 100_000, {}),
            changed(NOTE, "version", to="1"),
            *(changed(NOTE, "block_bytes", to=size) for size in (0, -16, 2**63, 20)),
            changed(NOTE, "tensors", to={"other": NOTE["tensors"]["w"]}),  # type: ignore[index]
            *(changed(NOTE, *W, "shape", to=shape) for shape in ([4], [-3], [1] * 65 + [3], [2**62, 2**62])),
            *(changed(NOTE, *W, "blocks", to=each) for each in blocks),
        ],
    )
    # A note about a tensor other than a vector of bytes.
    with pytest.raises(CorruptCheckpointError):
        read(with_note(tmp_path, NOTE, tag="F32", shape=(6,)))
    # An empty tensor without a note.
    for shape in ([2**63, 0], [2**40, 2**40, 0]):
        entry = {"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
        with case(shape), pytest.raises(CorruptCheckpointError, match="impossible shape"):
            read(raw(tmp_path / "x.safetensors", entry))
    later = [
        changed(NOTE, "version", to=4),
        changed(NOTE, *W, "dtype", to="float7"),
        changed(NOTE, *W, "blocks", to=[["no-such-codec", 16], ["raw", 8]]),
    ]
    refuses(tmp_path, later, UnsupportedError)


def test_invalid_structures_are_refused(tmp_path: Path) -> None:
    skeletons = [{}, {"pickle": "x"}, {"dict": {"a": {"tensor": "w"}}}]
    aliases = {"of": ["other", "v"], "offset": [2, -1], "shape": [[2**62]], "strides": [[2**40], [1, 1]]}
    parts = [["model", "w"], ["model", "__metadata__"], ["", "v"], ["model", ""], ["model"]]
    structures = [
        *(7, {}),
        *(changed(STRUCTURE, "skeleton", to=skeleton) for skeleton in skeletons),
        changed(STRUCTURE, "skeleton", "dict", "a", to={"tensor": "other"}),
        changed(STRUCTURE, "skeleton", "dict", "c", to={"tensor": "w"}),
        changed(STRUCTURE, "skeleton", "dict", "b", to={"ndarray": "v"}),
        changed(STRUCTURE, "skeleton", "dict", "a", to={"npscalar": "w"}),
        *(changed(STRUCTURE, "aliases", "v", key, to=value) for key, values in aliases.items() for value in values),
        changed(STRUCTURE, "aliases", to={}),
        changed(STRUCTURE, "aliases", "w", to=STRUCTURE["aliases"]["v"]),  # type: ignore[index]
        changed(STRUCTURE, "aliases", "v", to={**STRUCTURE["aliases"]["v"], "strides": [-1], "offset": 2}),  # type: ignore[index]
        changed(STRUCTURE, "parts", to={}),
        *(changed(STRUCTURE, "parts", "v", to=part) for part in parts),
    ]
    refuses(tmp_path, ({**NOTE, "structure": structure} for structure in structures))


def test_structure_in_a_second_file_is_refused(tmp_path: Path) -> None:
    state = {"a": {"x": noise("float32", 10), "y": noise("float32", 10)}}
    save(state, tmp_path / "m", options=SafetensorsOptions(shard_bytes=40))
    first, second = sorted((tmp_path / "m").glob("*.safetensors"))
    headers = []
    for file in (first, second):
        content = file.read_bytes()
        headers.append(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]))
    raw(second, {**headers[1], "__metadata__": headers[0]["__metadata__"]}, bytes(40))
    with pytest.raises(CorruptCheckpointError, match="second file"):
        read(tmp_path / "m")


def test_random_damage_raises_only_tensorkeep_errors(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    save(training_state(), tmp_path / "x.safetensors", compression="lossless")
    whole = (tmp_path / "x.safetensors").read_bytes()
    with LocalFile(tmp_path / "x.safetensors") as file:
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
