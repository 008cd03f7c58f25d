"""Hostile manifests: the checksum is correct and the contents are false."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensorkeep
from faults.injection import bounded_memory
from tensorkeep.formats.base import MAX_BLOCK_BYTES
from tensorkeep.formats.checksummed_json import digest
from tensorkeep.formats.native.manifest import FILE_NAME
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import leaf_bytes

STATE = {"model": {"a": torch.arange(100.0), "b": torch.arange(50.0)}, "n": 5}
Body = dict[str, Any]


def seal(body: object, folder: Path) -> None:
    """Write a manifest with a correct checksum."""
    seal_text(json.dumps(body), folder)


def seal_text(text: str, folder: Path) -> None:
    rest = b',"body":' + text.encode() + b"}\n"
    (folder / FILE_NAME).write_bytes(b'{"xxh3_64":"' + digest(b'"' + rest).encode() + b'"' + rest)


def body_of(folder: Path) -> Body:
    return json.loads((folder / FILE_NAME).read_bytes())["body"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Return a checkpoint and its manifest."""
    place = tmp_path_factory.mktemp("saved") / "ckpt"
    tensorkeep.save(STATE, place)
    return place, (place / FILE_NAME).read_bytes()


@pytest.fixture
def checkpoint(saved: tuple[Path, bytes]) -> Iterator[Path]:
    """Return a checkpoint; a test may change only its manifest."""
    place, manifest = saved
    yield place
    (place / FILE_NAME).write_bytes(manifest)


def leaf(body: Body) -> dict[str, Any]:
    return body["leaves"][0]


def sets(*path: str | int, to: object) -> Callable[[Body], None]:
    def edit(body: Any) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = to

    return edit


def both(*edits: Callable[[Body], None]) -> Callable[[Body], None]:
    def edit(body: Body) -> None:
        for one in edits:
            one(body)

    return edit


def nested(depth: int) -> Any:
    node: Any = 1
    for _ in range(depth):
        node = [node]
    return node


def alias(name: str = "x", *, of: str = "model.a", offset: int = 0, shape: int = 4, stride: int = 1) -> Any:
    found = {"of": of, "offset": offset, "shape": [shape], "strides": [stride], "part": "model"}
    return sets("aliases", to={name: found})


