"""Short windows at first: which lengths a model sees, and that no token is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tensorkeep.errors import UsageError
from tensorkeep.testing.technique_suite import STEPS, TINY, TechniqueSuite
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import take_step, train
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.progressive_length import ProgressiveLength, ProgressiveLengthSettings


class _Nobody:
    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None: ...


def watched(run: Run) -> list[tuple[int, torch.Tensor]]:
    """Note the step and the tokens of whatever the model is given."""
    seen: list[tuple[int, torch.Tensor]] = []
    run.model.tokens.register_forward_pre_hook(
        lambda module, inputs: seen.append((run.progress.step, inputs[0].clone()))
    )
    return seen


class TestProgressiveLength(TechniqueSuite):
    technique = ProgressiveLength
    # The run of the exam stops after step 3: between two stages, and in the middle of one.
    variants = ({}, {"pieces": [4, 1], "shares": [0.7, 0.3]})

    def sabotage(self, run: Run) -> None:
        """Let the run keep the batches that it was built with."""
        run.batches = run.batches.plain  # type: ignore[attr-defined]

    def test_windows_grow_and_steps_train_the_tokens_that_they_would_have_trained(
        self, tmp_path: Path, data: Path
    ) -> None:
        seen = {}
        for name, config in (("plain", self.config), ("on", self.on({}))):
            with open_run(config, RunFolder(tmp_path / name), Dataset.open(data)) as run:
                seen[name] = watched(run)
                for _ in range(STEPS):
                    take_step(run)
        lengths = [tokens.shape[1] for _, tokens in seen["on"]]
        assert lengths == [4, 4, 4, 4, 8, 8, 16, 16, 16, 16, 16, 16]
        for (_, plain), (_, short) in zip(seen["plain"], seen["on"], strict=True):
            assert torch.equal(plain.flatten(), short.flatten())

    def test_targets_are_cut_as_their_inputs(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            inputs, targets = next(run.batches)
            assert inputs.shape == targets.shape == (16, 4)
            assert torch.equal(inputs[:, 1:], targets[:, :-1])

    def test_evaluation_has_whole_windows_throughout(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            evaluated = []
            run.model.tokens.register_forward_pre_hook(
                lambda module, inputs: None if torch.is_grad_enabled() else evaluated.append(inputs[0].shape[1])
            )
            train(run, _Nobody(), stop=lambda: run.progress.step == 3)
        assert set(evaluated) == {16}

    def test_attention_counts_for_the_length_that_it_has(self, tmp_path: Path, data: Path) -> None:
        """In MFU, whose first step is not counted."""
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            train(run, _Nobody())
            tokens, flops = run.progress.tokens // STEPS, run.config.model.flops_per_token
            assert run.speed.flops == sum(tokens * flops(length) for length in (4, 8, 16, 16, 16))

    def test_the_proof_tells_of_the_stage(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            with run.techniques.verified(run):
                take_step(run)
            figures = run.techniques.proofs["progressive-length"].figures
            assert figures == {"length": 4, "windows": 32, "tokens": 128, "stage": 1}


@pytest.mark.parametrize(("step", "stage"), [(1, 0), (25, 0), (26, 1), (50, 1), (51, 2), (100, 2), (101, 2)])
def test_a_stage_follows_from_the_step(step: int, stage: int) -> None:
    assert ProgressiveLength(ProgressiveLengthSettings()).stage(step, 100) == stage


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pieces": (4, 2), "shares": (0.5, 0.5)}, r"pieces is \[4, 2\]"),
        ({"pieces": (2, 4, 1)}, "pieces is"),
        ({"pieces": ()}, "pieces is"),
        ({"pieces": (4, 0, 1)}, "pieces is 0"),
        ({"shares": (0.5, 0.5)}, "shares is .* for 3 stages"),
        ({"shares": (0.5, 0.5, 0.5)}, "shares is"),
        ({"shares": (0.5, 0.5, 0.0)}, "shares is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ProgressiveLengthSettings(**settings)


def test_windows_that_cannot_be_cut_are_refused() -> None:
    technique = ProgressiveLength(ProgressiveLengthSettings(pieces=(3, 1), shares=(0.5, 0.5)))
    with pytest.raises(UsageError, match="a context of 16 cannot be cut into 3"):
        technique.configure(TINY)
