"""Tensor parallelism, by one process and by two."""

from __future__ import annotations

import pytest

from tensorkeep.errors import UsageError
from tensorkeep.testing.technique_suite import TINY
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import NoSettings
from tensorkeep.train.techniques.tensor_parallel import TensorParallel, check_sizes
from train.techniques.several_processes import TAMPER
from train.techniques.together_suite import TogetherSuite, Two


class TestTensorParallel(TogetherSuite):
    technique = TensorParallel
    tampered = {  # noqa: RUF012
        "copy": "parameters of the blocks are not divided",
        "optimizer": "tensors that are not the model's",
    }

    def sabotage(self, run: Run) -> None:
        """Train a model that is not divided."""
        TAMPER["copy"](run)

    def test_each_process_computes_its_heads(self, two: Two) -> None:
        _, said = two
        for process in said:
            assert process["watched"]["proofs"]["tensor-parallel"]["heads"] == 1


def test_muon_needs_whole_matrices() -> None:
    with pytest.raises(UsageError, match="orthogonalises whole matrices, and tensor-parallel divides them"):
        TensorParallel(NoSettings()).configure(TINY.changed({"optim.name": "muon"}))


@pytest.mark.parametrize(("what", "size"), [("n_heads", 3), ("d_ff", 2)])
def test_what_does_not_divide_is_refused(what: str, size: int) -> None:
    config = TINY.changed({"model.d_ff": 33}).model
    with pytest.raises(UsageError, match=f"needs of {what}"):
        check_sizes(config, size)