EDITS: dict[str, Callable[[Body], None]] = {
    "absolute path": sets("files", 0, "name", to="/etc/passwd"),
    "parent path": sets("files", 0, "name", to="../model.safetensors"),
    "dots": sets("files", 0, "name", to=".."),
    "file of another folder": sets("files", 0, "name", to="../other/model.safetensors"),
    "file of two folders up": sets("files", 0, "name", to="../../other/model.safetensors"),
    "reference on a disk": both(
        sets("files", 0, "name", to="../other/model.safetensors"), sets("features", to=["references"])
    ),
    "hidden file": sets("files", 0, "name", to=".bashrc"),
    "nul in path": sets("files", 0, "name", to="model\0.safetensors"),
    "its own manifest": sets("files", 0, "name", to="manifest.json"),
    "a file twice": lambda body: body["files"].append(body["files"][0]),
    "negative file size": sets("files", 0, "bytes", to=-1),
    "head beyond the file": sets("files", 0, "head_bytes", to=10**9),
    "shape of 2^63": sets("leaves", 0, "shape", to=[2**63]),
    "shape of 2^62 x 2^62": sets("leaves", 0, "shape", to=[2**62, 2**62]),
    "negative shape": sets("leaves", 0, "shape", to=[-100]),
    "two negatives": sets("leaves", 0, "shape", to=[-10, -10]),
    "more shape than bytes": sets("leaves", 0, "shape", to=[101]),
    "less shape than bytes": sets("leaves", 0, "shape", to=[99]),
    "a thousand dimensions": sets("leaves", 0, "shape", to=[1] * 999 + [100]),
    "negative offset": sets("leaves", 0, "offset", to=-4096),
    "offset beyond the file": sets("leaves", 0, "offset", to=10**12),
    "overlap": sets("leaves", 1, "offset", to=4096),
    "hole": sets("leaves", 1, "offset", to=4096 + 404),
    "negative file": sets("leaves", 0, "file", to=-1),
    "file that is not listed": sets("leaves", 0, "file", to=7),
    "dtype as a number": sets("leaves", 0, "dtype", to=3),
    "other dtype": sets("leaves", 0, "dtype", to="float64"),
    "a leaf twice": lambda body: body["leaves"].append(copy.deepcopy(leaf(body))),
    "two leaves of one name": sets("leaves", 1, "name", to="model.a"),
    "a leaf less": lambda body: body["leaves"].pop(),
    "a leaf that the structure lacks": sets("leaves", 0, "name", to="model.z"),
    "no blocks": sets("leaves", 0, "blocks", to=[]),
    "too many blocks": lambda body: leaf(body)["blocks"].append(["raw", 0, "", ""]),
    "negative block": sets("leaves", 0, "blocks", 0, 1, to=-400),
    "huge block": sets("leaves", 0, "blocks", 0, 1, to=2**62),
    "checksum as a number": sets("leaves", 0, "blocks", 0, 2, to=5),
    "checksum of nothing": sets("leaves", 0, "blocks", 0, 2, to=""),
    "checksum of no digits": sets("leaves", 0, "blocks", 0, 2, to="x" * 16),
    "codec without a stored checksum": sets("leaves", 0, "blocks", 0, 0, to="zstd"),
    "block size 0": sets("block_bytes", to=0),
    "block size 2^62": sets("block_bytes", to=2**62),
    "odd block size": sets("block_bytes", to=7),
    "no files": sets("files", to=[]),
    "leaves as a dict": sets("leaves", to={}),
    "skeleton of a number": sets("skeleton", to={"tensor": 5}),
    "skeleton of an unknown kind": sets("skeleton", to={"exec": "import os"}),
    "deep skeleton": sets("skeleton", to=nested(900)),
    "alias of nothing": alias(of="nothing", shape=1),
    "alias out of its base": alias(offset=99, shape=2),
    "alias named as a leaf": alias("model.b", shape=1),
    "alias of another kind": both(alias(), sets("skeleton", "dict", "x", to={"ndarray": "x"})),
    "alias of negative strides": both(alias(offset=3, stride=-1), sets("skeleton", "dict", "x", to={"tensor": "x"})),
    "two leaves in one place": sets("leaves", 1, "key", to="a"),
    "a leaf and an alias in one place": both(
        alias(), sets("aliases", "x", "key", to="b"), sets("skeleton", "dict", "x", to={"tensor": "x"})
    ),
    "a key that no header may hold": sets("leaves", 0, "key", to="__metadata__"),
    "a part without a name": sets("leaves", 0, "part", to=""),
    "a parameter of integers that tracks gradients": both(
        sets("leaves", 0, "dtype", to="int32"),
        sets("skeleton", "dict", "model", "dict", "a", to={"parameter": "model.a"}),
    ),
    "a tensor of numpy's dtype": both(sets("leaves", 0, "dtype", to="uint2"), sets("leaves", 0, "shape", to=[400])),
    "a scalar of a vector": sets("skeleton", "dict", "model", "dict", "a", to={"npscalar": "model.a"}),
    "a head of a tebibyte": both(sets("files", 0, "head_bytes", to=2**40), sets("files", 0, "bytes", to=2**40 + 600)),
    "metadata as a list": sets("metadata", to=[]),
    "a file of an earlier save without the feature": sets("files", 0, "origin", to="step-000001"),
    "a step after the last calendar": sets("step", to={"number": 1, "saved_at": 1e300, "metrics": {}}),
    "a step before the first calendar": sets("step", to={"number": 1, "saved_at": -1e12, "metrics": {}}),
    "a negative step": sets("step", to={"number": -1, "saved_at": 0.0, "metrics": {}}),
    "another program's": sets("format", to="other"),
    "version as text": sets("version", to="1"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_false_contents_are_refused(checkpoint: Path, edit: Callable[[Body], None]) -> None:
    body = body_of(checkpoint)
    edit(body)
    seal(body, checkpoint)
    with pytest.raises((tensorkeep.CorruptCheckpointError, tensorkeep.UnsupportedError)) as caught:
        tensorkeep.open(checkpoint)  # seen before a tensor is read, so that verify, ls and convert see it, too
    assert caught.value.path.startswith(str(checkpoint))
    assert "Traceback" not in str(caught.value)


def test_an_empty_tensor_of_an_impossible_shape_is_refused(tmp_path: Path) -> None:
    tensorkeep.save({"w": torch.empty(0, 3)}, tmp_path / "ckpt")
    body = body_of(tmp_path / "ckpt")
    for shape in ([2**63, 0], [2**40, 2**40, 0]):
        leaf(body)["shape"] = shape
        seal(body, tmp_path / "ckpt")
        with case(shape), pytest.raises(tensorkeep.CorruptCheckpointError, match="impossible shape"):
            tensorkeep.open(tmp_path / "ckpt")


def test_other_json_is_refused(checkpoint: Path) -> None:
    others = [None, 5, [], {}, {"format": "tensorkeep", "version": 1, "features": []}]
    for text in (*map(json.dumps, others), "[" * 5000 + "]" * 5000):
        seal_text(text, checkpoint)
        with case(text), pytest.raises(tensorkeep.CorruptCheckpointError):
            tensorkeep.load(checkpoint)


def test_what_a_later_version_may_write_is_named(checkpoint: Path) -> None:
    original = body_of(checkpoint)
    for edit, message in (
        (sets("version", to=2), "install a later Tensorkeep"),
        (sets("features", to=["delta"]), "install a later Tensorkeep"),
        (sets("leaves", 0, "blocks", 0, to=["quantum", 400, "0" * 16, "0" * 16]), "quantum"),
    ):
        body = copy.deepcopy(original)
        edit(body)
        seal(body, checkpoint)
        with case(body), pytest.raises(tensorkeep.UnsupportedError, match=message):
            tensorkeep.load(checkpoint)


def test_a_sparse_file_is_hashed_in_pieces(tmp_path: Path) -> None:
    tensorkeep.save(STATE, tmp_path / "ckpt")
    body = body_of(tmp_path / "ckpt")
    size = 160 * 1024**2
    body["files"].append({"name": "x.json", "bytes": size, "head_bytes": size, "head": "0" * 16})
    seal(body, tmp_path / "ckpt")
    with (tmp_path / "ckpt" / "x.json").open("wb") as file:
        file.truncate(size)
    with bounded_memory(64 * 1024**2):
        problems = tensorkeep.verify(tmp_path / "ckpt").problems
    assert [problem.file for problem in problems] == ["x.json"]


def compressed(folder: Path, state: object) -> tuple[Body, Path]:
    """Save a state as one compressed tensor, and return the manifest and the file."""
    tensorkeep.save(state, folder, compression="zstd")
    return body_of(folder), folder / "model.tensorkeep"


def test_a_decompression_bomb_is_refused_before_decompression(tmp_path: Path) -> None:
    body, file = compressed(tmp_path / "ckpt", {"w": torch.arange(4096.0)})
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(256 * 1024**2))
    head = file.read_bytes()[: leaf(body)["offset"]]
    file.write_bytes(head + bomb)
    leaf(body)["blocks"] = [["zstd", len(bomb), "0" * 16, digest(bomb)]]
    body["files"][0]["bytes"] = len(head + bomb)
    seal(body, tmp_path / "ckpt")
    with bounded_memory(64 * 1024**2), pytest.raises(tensorkeep.CorruptCheckpointError):
        tensorkeep.load(tmp_path / "ckpt")


def test_a_state_larger_than_memory_is_refused_before_allocation(tmp_path: Path) -> None:
    body, file = compressed(tmp_path / "ckpt", {"w": torch.zeros(1024, dtype=torch.uint8)})
    body["block_bytes"] = MAX_BLOCK_BYTES
    blocks = 50_000  # of 64 MiB: 3 TB
    leaf(body)["blocks"] = [["zstd", 1, "0" * 16, "0" * 16]] * blocks
    leaf(body)["shape"] = [blocks * body["block_bytes"]]
    with file.open("r+b") as target:
        target.truncate(leaf(body)["offset"] + blocks)
    body["files"][0]["bytes"] = file.stat().st_size
    seal(body, tmp_path / "ckpt")
    with pytest.raises(tensorkeep.OutOfMemoryError, match="of memory"):
        tensorkeep.load(tmp_path / "ckpt")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a JSON document."""
    found = [path] if path else []
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in pairs:
        found += places(child, (*path, key))
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzzed_manifests_raise_a_tensorkeep_error_or_load_correctly(checkpoint: Path, data: st.DataObject) -> None:
    original = (checkpoint / FILE_NAME).read_bytes()
    body = body_of(checkpoint)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(body)))
        sets(*path, to=data.draw(json_values))(body)
    seal(body, checkpoint)
    try:
        loaded = tensorkeep.load(checkpoint, threads=1)
        # An edited manifest can rename and reshape tensors; their bytes are still the saved ones.
        saved = [leaf_bytes(tensor) for tensor in STATE["model"].values()]
        assert all(leaf_bytes(tensor) in saved for tensor in tensors_in(loaded))
    except tensorkeep.TensorkeepError:
        pass
    finally:
        (checkpoint / FILE_NAME).write_bytes(original)


def tensors_in(state: object) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for child in children for tensor in tensors_in(child)]
