"""One rank is killed, stopped, or finds a full disk, at each operation of a collective save.

After each case all living ranks have ended in time, and raise an error that names the rank, or the save has succeeded.
The destination holds the old or the new checkpoint, complete. Another number of ranks then saves there, and nothing
else remains in the folder.
"""

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import tensorkeep
from faults.ranks import saves
from faults.ranks.forks import ForkedRanks
from faults.ranks.saves import CONNECTING, Fault, Part
from ranks import Outcome
from tensorkeep.testing.equality import same

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

OLD, NEW, LAST = 1, 2, 3
PLACES = {"save": ("c", "c"), "save_async": ("c", "c"), "save_step": ("step-000001", "step-000002")}
NOT_OF_THE_DISK = {"gather", "connect"}


class Saves:
    """Collective saves of one kind over an old checkpoint, or a fresh one, and what is checked after each."""

    def __init__(self, forks: ForkedRanks, folder: Path, work: str, count: int, *, fresh: bool = False) -> None:
        self._forks, self._folder, self._work, self._count = forks, folder, work, count
        self._old = None if fresh else OLD
        self._first = folder / "first"
        self._first.mkdir()
        if not fresh:
            self._succeed(self._first, OLD, count)
        self._number = 0

    def _run(self, root: Path, number: int, count: int, fault: Fault | None = None, **options: Any) -> list[Outcome]:
        timeout = 1.0 if fault is not None and fault.is_found_at_timeout else 100.0
        call = (saves.take_part, self._work, str(root), number, timeout, fault)
        return self._forks.run(count, *call, **options)

    def _succeed(self, root: Path, number: int, count: int) -> list[list[str]]:
        found = self._run(root, number, count)
        assert all(each.value and not each.value.error for each in found), found
        return [each.value.operations for each in found]

    def _root(self) -> Path:
        """Return a folder with the old checkpoint."""
        self._number += 1
        root = self._folder / str(self._number)
        shutil.copytree(self._first, root)
        return root

    def operations(self) -> list[list[str]]:
        """Return the operations of each rank in a save that nothing disturbs."""
        found = self._succeed(self._root(), NEW, self._count)
        assert all(names[: len(CONNECTING)] == CONNECTING for names in found), found
        return found

    def break_at(self, fault: Fault) -> None:
        """Save with a fault, and check all that is promised."""
        root = self._root()
        resumed = fault.index % 2 == 0
        hung = fault.rank if fault.action == "hung" else None
        found = self._run(root, NEW, self._count, fault, hung=hung, resumed=resumed)
        returned = _check_ranks(found, fault)
        self._check_disk(root, fault, complete=returned)
        # Larger and smaller numbers of ranks, also 1.
        count = [each for each in (1, 2, 3) if each != self._count][fault.index % 2]
        self._succeed(root, LAST, count)
        place = "step-000003" if self._work == "save_step" else "c"
        assert [path.name for path in root.iterdir()] == [place]
        assert same(tensorkeep.load(root / place), saves.full_state(LAST))
        shutil.rmtree(root)

    def _check_disk(self, root: Path, fault: Fault, *, complete: bool) -> None:
        visible = {path.name for path in root.iterdir() if not path.name.startswith(".")}
        states = dict(zip((self._old, NEW), PLACES[self._work], strict=True))
        for name in visible:
            allowed = [number for number, place in states.items() if place == name and number is not None]
            assert tensorkeep.verify(root / name).ok
            loaded = tensorkeep.load(root / name)
            assert loaded["step"] in allowed
            assert same(loaded, saves.full_state(loaded["step"]))
        if complete:
            assert PLACES[self._work][1] in visible
            assert tensorkeep.load(root / PLACES[self._work][1])["step"] == NEW
        elif self._old is not None:
            assert visible, f"neither is there: {fault}"


def _check_ranks(found: list[Outcome], fault: Fault) -> bool:
    """Check what became of the ranks; return whether the save succeeded on one of them."""
    parts: dict[int, Part] = {}
    for rank, each in enumerate(found):
        assert not each.hung, f"rank {rank} does not end after {fault}"
        if each.exit_code is not None:
            assert (rank, each.exit_code) == (fault.rank, -signal.SIGKILL), each
        else:
            assert each.error is None, each
            parts[rank] = each.value
    words = {"killed before": "ended", "killed after": "ended", "full disk": "failed"}
    how = "not answer" if fault.is_found_at_timeout else words[fault.action]
    for rank, part in parts.items():
        assert part.error in (None, "RanksDisagreeError", *(["StoreError"] if rank == fault.rank else [])), part
        if rank != fault.rank and part.error is not None:
            naming = rf"ranks? [\d, ]*\b{fault.rank}\b.* {how}"
            assert re.search(naming, part.message), f"{fault}: {part.message}"
    errors = [part.error for part in parts.values()]
    if fault.action == "full disk":
        assert all(errors) or not any(errors), found
    return None in errors


EVERY = [
    *((work, count, action) for action in ("killed before", "full disk") for work in PLACES for count in (2, 3)),
    ("fresh save", 2, "killed before"),
    ("save", 2, "killed after"),
    ("save", 3, "killed after"),
    ("save_step", 2, "killed after"),
    *((work, 3, "hung") for work in PLACES),
]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("work", "count", "action"), EVERY)
def test_every_operation_of_every_rank(
    tmp_path: Path, forks: ForkedRanks, work: str, count: int, action: str, record_property: Any
) -> None:
    made = Saves(forks, tmp_path, work.removeprefix("fresh "), count, fresh=work.startswith("fresh"))
    faults = [
        Fault(rank, index, action, name)
        for rank, names in enumerate(made.operations())
        for index, name in enumerate(names)
        if (action != "full disk" or name not in NOT_OF_THE_DISK) and (action != "hung" or index % 4 == rank)
    ]
    assert faults, "no operation was broken"
    for fault in faults:
        made.break_at(fault)
    record_property("cases", len(faults))


def test_some_operations_of_three_ranks(tmp_path: Path, forks: ForkedRanks, record_property: Any) -> None:
    made = Saves(forks, tmp_path, "save", 3)
    operations = made.operations()
    # A rank that fails or dies: packages/tensorkeep/tests/checkpoint/ranks. A full disk of one is exhaustive.
    chosen = [(0, "renameat2", "killed after"), (1, "open", "hung")]
    for rank, name, action in chosen:
        names = operations[rank]
        made.break_at(Fault(rank, len(names) - 1 - names[::-1].index(name), action, name))
    record_property("cases", len(chosen))


@pytest.mark.exhaustive
@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_killed_before_connecting_is_reported_at_timeout(tmp_path: Path, forks: ForkedRanks, index: int) -> None:
    fault = Fault(1, index, "killed before", "connect")
    found = forks.run(3, saves.take_part, "save", str(tmp_path), NEW, 1.0, fault)
    assert found[1].exit_code == -signal.SIGKILL
    for part in (found[0].value, found[2].value):
        assert (part.operations, part.error) == (CONNECTING[: index + 1], "RanksDisagreeError")
        # On a busy machine the other one may be late, too.
        assert re.match(
            r"(rank|one or more of the ranks)( 0,)? 1\b.* did not answer within 1 s, connecting", part.message
        )
        assert "if it is only slow, give a longer timeout" in part.message
    assert not list(tmp_path.iterdir())
