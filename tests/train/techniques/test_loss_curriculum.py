"""Windows chosen by their loss: which ones, and that looking at them changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tensorkeep.errors import UsageError
from tensorkeep.testing.technique_suite import TechniqueSuite
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import take_step
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.loss_curriculum import (
    LossCurriculum,
    LossCurriculumSettings,
    at_quantile,
    window_losses,
)

LOSSES = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0, 0.0])


class TestLossCurriculum(TechniqueSuite):
    technique = LossCurriculum
    variants = ({}, {"candidates": 3, "begin": 0.5, "end": 0.2})

    def sabotage(self, run: Run) -> None:
        """Let the run keep the batches that it was built with."""
        run.batches = run.batches.plain  # type: ignore[attr-defined]

    def test_the_easiest_windows_come_first_and_the_hardest_last(self, tmp_path: Path, data: Path) -> None:
        ranks = []
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            drawing: Any = run.batches
            drawing.tell = lambda choice: ranks.append(choice.losses.argsort().argsort()[choice.chosen].tolist())
            for _ in range(6):
                take_step(run)
        assert ranks[0] == ranks[1] == [0, 1, 2, 3]
        assert ranks[-1] == [4, 5, 6, 7]
        assert [each[0] for each in ranks] == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4]

    def test_no_window_is_drawn_twice_and_the_position_counts_all(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            take_step(run)
            assert run.batches.position == 4
            assert run.batches.state_dict() == {"position": 4}

    def test_choosing_draws_no_random_numbers(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            before = torch.get_rng_state()
            next(run.batches)
            assert torch.equal(torch.get_rng_state(), before)
            assert all(each.training for each in run.model.modules())
            assert all(each.grad is None for each in run.model.parameters())

    def test_the_proof_compares_the_losses(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({"candidates": 4}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            with run.techniques.verified(run):
                take_step(run)
            figures = run.techniques.proofs["loss-curriculum"].figures
            assert (figures["chosen"], figures["candidates"]) == (8, 32)
            assert figures["loss"] < figures["loss_of_all"]


@pytest.mark.parametrize(("quantile", "chosen"), [(0.0, [5, 1]), (0.25, [1, 2]), (0.5, [2, 0]), (1.0, [4, 3])])
def test_windows_lie_next_to_each_other_at_the_quantile(quantile: float, chosen: list[int]) -> None:
    assert at_quantile(LOSSES, quantile, count=2).tolist() == chosen


def test_the_loss_of_a_window_is_what_the_model_says_of_it_alone() -> None:
    torch.manual_seed(0)
    model = GPT(ModelConfig(vocab_size=11, context_length=8, n_layers=1, n_heads=2, d_model=16, dropout=0.5))
    inputs, targets = torch.randint(11, (3, 8)), torch.randint(11, (3, 8))
    targets[1, 4:] = -1
    found = window_losses(model, inputs, targets)
    assert model.training
    model.eval()
    alone = [model.loss(inputs[row : row + 1], targets[row : row + 1]).item() for row in range(3)]
    assert found.tolist() == pytest.approx(alone)


@pytest.mark.parametrize("settings", [{"candidates": 1}, {"begin": -0.1}, {"end": 1.1}])
def test_settings_have_bounds(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        LossCurriculumSettings(**settings)
