"""Progressive length: the lengths of the windows, and that no token is lost."""

from pathlib import Path

import pytest
import torch

from chatgot.loop import Silent, train
from chatgot.step.state import StepState
from chatgot.step.train_step import take_step
from chatgot.techniques.progressive_length import ProgressiveLength, ProgressiveLengthSettings
from chatgot.testing import STEPS, TechniqueSuite, opened, whole_run


def watched(run: StepState) -> list[tuple[int, torch.Tensor]]:
    """Record the step and the tokens of each call of the model."""
    seen: list[tuple[int, torch.Tensor]] = []
    run.model.tokens.register_forward_pre_hook(lambda module, given: seen.append((run.progress.step, given[0].clone())))
    return seen


class TestProgressiveLength(TechniqueSuite):
    technique = ProgressiveLength
    # The suite resumes after step 3: between two stages, and within a stage.
    variants = ({}, pytest.param({"pieces": [4, 1], "shares": [0.7, 0.3]}, marks=pytest.mark.exhaustive))

    def break_on_purpose(self, run: StepState) -> None:
        """Use the batches that the run was built with."""
        run.batches = run.batches.inner  # type: ignore[attr-defined]

    def test_windows_grow_and_steps_train_the_same_tokens(self, tmp_path: Path, data: Path) -> None:
        seen = {}
        for name, config in (("plain", self.config), ("on", self.config_with({}))):
            with opened(config, tmp_path / name, data) as run:
                seen[name] = watched(run)
                for _ in range(STEPS):
                    take_step(run)
        lengths = [tokens.shape[1] for _, tokens in seen["on"]]
        assert lengths == [4, 4, 4, 4, 8, 8, 16, 16, 16, 16, 16, 16]
        for (_, plain), (_, short) in zip(seen["plain"], seen["on"], strict=True):
            assert torch.equal(plain.flatten(), short.flatten())

    def test_targets_are_cut_like_inputs(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            inputs, targets = next(run.batches)
            assert inputs.shape == targets.shape == (16, 4)
            assert torch.equal(inputs[:, 1:], targets[:, :-1])

    def test_evaluation_always_has_full_windows(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            evaluated = []
            run.model.tokens.register_forward_pre_hook(
                lambda module, inputs: None if torch.is_grad_enabled() else evaluated.append(inputs[0].shape[1])
            )
            train(run, Silent(), stop=lambda: run.progress.step == 3)
        assert set(evaluated) == {16}

    def test_mfu_counts_attention_of_the_current_length(self, tmp_path: Path, data: Path) -> None:
        """The first step is not counted."""
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            train(run, Silent())
            tokens, flops = run.progress.tokens // STEPS, run.config.model.flops_per_token
            assert run.speed.flops == sum(tokens * flops(length) for length in (4, 8, 16, 16, 16))

    def test_proof_has_the_stage(self, data: Path) -> None:
        figures = whole_run(self.config_with({}), data).proofs["progressive-length"].figures
        assert figures == {"length": 4, "windows": 32, "tokens": 128, "stage": 1}


@pytest.mark.parametrize(("step", "stage"), [(1, 0), (25, 0), (26, 1), (50, 1), (51, 2), (100, 2), (101, 2)])
def test_stage_depends_on_the_step(step: int, stage: int) -> None:
    assert ProgressiveLength(ProgressiveLengthSettings()).stage(step, 100) == stage
