"""Curriculum by length: the documents that windows come from, stage by stage."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatgot.data.prepare import prepare
from chatgot.run.state import OpenRun
from chatgot.step.state import StepState
from chatgot.step.train_step import take_step
from chatgot.techniques.length_curriculum import LengthCurriculum
from chatgot.testing import TechniqueSuite, opened, whole_run
from tensorkeep.errors import UsageError


def stages_of(run: OpenRun) -> Any:
    return run.techniques.techniques[0]._stages  # type: ignore[attr-defined]


class TestLengthCurriculum(TechniqueSuite):
    technique = LengthCurriculum
    # The suite resumes after step 3: between two stages, and within a stage.
    variants = ({}, pytest.param({"stages": 2, "share": 0.9}, marks=pytest.mark.exhaustive))

    @pytest.fixture(scope="class")
    @classmethod
    def data(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Prepare documents of 4 to 200 characters; each has its own letter, and spaces."""
        folder = tmp_path_factory.mktemp("documents")
        (folder / "texts").mkdir()
        for number in range(50):
            (folder / "texts" / f"{number:02d}.txt").write_text(chr(ord("A") + number) + " " * (3 + 4 * number))
        return prepare(folder / "texts", folder / "prepared", tokenizer="char").path

    def break_on_purpose(self, run: StepState) -> None:
        """Use the batches that the run was built with."""
        run.batches = run.batches.inner  # type: ignore[attr-defined]

    def test_stages_add_longer_documents_with_equal_numbers_of_tokens(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            stages, whole = stages_of(run), len(run.dataset.train)
            longest = 2 * 200
            for number, stage in enumerate(stages, start=1):
                assert whole * number / 4 - longest < stage.tokens <= whole * number / 4
            means = [stage.tokens / stage.documents for stage in stages]
            assert means == sorted(means)
            assert stages[-1].tokens == whole
            # A stage has exactly the shortest documents.
            end = run.dataset.tokenizer.end_of_document
            documents = np.split(run.dataset.train, np.flatnonzero(run.dataset.train == end) + 1)[:-1]
            stage = stages[0]
            text = np.concatenate(sorted(documents, key=len)[: stage.documents])
            assert stage.tokens == len(text)
            windows = {tuple(text[begin : begin + 16]) for begin in range(len(text) - 16)}
            drawn = [row for place in range(40) for row in stage.batches.at(place)[0].tolist()]
            assert {tuple(row) for row in drawn} <= windows

    def test_last_stage_draws_the_batches_of_the_plain_run(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config, tmp_path / "plain", data) as run:
            plain = [run.batches.at(place)[0] for place in range(12)]
        with opened(self.config_with({}), tmp_path / "on", data) as run:
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

    def test_proof_has_the_mean_length(self, data: Path) -> None:
        figures = whole_run(self.config_with({}), data).proofs["length-curriculum"].figures
        assert figures["stage"] == 1
        assert figures["mean_length"] < figures["mean_length_of_all"]

    def test_first_stage_below_a_window_and_text_of_one_document_are_refused(self, tmp_path: Path, data: Path) -> None:
        config = self.config_with({"stages": 100}).changed({"model.context_length": 64})
        with pytest.raises(UsageError, match="shortest documents have"), opened(config, tmp_path / "run", data):
            pass
        (tmp_path / "text.txt").write_text("one text " * 200)
        one = prepare(tmp_path / "text.txt", tmp_path / "prepared", tokenizer="char").path
        refused = pytest.raises(UsageError, match="the text is one document")
        with refused, opened(self.config_with({}), tmp_path / "other", one):
            pass
