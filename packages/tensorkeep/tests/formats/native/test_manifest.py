"""Manifests that are read more than once."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.storage.local import LocalDirectory
from tensorkeep.testing.cases import case


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    tensorkeep.save({"w": torch.ones(3)}, path, metadata={"tags": ["first"]})
    return path


def read(path: Path) -> Any:
    with LocalDirectory(path) as directory:
        return manifests.read(directory)


def change(path: Path, **fields: Any) -> None:
    with LocalDirectory(path) as directory:
        body = checksummed_json.read(directory, manifests.FILE_NAME)
    (path / manifests.FILE_NAME).write_bytes(checksummed_json.seal({**body, **fields}))


def test_the_outline_of_a_manifest_is_read_without_its_blocks(saved: Path) -> None:
    with LocalDirectory(saved) as directory:
        whole, outline = manifests.read(directory), manifests.read_outline(directory)
    assert (outline.files, outline.step, outline.state_bytes) == (whole.files, whole.step, 12)
    change(saved, leaves=[{"dtype": "float32", "shape": [3], "blocks": "damaged"}])
    with LocalDirectory(saved) as directory:
        assert manifests.read_outline(directory) == outline


def test_the_outline_of_a_later_or_damaged_manifest_is_refused(saved: Path) -> None:
    original = (saved / manifests.FILE_NAME).read_bytes()
    for fields, error, message in (
        ({"version": 2, "files": "of another kind"}, UnsupportedError, "version 2"),
        ({"features": ["later"]}, UnsupportedError, "later"),
        ({"leaves": [{"dtype": "float3", "shape": [1]}]}, UnsupportedError, "dtype 'float3'"),
        ({"leaves": [{"dtype": "int8", "shape": [-1]}]}, CorruptCheckpointError, "is not a manifest"),
        ({"files": [{"name": "../x", "bytes": 1, "head_bytes": 1, "head": ""}]}, CorruptCheckpointError, "regex"),
        ({"format": "other"}, CorruptCheckpointError, "not the manifest of a Tensorkeep checkpoint"),
    ):
        (saved / manifests.FILE_NAME).write_bytes(original)
        change(saved, **fields)
        with case(fields), LocalDirectory(saved) as directory, pytest.raises(error, match=message):
            manifests.read_outline(directory)


def test_a_changed_manifest_is_read_again_and_without_the_changes_of_a_reader(saved: Path) -> None:
    read(saved)
    change(saved, metadata={"tags": ["second"]})
    assert read(saved).metadata == {"tags": ["second"]}
    with tensorkeep.open(saved) as checkpoint:
        checkpoint.metadata["tags"].append("mine")
    assert read(saved).metadata == {"tags": ["second"]}


def test_an_invalid_manifest_is_refused_each_time_with_its_path(saved: Path, tmp_path: Path) -> None:
    change(saved, block_bytes=7)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / manifests.FILE_NAME).write_bytes((saved / manifests.FILE_NAME).read_bytes())
    for path in (saved, saved, tmp_path / "copy"):
        with pytest.raises(CorruptCheckpointError, match="block_bytes") as caught:
            read(path)
        assert caught.value.path == str(path / manifests.FILE_NAME)


@pytest.mark.parametrize("depth", [100, 300, 450, 600, 900])
def test_metadata_of_any_depth_that_is_saved_is_loaded(tmp_path: Path, depth: int) -> None:
    nested: Any = "end"
    for _ in range(depth):
        nested = [nested]
    try:
        tensorkeep.save({"w": torch.ones(3)}, tmp_path / "deep", metadata={"x": nested})
    except tensorkeep.UsageError:
        assert not (tmp_path / "deep").exists()
        return
    with tensorkeep.open(tmp_path / "deep") as checkpoint:
        assert checkpoint.metadata == {"x": nested}
