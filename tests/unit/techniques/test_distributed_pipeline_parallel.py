"""Pipeline parallelism, by one process and by two."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.train.run import Run
from holdfast.train.techniques.pipeline_parallel import PipelineParallel, PipelineSettings

sys.path.insert(0, str(Path(__file__).parent))
from several_processes import EXACT, TAMPER, task, trained_by
from together_suite import TogetherSuite


class TestPipelineParallel(TogetherSuite):
    technique = PipelineParallel
    variants = ({}, {"schedule": "gpipe", "parts": 2})
    tampered = {"all weights": "weights of others"}  # noqa: RUF012

    def sabotage(self, run: Run) -> None:
        """Compute whole batches."""
        TAMPER["at once"](run)

    def test_each_process_has_its_blocks_and_what_is_at_its_end(self, tmp_path: Path, data: Path) -> None:
        config = EXACT.changed({"techniques.pipeline-parallel.schedule": "gpipe"})
        first, second = trained_by(2, [task("step", config, tmp_path / "run", data)], tmp_path)
        seen = [said[0]["proofs"]["pipeline-parallel"] for said in (first, second)]
        assert [each["blocks"] for each in seen] == [1, 1]
        # Of a block twelve; of the rest both have the tied weight, the first positions, the last a norm.
        assert [each["weights"] for each in seen] == [12 + 2, 12 + 3]

    def test_sixteen_bits_go_through_and_float16_is_refused(self, tmp_path: Path, data: Path) -> None:
        tasks = [
            task(
                "step",
                self.together(EXACT.changed({"techniques.mixed-precision.dtype": name})),
                tmp_path / name,
                data,
            )
            for name in ("bf16", "fp16")
        ]
        for bf16, fp16 in trained_by(2, tasks, tmp_path):
            assert set(bf16["proofs"]) == {"pipeline-parallel", "mixed-precision"}
            assert "before its loss could be scaled" in fp16["message"]

    def test_what_does_not_go_round_is_refused(self, tmp_path: Path, data: Path) -> None:
        few = self.together(EXACT.changed({"model.n_layers": 1}))
        uneven = EXACT.changed({"techniques.pipeline-parallel.parts": 3})
        tasks = [task("step", few, tmp_path / "few", data), task("step", uneven, tmp_path / "uneven", data)]
        for said in trained_by(2, tasks, tmp_path):
            assert "1 blocks are too few for 2 processes" in said[0]["message"]
            assert "8 sequences of a step pass in 3 parts" in said[1]["message"]


def test_parts_have_bounds() -> None:
    with pytest.raises(UsageError, match="parts"):
        PipelineSettings(parts=0)
