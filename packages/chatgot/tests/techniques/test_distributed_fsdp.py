"""Fully sharded data parallel, by one process and by two."""

from pathlib import Path

import pytest

from chatgot.techniques.fsdp import Fsdp
from techniques.parallel_suite import ProcessRun, ShardedSuite
from techniques.several_processes import EXACT, Task, task

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]


@pytest.mark.exhaustive
class TestFsdp(ShardedSuite):
    technique = Fsdp
    broken = ShardedSuite.broken | {"each batch": "[28, 28] of 28 gradients had been exchanged"}
    stepped = {  # noqa: RUF012
        "three batches": {"loop.gradient_accumulation_steps": 3},
        "early": {"techniques.fsdp.sync_each_batch": True},
        "less memory": {"techniques.activation-checkpointing": "on", "techniques.mixed-precision.dtype": "bf16"},
    }

    @classmethod
    def _tasks(cls, folder: Path, data: Path) -> dict[str, Task]:
        once, early = cls.with_technique(EXACT), EXACT.changed({"techniques.fsdp.sync_each_batch": True})
        return {
            **super()._tasks(folder, data),
            "collectives": task("collectives", once, folder / "collectives", data),
            "early collectives": task("collectives", early, folder / "early-collectives", data),
        }

    def test_each_process_has_half_of_the_bytes(self, together: ProcessRun) -> None:
        for process in together.results:
            figures = process["verified"]["proofs"]["fsdp"]
            assert figures["local_bytes"] == pytest.approx(figures["whole_bytes"] / 2, rel=0.01)

    def test_gradients_are_exchanged_once_in_a_step(self, together: ProcessRun) -> None:
        """The two blocks and the root have a reduce-scatter each, whatever the number of micro-batches."""
        for process in together.results:
            for name, batches, exchanges in (("verified", 2, 1), ("early", 2, 2), ("three batches", 3, 1)):
                figures = process[name]["proofs"]["fsdp"]
                assert (figures["batches"], figures["exchanges"]) == (batches, exchanges)
            assert process["collectives"]["_reduce_scatter_base_"] == 3
            assert process["early collectives"]["_reduce_scatter_base_"] == 3 * 2
            assert process["early"]["record"]["loss"] == pytest.approx(process["verified"]["record"]["loss"], rel=1e-7)

    def test_it_works_with_checkpointing_and_mixed_precision(self, together: ProcessRun) -> None:
        for process in together.results:
            assert set(process["less memory"]["proofs"]) == {"fsdp", "activation-checkpointing", "mixed-precision"}
