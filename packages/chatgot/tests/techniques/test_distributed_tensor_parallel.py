"""Tensor parallelism, by one process and by two."""

import pytest

from chatgot.techniques.tensor_parallel import TensorParallel, check_sizes
from chatgot.testing import TINY
from techniques.parallel_suite import ProcessRun, ShardedSuite
from tensorkeep.errors import UsageError

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

GROUPED = {"model.positions": "rotary", "model.n_heads": 4, "model.kv_heads": 2, "model.qk_norm": True}
GROUPED |= {"model.norm": "rmsnorm", "model.activation": "swiglu", "ema.decay": 0.9}


@pytest.mark.exhaustive
class TestTensorParallel(ShardedSuite):
    technique = TensorParallel
    models = (*ShardedSuite.models, GROUPED)

    def test_each_process_computes_its_heads(self, together: ProcessRun) -> None:
        for process in together.results:
            assert process["verified"]["proofs"]["tensor-parallel"]["heads"] == 1


@pytest.mark.parametrize(("name", "size"), [("n_heads", 3), ("d_ff", 2)])
def test_sizes_that_cannot_be_split_equally_are_refused(name: str, size: int) -> None:
    config = TINY.changed({"model.d_ff": 33}).model
    with pytest.raises(UsageError, match=f"cannot split {name}"):
        check_sizes(config, size)
