"""References to objects of other checkpoints: which names are valid, and where they are refused."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import tensorkeep
from faults.test_hostile_manifests import body_of, seal
from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.manifest import FileRecord
from tensorkeep.paths import StorePath
from tensorkeep.storage.object_store import StoreDirectory
from tensorkeep.testing.cases import case

PATH = StorePath("s3://bucket/run/step-000002/manifest.json")


@pytest.fixture
def body(tmp_path: Path) -> dict[str, Any]:
    """Return the manifest of an incremental step, as it would be in a store."""
    state = {f"w{number}": torch.full((3000,), float(number)) for number in range(4)}
    tensorkeep.save(state, tmp_path / "step-000001", incremental=True)
    tensorkeep.save({**state, "w0": torch.zeros(3000)}, tmp_path / "step-000002", base=tmp_path / "step-000001")
    found = body_of(tmp_path / "step-000002")
    found["features"].append("references")
    shared = next(file for file in found["files"] if file.get("origin"))
    shared["name"] = "../step-000001/model-0123456789abcdef.safetensors"
    return found


def parse(body: dict[str, Any], path: Path = PATH) -> Any:
    return manifests.parse(checksummed_json.seal(body), path)


def shared_file(body: dict[str, Any]) -> dict[str, Any]:
    return next(file for file in body["files"] if file["name"].startswith("../"))


def test_a_reference_is_the_path_beside_and_no_other(body: dict[str, Any]) -> None:
    assert shared_file(body)["name"] in [file.name for file in parse(body).files]
    directory = StoreDirectory(PATH.parent)
    for name in ("step-000001/x", "step-000002/x"):
        assert str(directory.path_of(f"../{name}")) == f"s3://bucket/run/{name}"
    assert str(directory.path_of("x")) == "s3://bucket/run/step-000002/x"
    beside = ["../.hidden/x", *(f"../step-000001/{name}" for name in (".hidden", "", "manifest.json", "a\n"))]
    above = [f"../{folder}model.safetensors" for folder in ("", "../", "../run/", "a/../")]
    others = ["../a/b/x", "..//x", "./../a/x", "/a/x", "a/x", "..", ""]
    for name in (*beside, *above, *others):
        with case(name), pytest.raises(msgspec.ValidationError):
            msgspec.convert({"name": name, "bytes": 1, "head_bytes": 0, "head": "", "origin": "a"}, FileRecord)


def test_a_reference_needs_its_feature_and_an_origin_and_stays_in_the_bucket(body: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"is of another checkpoint, which needs the feature 'references'"):
        parse({**body, "features": ["wide-digests", "places"]})
    with pytest.raises(CorruptCheckpointError, match="outside of the bucket"):
        parse(body, StorePath("s3://bucket/manifest.json"))
    del shared_file(body)["origin"]
    with pytest.raises(CorruptCheckpointError, match="does not name that as its origin"):
        parse(body)


def test_references_are_refused_on_a_disk(body: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "step-000002"
    seal(body, path)
    for read in (tensorkeep.load, tensorkeep.info, tensorkeep.verify, tensorkeep.open):
        with pytest.raises(UnsupportedError, match=r"(?s)read from an object store only.*tensorkeep convert"):
            read(path)
    with tensorkeep.CheckpointManager(tmp_path) as manager:
        assert [step.number for step in manager.steps()] == [1]
        assert isinstance(manager.listing().broken[2], UnsupportedError)
