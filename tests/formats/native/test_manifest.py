"""Manifests that are read more than once."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tensorkeep
from tensorkeep.errors import CorruptCheckpointError
from tensorkeep.formats import sealed
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.io.directory import Directory


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    tensorkeep.save({"w": torch.ones(3)}, path, metadata={"tags": ["first"]})
    return path


def read(path: Path) -> Any:
    with Directory(path) as directory:
        return manifests.read(directory)


def change(path: Path, **fields: Any) -> None:
    with Directory(path) as directory:
        body = sealed.read(directory, manifests.FILE_NAME)
    (path / manifests.FILE_NAME).write_bytes(sealed.seal({**body, **fields}))


def test_a_manifest_of_the_same_bytes_is_parsed_once(saved: Path) -> None:
    first = read(saved)
    with mock.patch.object(manifests, "parse", side_effect=AssertionError):
        assert read(saved) == first


def test_a_changed_manifest_is_read_again(saved: Path) -> None:
    read(saved)
    change(saved, metadata={"tags": ["second"]})
    assert read(saved).metadata == {"tags": ["second"]}


def test_an_invalid_manifest_is_refused_each_time_with_its_path(saved: Path, tmp_path: Path) -> None:
    change(saved, block_bytes=7)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / manifests.FILE_NAME).write_bytes((saved / manifests.FILE_NAME).read_bytes())
    for path in (saved, saved, tmp_path / "copy"):
        with pytest.raises(CorruptCheckpointError, match="block_bytes") as caught:
            read(path)
        assert caught.value.path == str(path / manifests.FILE_NAME)


def test_changes_to_loaded_metadata_do_not_reach_the_next_reader(saved: Path) -> None:
    with tensorkeep.open(saved) as checkpoint:
        checkpoint.metadata["tags"].append("mine")
    with tensorkeep.open(saved) as checkpoint:
        assert checkpoint.metadata == {"tags": ["first"]}


def test_a_large_manifest_is_not_cached(saved: Path) -> None:
    with mock.patch.object(manifests, "_CACHED_BYTES", 10), mock.patch.object(manifests, "parse") as parse:
        read(saved)
        read(saved)
    assert parse.call_count == 2


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
