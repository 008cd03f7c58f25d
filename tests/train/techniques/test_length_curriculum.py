"""Short documents first: which documents windows come from, stage by stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensorkeep.errors import UsageError
from tensorkeep.testing.technique_suite import TechniqueSuite
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.loop import take_step
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.length_curriculum import LengthCurriculum
from tensorkeep.train.techniques.stack import Stack


def stages_of(run: Run) -> Any:
    return run.batches.stages  # type: ignore[attr-defined]


class TestLengthCurriculum(TechniqueSuite):
    technique = LengthCurriculum
    # The run of the exam stops after step 3: between two stages, and in the middle of one.
    variants = ({}, {"stages": 2, "share": 0.9})

    @pytest.fixture(scope="class")
    @classmethod
    def data(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Prepare documents of 4 to 200 characters; a document has one letter of its own, and spaces."""
        folder = tmp_path_factory.mktemp("documents")
        (folder / "texts").mkdir()
        for number in range(50):
            (folder / "texts" / f"{number:02d}.txt").write_text(chr(ord("A") + number) + " " * (3 + 4 * number))
        prepare(folder / "texts", folder / "prepared", tokenizer="char")
        return folder / "prepared"

    def sabotage(self, run: Run) -> None:
        """Let the run keep the batches that it was built with."""
        run.batches = run.batches.plain  # type: ignore[attr-defined]

    def test_stages_have_ever_longer_documents_and_equal_shares_of_the_tokens(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            stages, whole = stages_of(run), len(run.dataset.train)
            longest = 2 * 200
            for number, stage in enumerate(stages, start=1):
                assert whole * number / 4 - longest < stage.tokens <= whole * number / 4
            means = [stage.tokens / stage.documents for stage in stages]
            assert means == sorted(means)
            assert stages[-1].tokens == whole

    def test_a_stage_has_the_shortest_documents_whole_and_no_others(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            end = run.dataset.tokenizer.end_of_document
            documents = np.split(run.dataset.train, np.flatnonzero(run.dataset.train == end) + 1)[:-1]
            shortest = sorted(documents, key=len)
            stage = stages_of(run)[0]
            text = np.concatenate(shortest[: stage.documents])
            assert stage.tokens == len(text)
            windows = {tuple(text[begin : begin + 16]) for begin in range(len(text) - 16)}
            drawn = [row for place in range(40) for row in stage.batches.at(place)[0].tolist()]
            assert {tuple(row) for row in drawn} <= windows

    def test_the_last_stage_draws_what_the_run_would_have_drawn(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.config, RunFolder(tmp_path / "plain"), Dataset.open(data)) as run:
            plain = [run.batches.at(place)[0] for place in range(12)]
        with open_run(self.on({}), RunFolder(tmp_path / "on"), Dataset.open(data)) as run:
            seen: list[torch.Tensor] = []
            inner = run.operations.loss

            def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
                seen.append(inputs)
                return inner(inputs, targets)

            run.operations.loss = loss
            for _ in range(6):
                take_step(run)
        # Two batches a step; the last stage begins with step 4.
        assert [torch.equal(*pair) for pair in zip(seen, plain, strict=True)] == [False] * 6 + [True] * 6

    def test_the_proof_tells_how_long_documents_are(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            with run.techniques.verified(run):
                take_step(run)
            figures = run.techniques.proofs["length-curriculum"].figures
            assert figures["stage"] == 1
            assert figures["mean_length"] < figures["mean_length_of_all"]

    def test_a_first_stage_without_a_whole_window_is_refused(self, tmp_path: Path, data: Path) -> None:
        with (
            pytest.raises(UsageError, match="shortest documents have"),
            open_run(
                self.on({"stages": 100}).changed({"model.context_length": 64}),
                RunFolder(tmp_path / "run"),
                Dataset.open(data),
            ),
        ):
            pass

    @pytest.mark.parametrize("other", ["ddp", "fsdp", "pipeline-parallel"])
    def test_what_makes_other_batches_of_the_runs_is_refused(self, other: str) -> None:
        with pytest.raises(UsageError, match=f"length-curriculum and {other}|{other} and length-curriculum"):
            Stack.of({"length-curriculum": {}, other: {}})

    def test_a_text_without_documents_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "text.txt").write_text("one text " * 200)
        prepare(tmp_path / "text.txt", tmp_path / "prepared", tokenizer="char")
        with (
            pytest.raises(UsageError, match="the text is one"),
            open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(tmp_path / "prepared")),
        ):
            pass
