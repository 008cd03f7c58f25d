"""Batches in parts: that they make the step of the whole batch, and that nothing is updated between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorkeep.errors import TechniqueNotActiveError, UsageError
from tensorkeep.testing.equality import difference
from tensorkeep.testing.technique_suite import TINY, TechniqueSuite, last_state, losses, train_run, with_techniques
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import take_step
from tensorkeep.train.model.gpt import IGNORED
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.gradient_accumulation import GradientAccumulation, Parts

WITHOUT_DROPOUT = TINY.changed({"model.dropout": 0.0})


def in_parts(config: Config, parts: int) -> Config:
    return with_techniques(config, {"gradient-accumulation": {"batches": parts}})


def gradients(config: Config, folder: Path, data: Path, arrange: Callable[[Run], object]) -> list[Tensor]:
    """Return the gradients of the first step."""
    found: list[Tensor] = []
    with open_run(config, RunFolder(folder), Dataset.open(data)) as run:
        arrange(run)
        clip = run.operations.clip

        def watched() -> Tensor:
            found.extend(each.grad.clone() for each in run.model.parameters() if each.grad is not None)
            return clip()

        run.operations.clip = watched
        take_step(run)
    return found


class TestGradientAccumulation(TechniqueSuite):
    technique = GradientAccumulation

    def sabotage(self, run: Run) -> None:
        """Let each part make an update of its own."""
        backward = run.operations.backward

        def backward_and_update(loss: Tensor) -> None:
            backward(loss)
            run.operations.update()

        run.operations.backward = backward_and_update

    def test_batches_that_stay_whole_are_caught(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            run.batches = run.batches.plain  # type: ignore[attr-defined]
            with pytest.raises(TechniqueNotActiveError, match="of up to 4 sequences"), run.techniques.verified(run):
                take_step(run)

    @pytest.mark.parametrize("parts", [2, 4])
    def test_without_dropout_the_gradient_is_that_of_the_whole_batch(
        self, tmp_path: Path, data: Path, parts: int
    ) -> None:
        nothing: Callable[[Run], object] = lambda run: None  # noqa: E731
        whole = gradients(WITHOUT_DROPOUT, tmp_path / "whole", data, nothing)
        divided = gradients(in_parts(WITHOUT_DROPOUT, parts), tmp_path / "parts", data, nothing)
        for one, other in zip(whole, divided, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-7)

    def test_parts_with_fewer_targets_count_for_less(self, tmp_path: Path, data: Path) -> None:
        """Targets that are left out are so of the mean over the window, not of the mean of a part, which may be NaN."""

        def mask(run: Run) -> None:
            source: Any = run.batches.plain if isinstance(run.batches, Parts) else run.batches
            at = source.at

            def hide(position: int) -> Any:
                inputs, targets = at(position)
                targets[0, 3:] = IGNORED
                targets[1] = IGNORED
                targets[-1, :9] = IGNORED
                return inputs, targets

            source.at = hide

        one_batch = WITHOUT_DROPOUT.changed({"loop.accumulate": 1})
        whole = gradients(one_batch, tmp_path / "whole", data, mask)
        for parts in (2, 4):
            divided = gradients(in_parts(one_batch, parts), tmp_path / f"{parts}", data, mask)
            for one, other in zip(whole, divided, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-7)

    def test_it_is_the_accumulation_of_the_loop_bit_for_bit(self, tmp_path: Path, data: Path) -> None:
        """Dropout draws the same numbers for the same parts, whichever way they are asked for."""
        train_run(in_parts(TINY, 2), tmp_path / "parts", data)
        train_run(TINY.changed({"loop.batch_size": 2, "loop.accumulate": 4}), tmp_path / "loop", data)
        assert losses(tmp_path / "parts") == losses(tmp_path / "loop")
        divided, smaller = last_state(tmp_path / "parts"), last_state(tmp_path / "loop")
        assert difference(divided["model"], smaller["model"]) is None
        assert difference(divided["optimizers"], smaller["optimizers"]) is None

    def test_the_place_in_the_data_is_saved_in_whole_batches(self, tmp_path: Path, data: Path) -> None:
        config = in_parts(TINY, 4)
        with open_run(config, RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            take_step(run)
            assert run.batches.state_dict() == {"position": TINY.loop.accumulate}
            assert run.batches.position == 4 * TINY.loop.accumulate
            expected = next(run.batches)
            run.batches.load_state_dict({"position": TINY.loop.accumulate})
            assert torch.equal(next(run.batches)[0], expected[0])

    def test_a_batch_that_does_not_divide_is_refused(self, tmp_path: Path, data: Path) -> None:
        with (
            pytest.raises(UsageError, match="a batch of 4 sequences does not divide into 3 parts"),
            open_run(in_parts(TINY, 3), RunFolder(tmp_path / "run"), Dataset.open(data)),
        ):
            pass

    def test_one_part_is_refused(self) -> None:
        with pytest.raises(UsageError, match="batches is 1"):
            self._settings({"batches": 1})
