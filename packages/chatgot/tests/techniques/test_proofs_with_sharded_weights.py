"""Proofs of other techniques in runs with sharded weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from chatgot.testing import TINY, opened, verified_step, with_techniques
from techniques.several_processes import group_of_one
from tensorkeep.errors import TechniqueNotActiveError
from tiers import exhaustive

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with group_of_one():
        yield


@pytest.mark.parametrize("sharding", ["fsdp", *exhaustive("tensor-parallel")])
def test_group_of_sharded_weights_that_is_not_fused_is_an_error(tmp_path: Path, data: Path, sharding: str) -> None:
    with opened(with_techniques(TINY, {sharding: {}, "fused-optimizer": {}}), tmp_path / "run", data) as run:
        groups = run.optimizers["adamw"].param_groups
        figures = verified_step(run)["fused-optimizer"]
        assert figures == {"calls": 2, "weights": sum(len(group["params"]) for group in groups)}
        run.techniques.proofs.clear()
        groups[1]["fused"] = False
        with pytest.raises(TechniqueNotActiveError, match="1 of 2 groups"):
            verified_step(run)


def test_kernel_of_sharded_heads_is_recognised(tmp_path: Path, data: Path) -> None:
    config = with_techniques(TINY, {"tensor-parallel": {}, "attention-kernel": {"kernel": "math"}})
    with opened(config, tmp_path / "run", data) as run:
        assert verified_step(run)["attention-kernel"] == {"kernel": "math", "times": 4}


def test_activation_of_a_sharded_hidden_layer_is_compared(tmp_path: Path, data: Path) -> None:
    config = with_techniques(TINY, {"tensor-parallel": {}, "activation-function": {"activation": "swiglu"}})
    with opened(config, tmp_path / "run", data) as run:
        assert verified_step(run)["activation-function"]["activation"] == "swiglu"
