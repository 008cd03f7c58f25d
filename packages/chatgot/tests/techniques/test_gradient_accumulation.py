"""Gradient accumulation: micro-batches make the step of the whole batch, without an update between them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chatgot.config.config import Config
from chatgot.data.batches import Batch, BatchSource
from chatgot.model.gpt import IGNORED
from chatgot.step.state import StepState
from chatgot.step.train_step import take_step
from chatgot.techniques.gradient_accumulation import GradientAccumulation, MicroBatches
from chatgot.techniques.observe import observe_operation
from chatgot.techniques.wrapped_batches import WrappedBatches
from chatgot.testing import TINY, TechniqueSuite, last_state, losses, opened, trained, verified_step
from tensorkeep.errors import TechniqueNotActiveError, UsageError
from tensorkeep.testing.equality import difference

WITHOUT_DROPOUT = TINY.changed({"model.dropout": 0.0})


def with_micro_batches(config: Config, parts: int) -> Config:
    return config.changed({"techniques.gradient-accumulation.batches": parts})


def gradients(config: Config, folder: Path, data: Path, arrange: Callable[[StepState], object]) -> list[Tensor]:
    """Return the gradients of the first step."""
    found: list[Tensor] = []
    with opened(config, folder, data) as run:
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

    def break_on_purpose(self, run: StepState) -> None:
        """Update the weights after each micro-batch."""
        backward = run.operations.backward

        def backward_and_update(loss: Tensor) -> None:
            backward(loss)
            run.operations.update()

        run.operations.backward = backward_and_update

    def test_unsplit_batches_are_an_error(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            run.batches = run.batches.inner  # type: ignore[attr-defined]
            with pytest.raises(TechniqueNotActiveError, match="of up to 4 sequences"):
                verified_step(run)

    def test_gradient_equals_that_of_the_whole_batch_without_dropout(self, tmp_path: Path, data: Path) -> None:
        self.check_gradients(WITHOUT_DROPOUT, tmp_path, data, lambda run: None)

    def check_gradients(self, config: Config, folder: Path, data: Path, arrange: Callable[[StepState], object]) -> None:
        whole = gradients(config, folder / "whole", data, arrange)
        for parts in (2, 4):
            divided = gradients(with_micro_batches(config, parts), folder / f"{parts}", data, arrange)
            for one, other in zip(whole, divided, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-7)

    def test_micro_batches_are_weighted_by_their_targets(self, tmp_path: Path, data: Path) -> None:
        """The mean is over the targets of the whole step; the mean of one micro-batch may be NaN."""

        def mask(run: StepState) -> None:
            source: Any = run.batches.inner if isinstance(run.batches, MicroBatches) else run.batches
            at = source.at

            def hide(position: int) -> Any:
                inputs, targets = at(position)
                targets[0, 3:] = targets[1] = targets[-1, :9] = IGNORED
                return inputs, targets

            source.at = hide

        self.check_gradients(WITHOUT_DROPOUT.changed({"loop.gradient_accumulation_steps": 1}), tmp_path, data, mask)

    def test_it_is_bit_identical_to_the_accumulation_of_the_loop(self, data: Path) -> None:
        """Dropout draws the same numbers for the same micro-batches."""
        divided = trained(with_micro_batches(TINY, 2), data)
        smaller = trained(TINY.changed({"loop.batch_size": 2, "loop.gradient_accumulation_steps": 4}), data)
        assert losses(divided) == losses(smaller)
        for part in ("model", "optimizers"):
            assert difference(last_state(divided)[part], last_state(smaller)[part]) is None, part

    def test_position_is_saved_in_whole_batches(self, tmp_path: Path, data: Path) -> None:
        with opened(with_micro_batches(TINY, 4), tmp_path / "run", data) as run:
            take_step(run)
            assert run.batches.state_dict() == {"position": TINY.loop.gradient_accumulation_steps}
            expected = next(run.batches)
            run.batches.load_state_dict({"position": TINY.loop.gradient_accumulation_steps})
            assert torch.equal(next(run.batches)[0], expected[0])

    def test_batch_size_that_cannot_be_split_equally_is_refused(self, tmp_path: Path, data: Path) -> None:
        refused = pytest.raises(UsageError, match="a batch of 4 sequences cannot be split into 3 equal micro-batches")
        with refused, opened(with_micro_batches(TINY, 3), tmp_path / "run", data):
            pass


def test_last_batch_of_a_step_is_the_last_one_with_targets(tmp_path: Path, data: Path) -> None:
    """Data-parallel techniques exchange gradients after this batch."""

    def draw(batches: BatchSource) -> Batch:
        inputs, targets = next(batches)
        return inputs, targets if batches.position % 3 else torch.full_like(targets, IGNORED)

    last: list[bool] = []
    with opened(TINY.changed({"loop.gradient_accumulation_steps": 3}), tmp_path / "run", data) as run:
        run.batches = WrappedBatches(run.batches, draw)
        with observe_operation(run, "loss", before=lambda *batch: last.append(run.is_last_batch)):
            take_step(run)
    assert last == [False, True]
