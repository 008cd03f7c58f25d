"""Techniques beside those that divide weights among processes: what they watch are divided tensors, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tensorkeep.errors import TechniqueNotActiveError
from tensorkeep.testing.technique_suite import TINY, with_techniques
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.loop import take_step
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from train.techniques.several_processes import group_of_one


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)
    prepare(folder / "text.txt", folder / "prepared", tokenizer="char")
    return folder / "prepared"


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with group_of_one():
        yield


@contextmanager
def opened(folder: Path, data: Path, techniques: Mapping[str, Mapping[str, Any]]) -> Iterator[Run]:
    with open_run(with_techniques(TINY, techniques), RunFolder(folder / "run"), Dataset.open(data)) as run:
        yield run


@pytest.mark.parametrize("dividing", ["fsdp", "tensor-parallel"])
def test_a_group_of_divided_weights_that_is_not_fused_is_caught(tmp_path: Path, data: Path, dividing: str) -> None:
    with opened(tmp_path, data, {dividing: {}, "fused-optimizer": {}}) as run:
        groups = run.optimizers["adamw"].param_groups
        with run.techniques.verified(run):
            take_step(run)
        figures = run.techniques.proofs["fused-optimizer"].figures
        assert figures == {"calls": 2, "weights": sum(len(group["params"]) for group in groups)}
        run.techniques.proofs.clear()
        groups[1]["fused"] = False
        with pytest.raises(TechniqueNotActiveError, match="1 of 2 groups"), run.techniques.verified(run):
            take_step(run)


def test_the_kernel_of_divided_heads_is_known(tmp_path: Path, data: Path) -> None:
    with opened(tmp_path, data, {"tensor-parallel": {}, "attention-kernel": {"kernel": "math"}}) as run:
        with run.techniques.verified(run):
            take_step(run)
        assert run.techniques.proofs["attention-kernel"].figures == {"kernel": "math", "times": 4}


def test_the_activation_of_a_divided_hidden_layer_is_compared(tmp_path: Path, data: Path) -> None:
    with opened(tmp_path, data, {"tensor-parallel": {}, "activation-function": {"activation": "swiglu"}}) as run:
        with run.techniques.verified(run):
            take_step(run)
        assert run.techniques.proofs["activation-function"].figures["activation"] == "swiglu"
