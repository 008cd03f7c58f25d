"""Fully sharded data parallel, by one process and by two."""

from __future__ import annotations

import pytest

from tensorkeep.errors import UsageError
from tensorkeep.testing.technique_suite import TINY
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import NoSettings
from tensorkeep.train.techniques.fsdp import Fsdp
from train.techniques.several_processes import TAMPER
from train.techniques.together_suite import TogetherSuite, Two


class TestFsdp(TogetherSuite):
    technique = Fsdp
    tampered = {  # noqa: RUF012
        "copy": "parameters are not divided",
        "optimizer": "tensors that are not the model's",
    }
    stepped = {  # noqa: RUF012
        "less memory": {"techniques.activation-checkpointing": "on", "techniques.mixed-precision.dtype": "bf16"},
    }

    def sabotage(self, run: Run) -> None:
        """Train a model that is not divided."""
        TAMPER["copy"](run)

    def test_each_process_has_its_share_of_the_bytes(self, two: Two) -> None:
        _, said = two
        for process in said:
            seen = process["watched"]["proofs"]["fsdp"]
            assert seen["local_bytes"] == pytest.approx(seen["whole_bytes"] / 2, rel=0.01)

    def test_activations_are_computed_again_and_in_16_bits_beside_it(self, two: Two) -> None:
        _, said = two
        for process in said:
            assert set(process["less memory"]["proofs"]) == {"fsdp", "activation-checkpointing", "mixed-precision"}


def test_muon_needs_whole_matrices() -> None:
    with pytest.raises(UsageError, match="orthogonalises whole matrices, and fsdp divides them"):
        Fsdp(NoSettings()).configure(TINY.changed({"optim.name": "muon"}))
