"""What a process group can do after a rank was slow, was interrupted, was killed, or serves the store and hangs."""

import os
import re
import signal
import socket
from pathlib import Path

import pytest

import tensorkeep
from faults.ranks import saves
from faults.ranks.forks import ForkedRanks
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_suite import names_in
from tiers import exhaustive

ERROR = "RanksDisagreeError: "

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("interrupted", "rank 1 was interrupted, preparing to save", "KeyboardInterrupt: $"),
        ("interrupted while connecting", "rank 1 was interrupted, connecting", "KeyboardInterrupt: $"),
        # The slow rank does not say that the other one was.
        *exhaustive(("slow", ".*rank 1 did not answer within 1.5 s, writing its part", f"{ERROR}(?!.*rank 0 did not)")),
    ],
)
def test_the_next_save_connects_again(tmp_path: Path, forks: ForkedRanks, how: str, first: str, second: str) -> None:
    both = forks.run(2, saves.save_again, str(tmp_path), how)
    for found, expected in zip(both, (ERROR + first, second), strict=True):
        assert found.value, found
        assert re.match(expected, found.value[0], re.DOTALL), found.value
        assert found.value[1] == ""
    assert same(tensorkeep.load(tmp_path / "c"), saves.full_state(2))
    assert names_in(tmp_path) == ["c"]


def test_the_next_save_fails_at_once_after_a_rank_has_ended(tmp_path: Path, forks: ForkedRanks) -> None:
    first, second = forks.run(2, saves.save_again, str(tmp_path), "killed")
    assert second.exit_code == -signal.SIGKILL
    assert "rank 1 has ended, writing its part" in first.value[0]
    assert "start the ranks again" in first.value[0]
    # At once: after the timeout, it would say that the rank did not answer.
    assert "rank 1 has ended" in first.value[1]
    assert names_in(tmp_path) == []


@pytest.mark.exhaustive
def test_a_rank_that_serves_the_store_and_hangs_does_not_block_the_others(tmp_path: Path, forks: ForkedRanks) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = forks.run(2, saves.save_beside_a_stopped_store, str(tmp_path), port, hung=0)
    assert not found[1].hung
    words = "another rank, perhaps the one that serves the store of the process group, did not answer within 1.5 s"
    assert [words in error for error in found[1].value] == [True, True], found[1]
    assert same(tensorkeep.load(tmp_path / "c"), saves.full_state(2))


@pytest.mark.exhaustive
def test_a_child_of_a_killed_coordinator_does_not_keep_its_lock(tmp_path: Path, forks: ForkedRanks) -> None:
    root, note = tmp_path / "run", tmp_path / "child"
    root.mkdir()
    found = forks.run(2, saves.leave_a_child, str(root), str(note))
    child = int(note.read_text())
    try:
        assert found[0].exit_code == -signal.SIGKILL
        # The child has the connections of its parent, so that the timeout ends the waiting.
        assert found[1].error == "RanksDisagreeError", found[1]
        assert "rank 0" in found[1].message
        assert "when all ranks had written their parts" in found[1].message
        # The next save, by another number of ranks, finishes that one first, and then replaces it.
        again = forks.run(3, saves.take_part, "save", str(root), 3, 100.0, None)
        assert [each.value.error for each in again] == [None] * 3, again
        assert same(tensorkeep.load(root / "c"), saves.full_state(3))
        assert names_in(root) == ["c"]
    finally:
        os.kill(child, signal.SIGKILL)
