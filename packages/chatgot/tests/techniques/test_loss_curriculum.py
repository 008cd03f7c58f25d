"""Curriculum by loss: which windows are chosen, without a change of the run's state."""

from pathlib import Path
from typing import Any

import pytest
import torch

from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT
from chatgot.step.state import StepState
from chatgot.step.train_step import take_step
from chatgot.techniques.experimental.loss_curriculum import LossCurriculum, at_quantile, window_losses
from chatgot.testing import TechniqueSuite, opened, verified_step

LOSSES = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0, 0.0])


class TestLossCurriculum(TechniqueSuite):
    technique = LossCurriculum
    variants = ({}, pytest.param({"candidates": 3, "begin": 0.5, "end": 0.2}, marks=pytest.mark.exhaustive))

    def break_on_purpose(self, run: StepState) -> None:
        """Use the batches that the run was built with."""
        run.batches = run.batches.inner  # type: ignore[attr-defined]

    def test_easiest_windows_come_first_and_hardest_last(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            technique: Any = run.techniques.techniques[0]
            technique._selections = {}
            for _ in range(6):
                take_step(run)
        selections = technique._selections.values()
        ranks = [losses.argsort().argsort()[chosen].tolist() for losses, chosen, _ in selections]
        assert ranks[0] == ranks[1] == [0, 1, 2, 3]
        assert ranks[-1] == [4, 5, 6, 7]
        assert [each[0] for each in ranks] == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4]

    def test_selection_draws_no_random_numbers_and_counts_all_candidates(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            before = torch.get_rng_state()
            next(run.batches)
            assert torch.equal(torch.get_rng_state(), before)
            assert all(each.training for each in run.model.modules())
            assert all(each.grad is None for each in run.model.parameters())
            next(run.batches)
            assert run.batches.position == 4
            assert run.batches.state_dict() == {"position": 4}

    def test_proof_compares_the_losses(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({"candidates": 4}), tmp_path / "run", data) as run:
            figures = verified_step(run)["loss-curriculum"]
            assert (figures["chosen"], figures["candidates"]) == (8, 32)
            assert figures["loss"] < figures["loss_of_all"]


@pytest.mark.parametrize(("quantile", "chosen"), [(0.0, [5, 1]), (0.25, [1, 2]), (0.5, [2, 0]), (1.0, [4, 3])])
def test_chosen_windows_have_consecutive_ranks_at_the_quantile(quantile: float, chosen: list[int]) -> None:
    assert at_quantile(LOSSES, quantile, count=2).tolist() == chosen


def test_loss_of_a_window_equals_that_of_the_window_alone() -> None:
    torch.manual_seed(0)
    model = GPT(ModelConfig(vocab_size=11, context_length=8, n_layers=1, n_heads=2, d_model=16, dropout=0.5))
    inputs, targets = torch.randint(11, (3, 8)), torch.randint(11, (3, 8))
    targets[1, 4:] = -1
    found = window_losses(model, inputs, targets)
    assert model.training
    model.eval()
    alone = [model.loss(inputs[row : row + 1], targets[row : row + 1]).item() for row in range(3)]
    assert found.tolist() == pytest.approx(alone)
