"""When techniques are watched: in the first step, and those that show in an update until one is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tensorkeep.errors import TechniqueNotActiveError
from tensorkeep.testing.technique_suite import TINY, with_techniques
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.loop import take_step, train
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.speed import Clock
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques import stack
from tensorkeep.train.techniques.optimizer_offload import OptimizerOffload

SHOWN_IN_UPDATES: dict[str, dict[str, Any]] = {
    "fused-optimizer": {},
    "low-bit-optimizer": {"compiled": False},
    "optimizer-offload": {},
}
IN_FLOAT16 = {"mixed-precision": {"dtype": "fp16"}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)
    prepare(folder / "text.txt", folder / "prepared", tokenizer="char")
    return folder / "prepared"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the offload run on the CPU, where nothing is saved by it."""
    monkeypatch.setattr(OptimizerOffload, "lacks", lambda self, machine: None)


@contextmanager
def opened(folder: Path, data: Path, techniques: Mapping[str, Mapping[str, Any]]) -> Iterator[Run]:
    config: Config = with_techniques(TINY, techniques)
    with open_run(config, RunFolder(folder / "run"), Dataset.open(data)) as run:
        yield run


class Told:
    """Notes in which steps techniques are told of."""

    def __init__(self) -> None:
        self.proofs: dict[str, int] = {}

    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None:
        if kind == "technique":
            assert values["seen"]
            self.proofs[values["name"]] = step


def overflowing_until(run: Run, step: int) -> None:
    """Let gradients overflow in the steps before one, as in float16 until a scale is found."""

    def overflow(gradient: Tensor) -> Tensor:
        return gradient * float("inf") if run.progress.step < step else gradient

    run.model.norm.weight.register_hook(overflow)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", SHOWN_IN_UPDATES)
def test_what_shows_in_updates_is_watched_until_one_is_made(tmp_path: Path, data: Path, name: str) -> None:
    with opened(tmp_path, data, {name: SHOWN_IN_UPDATES[name], **IN_FLOAT16}) as run:
        overflowing_until(run, 3)
        told, updates = Told(), run.operations.update
        train(run, told)
        assert told.proofs == {"mixed-precision": 1, name: 3}
        assert run.operations.update is updates


@pytest.mark.parametrize("name", SHOWN_IN_UPDATES)
def test_what_shows_in_updates_is_caught_in_the_first_one_that_is_made(tmp_path: Path, data: Path, name: str) -> None:
    with opened(tmp_path, data, {name: SHOWN_IN_UPDATES[name], **IN_FLOAT16}) as run:
        overflowing_until(run, 3)
        run.operations.update = lambda: None
        with pytest.raises(TechniqueNotActiveError, match=name):
            train(run, Told())
        assert run.progress.step == 3


@pytest.mark.parametrize("name", SHOWN_IN_UPDATES)
def test_a_technique_that_has_nothing_to_show_ends_the_run_after_some_steps(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(stack, "MOST_WATCHED", 4)
    with opened(tmp_path, data, {name: SHOWN_IN_UPDATES[name]}) as run:
        run.operations.accepts = lambda loss, norm: False
        with pytest.raises(TechniqueNotActiveError, match=f"{name} .*none of 4 steps showed it at work"):
            train(run, Told())
        assert run.progress.step == 4


def test_nobody_is_watched_who_was_seen(tmp_path: Path, data: Path) -> None:
    with opened(tmp_path, data, {"fused-optimizer": {}, "mixed-precision": {"dtype": "bf16"}}) as run:
        watched: list[str] = []
        for each in run.techniques.techniques:
            each.verify = noted(watched, each.name, each.verify)  # type: ignore[method-assign]
        for _ in range(3):
            with run.techniques.verified(run):
                take_step(run)
        assert watched == ["mixed-precision", "fused-optimizer"]


def test_what_is_rehearsed_counts_as_the_first_step(tmp_path: Path, data: Path) -> None:
    with opened(tmp_path, data, {"fused-optimizer": {}}) as run:
        now = [0.0]
        run.clock = Clock(lambda: now[0])
        run.techniques.techniques[0].rehearse = lambda run: now.append(now.pop() + 100)  # type: ignore[method-assign]
        train(run, Told(), stop=lambda: True)
        assert run.clock.seconds["first step"] == 100
        assert "train" not in run.clock.seconds


def noted(watched: list[str], name: str, verify: Callable[[Run], Any]) -> Callable[[Run], Any]:
    def noting(run: Run) -> Any:
        watched.append(name)
        return verify(run)

    return noting
