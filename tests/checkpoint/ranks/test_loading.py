"""Loads by several ranks: values of one rank each, tied tensors, and what only one rank meets."""

from pathlib import Path

import pytest

from checkpoint.ranks import loading
from ranks import outcomes, run_ranks


def test_each_rank_loads_its_own_plain_values(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    found = run_ranks(2, loading.plain_values_of_ranks, path)
    assert found == [[100, 5, [0, 0]], [101, 6, [1, 1]]]
    values, warnings = zip(*run_ranks(3, loading.plain_values_of_more_ranks, path), strict=True)
    assert values == (100, 101, -1)
    assert warnings[:2] == ([], [])
    assert "has no value of rank 2 for 'more', 'seed', which is left as it is" in warnings[2][0]


def test_tied_dtensors_do_not_take_tensors_that_were_not_tied(tmp_path: Path) -> None:
    found = outcomes(2, loading.untied_into_tied, str(tmp_path / "c"))
    assert {each.error for each in found} <= {"StateMismatchError", "RanksDisagreeError"}
    assert all("'b' shares memory with 'a' in the state" in each.message for each in found), found


def test_tied_dtensors_are_loaded_into_separate_ones_without_the_full_tensor(tmp_path: Path) -> None:
    run_ranks(2, loading.tied_into_untied, str(tmp_path / "c"))


@pytest.mark.parametrize("into", [False, True])
def test_ranks_that_load_different_checkpoints_raise(tmp_path: Path, into: bool) -> None:
    found = outcomes(2, loading.other_paths, str(tmp_path), into)
    assert [each.error for each in found] == ["RanksDisagreeError"] * 2
    expected = f"rank 0 has opened {tmp_path}/0, and rank 1 has opened another checkpoint, {tmp_path}/1"
    assert all(expected in each.message for each in found), found


def test_restoring_ends_on_all_ranks_if_one_cannot_take_the_step(tmp_path: Path) -> None:
    found = outcomes(2, loading.restore_fails_on_one_rank, str(tmp_path), seconds=20)
    assert [each.error for each in found] == ["StateMismatchError", "RanksDisagreeError"]
    assert "rank 0 has failed" in found[1].message


def test_what_one_rank_gives_wrongly_is_an_error_on_all_at_once(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert run_ranks(2, loading.metrics_of_rank_0, root) == [0.5, 0.5]
    for what, error in {"step": "UsageError", "restore": "NotFoundError", "load": "UsageError"}.items():
        found = outcomes(2, loading.one_rank_gives, root, what, seconds=20)
        assert [each.error for each in found] == ["RanksDisagreeError", error], found
        assert "rank 1 has failed" in found[0].message
    found = outcomes(2, loading.delete_locked, root, seconds=20)
    assert [each.error for each in found] == ["BusyError", "RanksDisagreeError"]


def test_per_rank_within_the_state_of_an_object_names_the_remedy(tmp_path: Path) -> None:
    found = outcomes(2, loading.per_rank_within_an_object, str(tmp_path / "c"))
    assert all("wrap the object itself: PerRank(object)" in each.message for each in found), found


def test_blocks_of_the_largest_size_are_read(tmp_path: Path) -> None:
    assert run_ranks(2, loading.coarse_blocks, str(tmp_path / "c")) == [4, 4]
