"""Fragments that are damaged, forged or do not fit together: each is refused, and the error names what is wrong."""

import copy
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tensorkeep
from simulated_ranks import box, save_by_ranks
from tensorkeep.errors import CorruptCheckpointError, TensorkeepError, UnsupportedError
from tensorkeep.formats import checksummed_json
from tensorkeep.testing.cases import case

STATE = {"w": torch.arange(24.0).reshape(6, 4), "b": torch.arange(7), "scalar": torch.tensor(1.0), "e": torch.empty(0)}
GRID = 32
"""Two rows of ``w``."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "c"
    save_by_ranks(path, STATE, 2, grid_bytes=GRID)
    return path


class Forgery:
    """A copy of a checkpoint whose manifest and fragments can be changed; `write` makes all checksums right again."""

    def __init__(self, original: Path, path: Path) -> None:
        shutil.copytree(original, path)
        self.path = path
        self.root = self._body("manifest.json")
        self.fragments = [self._body(record["name"]) for record in self.root["fragments"]]
        self.first_fragment, self.first_file = self.fragments[0], self.fragments[0]["files"][0]
        self.first_box = self.box(0, "w")
        self.first_block = self.first_box[5][0]
        self.first_leaf, self.first_record = self.root["leaves"][0], self.root["fragments"][0]

    def _body(self, name: str) -> Any:
        return json.loads((self.path / name).read_text())["body"]

    def box(self, rank: int, name: str) -> list[Any]:
        """Return the first box of a tensor in a fragment."""
        leaves = self.fragments[rank]["leaves"]
        return next(box for box in self.fragments[rank]["boxes"] if leaves[box[0]] == name)

    def write(self) -> Path:
        for rank, fragment in enumerate(self.fragments):
            name, content = f"rank-{rank:05d}.json", checksummed_json.seal(fragment)
            (self.path / name).write_bytes(content)
            for record in self.root["fragments"]:
                if record["name"] == name:
                    record |= {"bytes": len(content), "digest": checksummed_json.digest(content, wide=True)}
        (self.path / "manifest.json").write_bytes(checksummed_json.seal(self.root))
        return self.path


@pytest.fixture
def forgery(original: Path, tmp_path: Path) -> Forgery:
    return Forgery(original, tmp_path / "forged")


def refused(path: Path) -> TensorkeepError:
    """Return the error that opening raises, which `verify` reports as well."""
    with pytest.raises((CorruptCheckpointError, UnsupportedError)) as caught:
        tensorkeep.load(path)
    if isinstance(caught.value, CorruptCheckpointError):
        assert not tensorkeep.verify(path).ok
    return caught.value


def test_a_rewritten_checkpoint_is_still_valid(forgery: Forgery) -> None:
    assert torch.equal(tensorkeep.load(forgery.write())["w"], STATE["w"])


Change = Callable[[Forgery], object]


def drop_box(forged: Forgery) -> None:
    """Rank 1 has no part of ``w``; the file that held it is not read for it."""
    fragment = forged.fragments[1]
    del fragment["boxes"][fragment["boxes"].index(forged.box(1, "w"))]
    fragment["files"][0] |= {"origin": "elsewhere"}
    fragment["features"] = ["places"]


def add_box_of_empty(forged: Forgery) -> None:
    forged.fragments[0]["leaves"].append("e")
    forged.fragments[0]["boxes"].append([3, [0], [1], 0, 0, [], []])


def put(where: str, key: Any, value: Any) -> Change:
    """Return a change of a part of a forgery: an attribute of it, and a key there."""
    return lambda forged: getattr(forged, where).__setitem__(key, value)


def change(field: str, value: Any) -> Change:
    return put("first_fragment", field, value)


def move(offsets: list[int], sizes: list[int] | None = None) -> Change:
    def apply(forged: Forgery) -> None:
        box = forged.box(1, "w")
        box[1], box[2] = offsets, sizes or box[2]

    return apply


ELSEWHERE = "where rank-00000.json belongs"
CASES: dict[str, tuple[Change, str]] = {
    "two fragments are swapped": (
        lambda forged: forged.fragments.reverse(),
        r"rank-00000\.json: is the fragment of rank 1, not of rank 0",
    ),
    "of another save": (change("save", "0" * 16), r"rank-00000\.json: is a fragment of another save"),
    "of another number of ranks": (change("ranks", 3), "was written by one of 3 ranks, not of 2"),
    "of another rank": (change("rank", 1), "is the fragment of rank 1, not of rank 0"),
    "of another format": (change("format", "tensorkeep"), "is not a fragment"),
    "of a later version": (change("version", 2), "version 2 of fragments"),
    "of a later feature": (change("features", ["new"]), r"features \['new'\] of fragments"),
    "a fragment of other types": (change("boxes", "none"), "is not a fragment"),
    "a grid of no bytes": (change("grid_bytes", 0), "is not a fragment"),
    "another grid": (change("grid_bytes", 16), "bytes are not 1 blocks"),
    "a tensor that the manifest lacks": (change("leaves", ["w", "b", "other"]), "'other': has boxes here, but"),
    "a tensor twice in the table": (change("leaves", ["w", "w", "b"]), "the leaf 'w' occurs twice"),
    "a box of no tensor": (put("first_box", 0, 9), "a box of tensor 9, which is not listed"),
    "a missing box": (drop_box, r"'w': no rank has its element \[3, 0\]"),
    "boxes of two ranks in one place": (move([1, 0]), r"'w': more than one box has its element \[1, 0\]: ranks 0, 1"),
    "a box of other cuts": (move([2, 0]), r"rank-00001\.json: tensor 'w' block 0: 32 bytes cannot be stored in 16"),
    "a box outside of its tensor": (move([4, 0]), r"cannot have a box of \[3, 4\] at \[4, 0\]: its shape is \[6, 4\]"),
    "a box of other dimensions": (move([3], [3]), r"cannot have a box of \[3\] at \[3\]"),
    "a box of no elements": (move([3, 0], [3, 0]), r"cannot have a box of \[3, 0\]"),
    "a box of negative size": (move([3, 0], [3, -1]), "is not a fragment"),
    "a box of an empty tensor": (add_box_of_empty, r"'e': cannot have a box of \[1\] at \[0\]"),
    "a block too few": (lambda forged: forged.first_box[5].pop(), "48 bytes are not 1 blocks"),
    "a block of impossible length": (put("first_block", 1, 31), "32 bytes cannot be stored in 31"),
    "a block without a checksum": (put("first_block", 2, ""), "has no checksum"),
    "a box in no file": (put("first_box", 3, 5), "is in file 5, which is not listed"),
    "a box at another place of the file": (put("first_box", 4, 4097), "its bytes begin at"),
    "a file of two ranks": (
        lambda forged: forged.fragments[1].update(files=copy.deepcopy(forged.fragments[0]["files"])),
        r"lists the file model-rank-00000\.safetensors, which rank-00000\.json lists as well",
    ),
    "a fragment as a data file": (
        put("first_file", "name", "rank-00001.json"),
        r"lists rank-00001\.json as a data file",
    ),
    "the manifest as a data file": (put("first_file", "name", "MANIFEST.json"), "as a data file"),
    "a path as a data file": (put("first_file", "name", "../x"), "is not a fragment"),
    "fewer ranks in the manifest": (put("root", "ranks", 1), "lists 2 fragments for 1 ranks"),
    "no ranks in the manifest": (lambda forged: forged.root.update(ranks=0, fragments=[]), "is not a manifest"),
    "fragments in another order": (lambda forged: forged.root["fragments"].reverse(), ELSEWHERE),
    "one fragment twice": (
        lambda forged: forged.root["fragments"].__setitem__(1, dict(forged.first_record)),
        r"lists the fragment 'rank-00000\.json' where rank-00001\.json belongs",
    ),
    "a path as a fragment": (put("first_record", "name", "../rank-00000.json"), ELSEWHERE),
    "data files in the manifest": (
        lambda forged: forged.root.update(files=forged.fragments[0]["files"]),
        "is not a manifest",
    ),
    "a tensor twice in the manifest": (lambda forged: forged.root["leaves"].append(forged.first_leaf), "occurs twice"),
    "a tensor of another shape": (put("first_leaf", "shape", [6, 5]), r"'w': no rank has its element|are not 2 blocks"),
    "an unknown dtype": (put("first_leaf", "dtype", "float3"), "dtype 'float3'"),
    "no feature": (put("root", "features", []), "is not a manifest"),
    "a later feature": (lambda forged: forged.root["features"].append("later"), r"features \['later'\]"),
}


def test_a_broken_rule_is_refused_by_name(original: Path, tmp_path: Path) -> None:
    for label, (forge, message) in CASES.items():
        forgery = Forgery(original, tmp_path / label)
        forge(forgery)
        with case(label):
            error = refused(forgery.write())
            assert re.search(message, str(error)), str(error)


def test_a_missing_fragment_one_of_another_save_and_a_link_are_refused(forgery: Forgery, tmp_path: Path) -> None:
    (forgery.path / "rank-00001.json").unlink()
    assert re.search(r"rank-00001\.json.*missing", str(refused(forgery.path)))
    save_by_ranks(tmp_path / "other", STATE, 2, grid_bytes=GRID)
    shutil.copy(tmp_path / "other" / "rank-00001.json", forgery.path / "rank-00001.json")
    assert "rank-00001.json: is not the fragment that the manifest lists" in str(refused(forgery.path))
    (forgery.path / "rank-00001.json").rename(tmp_path / "outside.json")
    (forgery.path / "rank-00001.json").symlink_to(tmp_path / "outside.json")
    assert "symbolic link" in str(refused(forgery.path))


def test_a_tensor_cut_along_too_many_dimensions_is_refused(tmp_path: Path) -> None:
    def split(leaf: Any) -> list[Any]:
        return [[box(leaf, (0,) * 9, (1,) * 9)]]

    with pytest.raises(UnsupportedError, match="cut along 9 dimensions"):
        save_by_ranks(tmp_path / "c", {"w": torch.zeros((2,) * 9)}, 1, split)
    assert list(tmp_path.iterdir()) == []


def mutated(random: Random, value: Any, depth: int = 0) -> Any:
    """Return a JSON value with one random change somewhere in it."""
    if isinstance(value, dict) and value and depth < 6:
        key = random.choice(list(value))
        if random.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutated(random, value[key], depth + 1)}
    if isinstance(value, list) and value and depth < 6:
        place = random.randrange(len(value))
        if random.random() < 0.2:
            return value[:place] + value[place + 1 :]
        if random.random() < 0.1:
            return [*value, value[place]]
        return [*value[:place], mutated(random, value[place], depth + 1), *value[place + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool):
        return random.choice([value + 1, value - 1, 2**63, 2**40, -1, "1", None, value * 2])
    return random.choice([None, -1, "", "x", [], {}, 1e300])


@given(seed=st.integers(0, 2**32))
def test_random_changes_never_load_other_values(original: Path, seed: int) -> None:
    random = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        forgery = Forgery(original, Path(folder) / "forged")
        rank = random.randrange(3)
        if rank < 2:
            forgery.fragments[rank] = mutated(random, forgery.fragments[rank])
        else:
            kept = {"fragments": forgery.root.pop("fragments")}
            forgery.root = mutated(random, forgery.root) | kept
        try:
            loaded = tensorkeep.load(forgery.write())
        except TensorkeepError as error:
            assert error.path is not None
            return
    for name, tensor in STATE.items():
        if isinstance(loaded, dict) and name in loaded and loaded[name].dtype == tensor.dtype:
            assert torch.equal(loaded[name].reshape(-1), tensor.reshape(-1))
