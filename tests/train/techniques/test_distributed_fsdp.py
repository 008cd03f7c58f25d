"""Fully sharded data parallel, by one process and by two."""

import pytest

from tensorkeep.errors import UsageError
from tensorkeep.testing.technique_suite import TINY
from tensorkeep.train.run.setup import OpenRun
from tensorkeep.train.techniques.base import NoSettings
from tensorkeep.train.techniques.parallel.fsdp import Fsdp
from train.techniques.parallel_suite import ParallelSuite, Two
from train.techniques.several_processes import BREAKS


class TestFsdp(ParallelSuite):
    technique = Fsdp
    broken = {  # noqa: RUF012
        "copy": "parameters are not sharded",
        "optimizer": "tensors that are not the model's",
    }
    stepped = {  # noqa: RUF012
        "less memory": {"techniques.activation-checkpointing": "on", "techniques.mixed-precision.dtype": "bf16"},
    }

    def break_on_purpose(self, run: OpenRun) -> None:
        """Train a model that is not sharded."""
        BREAKS["copy"](run)

    def test_each_process_has_half_of_the_bytes(self, two: Two) -> None:
        _, results = two
        for process in results:
            figures = process["verified"]["proofs"]["fsdp"]
            assert figures["local_bytes"] == pytest.approx(figures["whole_bytes"] / 2, rel=0.01)

    def test_it_works_with_checkpointing_and_mixed_precision(self, two: Two) -> None:
        _, results = two
        for process in results:
            assert set(process["less memory"]["proofs"]) == {"fsdp", "activation-checkpointing", "mixed-precision"}


def test_muon_is_refused() -> None:
    with pytest.raises(UsageError, match="orthogonalises full matrices, and fsdp shards them"):
        Fsdp(NoSettings()).configure(TINY.changed({"optim.name": "muon"}))
