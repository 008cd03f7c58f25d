"""Hostile manifests of incremental steps: correct checksum, false file offsets and bases."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from fault_cases import copy_tree
from faults.test_hostile_manifests import Body, body_of, both, seal, sets
from tensorkeep.testing.equality import same

FIRST = {"a": torch.arange(3000.0), "gone": torch.ones(700), "b": torch.linspace(0, 1, 5000)}
SECOND = {"a": FIRST["a"] * (1 + 2.0**-18), "b": FIRST["b"]}
Path_ = tuple[str | int, ...]

DIFFERENCE: Path_ = ("leaves", 0, "places", 0)
BASE: Path_ = (*DIFFERENCE, 2, 0)
LINKED: Path_ = ("leaves", 1, "places", 0)
"""The location of `a` and `b` in the manifest: fields of a file location and of a base, by index."""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step with one delta block and one block in a linked file of the previous step."""
    folder = tmp_path_factory.mktemp("steps")
    tensorkeep.save(FIRST, folder / "1", incremental=True, compression="lossless")
    tensorkeep.save(SECOND, folder / "2", base=folder / "1", delta=True, compression="lossless")
    return folder


@pytest.fixture
def step(steps: Path, tmp_path: Path) -> Path:
    """Return the second of two steps, which a test may change."""
    copy_tree(steps, tmp_path / "run")
    return tmp_path / "run" / "2"


def at(body: Body, *path: str | int) -> Any:
    node: Any = body
    for key in path:
        node = node[key]
    return node


def moves(*path: str | int, by: int) -> Callable[[Body], None]:
    return lambda body: sets(*path, to=at(body, *path) + by)(body)


def takes(*path: str | int, of: Path_) -> Callable[[Body], None]:
    return lambda body: sets(*path, to=at(body, *of))(body)


EDITS: dict[str, Callable[[Body], None]] = {
    "a place in a file that is not listed": sets(*DIFFERENCE, 0, to=2),
    "a place in a negative file": sets(*LINKED, 0, to=-1),
    "a place in the header": sets(*DIFFERENCE, 1, to=8),
    "a place at a negative offset": sets(*DIFFERENCE, 1, to=-4096),
    "a place beyond the file": sets(*LINKED, 1, to=10**12),
    "a place past the end of the file": moves(*LINKED, 1, by=4096),
    "a place that leaves a hole in a file of its own": moves(*DIFFERENCE, 1, by=16),
    "a place in the other file": takes(*DIFFERENCE, 0, of=(*LINKED, 0)),
    "two blocks in one place": takes(*LINKED, 1, of=(*BASE, 5)),
    "a place too many": lambda body: at(body, "leaves", 0, "places").append(at(body, *DIFFERENCE)),
    "a place as text": sets(*DIFFERENCE, to="0"),
    "a negative age": sets(*DIFFERENCE, 3, to=-1),
    "a base in a file that is not listed": sets(*BASE, 4, to=2),
    "a base in a negative file": sets(*BASE, 4, to=-1),
    "a base in the header": sets(*BASE, 5, to=8),
    "a base at a negative offset": sets(*BASE, 5, to=-1),
    "a base beyond the file": sets(*BASE, 5, to=2**62),
    "a base in the place of another block": takes(*BASE, 5, of=(*LINKED, 1)),
    "a base in the place of its own difference": both(
        takes(*BASE, 4, of=(*DIFFERENCE, 0)), takes(*BASE, 5, of=(*DIFFERENCE, 1))
    ),
    "a base longer than any": sets(*BASE, 1, to=2**40),
    "a base of no bytes": sets(*BASE, 1, to=0),
    "a base without a checksum": sets(*BASE, 2, to=""),
    "a coded base without a checksum of its stored bytes": sets(*BASE, 3, to=""),
    "nine bases": lambda body: sets(*DIFFERENCE, 2, to=at(body, *DIFFERENCE, 2) * 9)(body),
    "a difference without its base": sets(*DIFFERENCE, 2, to=[]),
    "places without the feature": sets("features", to=["wide-digests"]),
    "a linked file as one of its own": sets("files", 1, "origin", to=""),
    "a link out of the directory": sets("files", 1, "name", to="../1/model.tensorkeep"),
    "two files that differ in case only": lambda body: sets(
        "files", 1, "name", to=at(body, "files", 0, "name").upper()
    )(body),
}


@pytest.mark.parametrize("name", EDITS)
def test_false_locations_are_refused_and_do_not_damage_later_saves(step: Path, name: str) -> None:
    body = body_of(step)
    assert at(body, *BASE)[0] == "planes"
    assert at(body, *LINKED)[0] == 1
    EDITS[name](body)
    seal(body, step)
    with pytest.raises(tensorkeep.CorruptCheckpointError) as caught:
        (tensorkeep.load if name == "a difference without its base" else tensorkeep.open)(step)
    assert caught.value.path.startswith(str(step))
    third = {"a": SECOND["a"] * (1 + 2.0**-18), "b": FIRST["b"]}
    tensorkeep.save(third, step.with_name("3"), base=step, delta=True, compression="lossless", threads=1)
    assert same(tensorkeep.load(step.with_name("3")), third)


def test_the_unedited_step_loads_unless_a_linked_file_is_a_symbolic_link(step: Path) -> None:
    """Shows that the refusals above are caused by the edits."""
    seal(body_of(step), step)
    assert same(tensorkeep.load(step), SECOND)
    linked = step / "from-1-model.tensorkeep"
    linked.unlink()
    linked.symlink_to(step.with_name("1") / "model.tensorkeep")
    with pytest.raises(tensorkeep.CorruptCheckpointError, match="symbolic link"):
        tensorkeep.open(step)
