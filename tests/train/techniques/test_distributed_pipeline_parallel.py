"""Pipeline parallelism, by one process and by two."""

from __future__ import annotations

import pytest

from tensorkeep.errors import UsageError
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.pipeline_parallel import PipelineParallel, PipelineSettings
from train.techniques.several_processes import TAMPER
from train.techniques.together_suite import TogetherSuite, Two


class TestPipelineParallel(TogetherSuite):
    technique = PipelineParallel
    variants = ({}, {"schedule": "gpipe", "parts": 2})
    tampered = {"all weights": "weights of others"}  # noqa: RUF012
    stepped = {  # noqa: RUF012
        "gpipe": {"techniques.pipeline-parallel.schedule": "gpipe"},
        "bf16": {"techniques.mixed-precision.dtype": "bf16"},
        "fp16": {"techniques.mixed-precision.dtype": "fp16"},
        "few blocks": {"model.n_layers": 1},
        "uneven parts": {"techniques.pipeline-parallel.parts": 3},
    }

    def sabotage(self, run: Run) -> None:
        """Compute whole batches."""
        TAMPER["at once"](run)

    def test_each_process_has_its_blocks_and_what_is_at_its_end(self, two: Two) -> None:
        _, said = two
        seen = [process["gpipe"]["proofs"]["pipeline-parallel"] for process in said]
        assert [each["blocks"] for each in seen] == [1, 1]
        # Of a block twelve; of the rest both have the tied weight, the first positions, the last a norm.
        assert [each["weights"] for each in seen] == [12 + 2, 12 + 3]

    def test_sixteen_bits_go_through_and_float16_is_refused(self, two: Two) -> None:
        _, said = two
        for process in said:
            assert set(process["bf16"]["proofs"]) == {"pipeline-parallel", "mixed-precision"}
            assert "before its loss could be scaled" in process["fp16"]["message"]

    def test_what_does_not_go_round_is_refused(self, two: Two) -> None:
        _, said = two
        for process in said:
            assert "1 blocks are too few for 2 processes" in process["few blocks"]["message"]
            assert "8 sequences of a step pass in 3 parts" in process["uneven parts"]["message"]


def test_parts_have_bounds() -> None:
    with pytest.raises(UsageError, match="parts"):
        PipelineSettings(parts=0)
