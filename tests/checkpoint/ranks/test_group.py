"""Exchanges of ranks: their order, ranks that do different things, values of all lengths, and connections."""

import re
from pathlib import Path

import pytest
import torch

import tensorkeep
from checkpoint.ranks import exchanges
from ranks import outcomes, run_ranks


def test_saves_of_a_group_are_written_in_the_order_in_which_they_begin(tmp_path: Path) -> None:
    assert run_ranks(2, exchanges.several_in_flight, str(tmp_path)) == [["first", "step-000002", "third"], []]
    for number, path in enumerate(("first", "run@2", "third"), 1):
        assert tensorkeep.load(tmp_path / path)["model"]["w"].unique().tolist() == [number]


def test_the_boxes_of_other_ranks_are_not_kept_between_saves(tmp_path: Path) -> None:
    assert run_ranks(2, exchanges.boxes_remembered, str(tmp_path / "c")) == [0, 0]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("save", "rank 0 is preparing to save, and rank 1 is loading"),
        ("load", "rank 0 is loading, and rank 1 is comparing its state"),
        ("other saves", r"rank 0 is beginning to save .*/c0, and rank 1 is beginning to save .*/c1"),
    ],
)
def test_ranks_in_different_operations_all_raise_at_once(tmp_path: Path, what: str, words: str) -> None:
    tensorkeep.save({"w": torch.ones(4)}, tmp_path / "c")
    found = outcomes(2, exchanges.differently, str(tmp_path / "c"), what, seconds=10)
    assert [each.error for each in found] == ["RanksDisagreeError"] * 2, found
    assert all(re.search(words, each.message) for each in found), found[0].message


@pytest.mark.parametrize("length", [5, 300_000])
def test_values_of_different_lengths_arrive(length: int) -> None:
    sizes = [3, length, 3]
    assert run_ranks(3, exchanges.exchange_long_and_short, length) == [[sizes, sizes], [sizes, []], [sizes, []]]


@pytest.mark.slow
def test_ranks_meet_again_that_gave_up_different_numbers_of_connections(tmp_path: Path) -> None:
    errors = run_ranks(2, exchanges.connect_out_of_step, str(tmp_path / "c"))
    assert any(errors[0]), "rank 1 was not late"
    assert [each[-1] for each in errors] == ["", ""]


def test_no_rank_goes_on_before_all_have_connected() -> None:
    connected, *others = run_ranks(3, exchanges.connect_beside_a_slow_rank)
    assert min(others) > connected


def test_each_operation_has_its_timeout_and_ranks_with_others_meet(tmp_path: Path) -> None:
    for kept, error in run_ranks(2, exchanges.operations_with_other_timeouts, str(tmp_path / "c")):
        assert kept == [1.0] * 4
        assert "did not answer within 0.5 s" in error
