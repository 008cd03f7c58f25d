"""Loads by several ranks: values of one rank each, tied tensors, and what only one rank meets."""

from pathlib import Path

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
