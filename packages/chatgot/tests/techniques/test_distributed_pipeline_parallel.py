"""Pipeline parallelism, by one process and by two."""

import pytest

from chatgot.run.state import OpenRun
from chatgot.techniques.pipeline_parallel import PipelineParallel
from techniques.parallel_suite import ParallelSuite, ProcessRun
from techniques.several_processes import BREAKS

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]


@pytest.mark.exhaustive
class TestPipelineParallel(ParallelSuite):
    technique = PipelineParallel
    variants = ({}, pytest.param({"schedule": "gpipe", "parts": 2}, marks=pytest.mark.exhaustive))
    broken = {"all weights": "weights of other stages"}  # noqa: RUF012
    stepped = {  # noqa: RUF012
        "gpipe": {"techniques.pipeline-parallel.schedule": "gpipe"},
        "bf16": {"techniques.mixed-precision.dtype": "bf16"},
        "fp16": {"techniques.mixed-precision.dtype": "fp16"},
        "few blocks": {"model.n_layers": 1},
        "unequal parts": {"techniques.pipeline-parallel.parts": 3},
    }

    def break_on_purpose(self, run: OpenRun) -> None:
        """Compute whole batches."""
        BREAKS["at once"](run)

    def test_each_process_has_its_blocks_and_the_ends_their_layers(self, together: ProcessRun) -> None:
        figures = [process["gpipe"]["proofs"]["pipeline-parallel"] for process in together.results]
        assert [each["blocks"] for each in figures] == [1, 1]
        # Twelve of a block; both also have the tied weight, the first one the positions, the last one a norm.
        assert [each["weights"] for each in figures] == [12 + 2, 12 + 3]

    def test_bfloat16_is_proved_and_what_cannot_be_scaled_or_split_is_refused(self, together: ProcessRun) -> None:
        for process in together.results:
            assert set(process["bf16"]["proofs"]) == {"pipeline-parallel", "mixed-precision"}
            assert "before its loss could be scaled" in process["fp16"]["message"]
            assert "1 blocks are too few for 2 processes" in process["few blocks"]["message"]
            assert "8 sequences of a step cannot be split into 3" in process["unequal parts"]["message"]
