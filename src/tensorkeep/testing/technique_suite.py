"""The exam of a technique.

Subclass it in your tests, say which technique sits it, and let it be silently inactive in some way: it must be caught::

    class TestMyTechnique(TechniqueSuite):
        technique = my_package.my_technique.MyTechnique

        def sabotage(self, run):
            run.model.blocks[0].forward = type(run.model.blocks[0]).forward.__get__(run.model.blocks[0])
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import torch

from tensorkeep.checkpoint.manager.manager import CheckpointManager
from tensorkeep.errors import TechniqueNotActiveError
from tensorkeep.testing.equality import difference
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.loop import take_step, train
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.run.device import chosen_device
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import TECHNIQUE_CLASSES, Changed, Kind, Technique
from tensorkeep.train.techniques.machine import Machine

STEPS = 6

TINY = Config(
    recipe="tiny",
    model=ModelConfig(
        vocab_size=1, context_length=16, n_layers=2, n_heads=2, d_model=32, dropout=0.1, tied=True, bias=True
    ),
).changed(
    {
        "loop.steps": STEPS,
        "loop.batch_size": 4,
        "loop.accumulate": 2,
        "loop.device": "cpu",
        "eval.every": 3,
        "checkpoint.every": 2,
        "checkpoint.asynchronous": False,
        "log.every": 1,
    }
)
"""What the exam trains: dropout, tied weights, biases, accumulation."""

_TEXT = "the quick brown fox jumps over the lazy dog; " * 60


class _Nobody:
    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None: ...


def with_techniques(config: Config, techniques: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return a configuration in which techniques are on, with their settings."""
    return config.changed({f"techniques.{name}": dict(settings) for name, settings in techniques.items()})


def train_run(config: Config, folder: Path, data: Path, *, resume: bool = False, stop_after: int | None = None) -> None:
    """Train in a folder, until the end or so many steps of this process."""
    left = [stop_after]

    def stop() -> bool:
        if left[0] is not None:
            left[0] -= 1
        return left[0] == 0

    with open_run(config, RunFolder(folder), Dataset.open(data), resume=resume) as run:
        train(run, _Nobody(), stop=stop)


def losses(folder: Path) -> list[tuple[int, str, float]]:
    """Return the step, kind and value of each loss in a run's log."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    names = {"train": "loss", "evaluate": "validation_loss"}
    return [(line["step"], line["kind"], line[names[line["kind"]]]) for line in lines if line["kind"] in names]


def last_state(folder: Path) -> dict[str, Any]:
    """Return the last checkpoint of a run, without the random states that nothing draws from."""
    state: dict[str, Any] = CheckpointManager(folder / "checkpoints").restore()
    for unused in ("numpy", "python"):
        del state["rng"][unused]
    return state


class TechniqueSuite:
    """What every technique has to do, on a tiny run on the CPU, or where its tests say."""

    technique: ClassVar[type[Technique]]
    variants: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    """Settings that the exam is sat with, one after the other."""

    config: ClassVar[Config] = TINY

    @pytest.fixture(scope="class")
    @classmethod
    def data(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Prepare a text."""
        folder = tmp_path_factory.mktemp("data")
        (folder / "text.txt").write_text(_TEXT)
        prepare(folder / "text.txt", folder / "prepared", tokenizer="char")
        return folder / "prepared"

    @pytest.fixture(autouse=True)
    def here(self) -> None:
        """Skip, with the reason, what this machine cannot run."""
        machine = Machine(chosen_device(self.config.loop.device))
        for variant in self.variants:
            lack = self.technique(self._settings(variant)).lacks(machine)
            if lack is not None:
                pytest.skip(f"{self.technique.name} {lack}")

    def _settings(self, variant: Mapping[str, Any]) -> Any:
        return self.technique.Settings(**variant)

    def on(self, variant: Mapping[str, Any]) -> Config:
        """Return the configuration of the exam with the technique on."""
        return with_techniques(self.config, {self.technique.name: variant})

    def sabotage(self, run: Run) -> None:
        """Let a technique that was applied be silently inactive in this run; to be overridden."""
        raise NotImplementedError

    def test_it_says_what_it_is(self) -> None:
        """It declares a kind, sentences for people, a reference, and is registered by its name."""
        assert TECHNIQUE_CLASSES.get(self.technique.name) is self.technique
        assert self.technique.kind in get_args(Kind)
        assert self.technique.changes in get_args(Changed)
        for text in (self.technique.summary, self.technique.effect, self.technique.reference):
            assert text and "\n" not in text and not text.endswith(".")
        self._settings({})
        for other, reason in self.technique.conflicts.items():
            assert other in TECHNIQUE_CLASSES.names() and reason

    def test_losses_stay_where_its_kind_says(self, tmp_path: Path, data: Path) -> None:
        """A systems technique leaves the losses where they were; an algorithmic one leaves them finite."""
        train_run(self.config, tmp_path / "plain", data)
        plain = losses(tmp_path / "plain")
        for number, variant in enumerate(self.variants):
            train_run(self.on(variant), tmp_path / str(number), data)
            found = losses(tmp_path / str(number))
            assert [each[:2] for each in found] == [each[:2] for each in plain]
            if self.technique.kind == "systems":
                tolerance = self.technique.tolerance
                assert [each[2] for each in found] == (
                    pytest.approx([each[2] for each in plain], rel=tolerance)
                    if tolerance
                    else [each[2] for each in plain]
                )
            assert all(each[2] < 20 for each in found)

    def test_a_run_goes_on_exactly(self, tmp_path: Path, data: Path) -> None:
        """A run that was stopped and goes on ends as one that was not, bit for bit."""
        for number, variant in enumerate(self.variants):
            whole, parts = tmp_path / f"whole{number}", tmp_path / f"parts{number}"
            train_run(self.on(variant), whole, data)
            train_run(self.on(variant), parts, data, stop_after=STEPS // 2)
            train_run(RunFolder(parts).record().config, parts, data, resume=True)
            assert losses(parts) == losses(whole)
            assert difference(last_state(parts), last_state(whole)) is None

    def test_weights_keep_their_names(self, tmp_path: Path, data: Path) -> None:
        """What is saved with the technique is a model without it."""
        for number, variant in enumerate(self.variants):
            with open_run(self.on(variant), RunFolder(tmp_path / str(number)), Dataset.open(data)) as run:
                names = list(run.model.state_dict())
                config = run.config.model
            assert names == list(type(run.model)(config, device="meta").state_dict())

    def test_it_is_seen_at_work(self, tmp_path: Path, data: Path) -> None:
        """Its proof is a sentence with figures, and nothing that watches stays behind."""
        for number, variant in enumerate(self.variants):
            with open_run(self.on(variant), RunFolder(tmp_path / str(number)), Dataset.open(data)) as run:
                before = _hooks(run)
                with run.techniques.verified(run):
                    take_step(run)
                proof = run.techniques.proofs[self.technique.name]
                assert proof.seen and "\n" not in proof.seen
                assert proof.figures
                assert _hooks(run) == before

    def test_it_is_caught_when_it_is_not_active(self, tmp_path: Path, data: Path) -> None:
        """Asked for but not at work is an error that names the technique."""
        for number, variant in enumerate(self.variants):
            with open_run(self.on(variant), RunFolder(tmp_path / str(number)), Dataset.open(data)) as run:
                self.sabotage(run)
                with (
                    pytest.raises(TechniqueNotActiveError, match=self.technique.name),
                    run.techniques.verified(run),
                ):
                    take_step(run)

    def test_the_process_is_left_as_it_was(self, tmp_path: Path, data: Path) -> None:
        """Threads, default dtype and the like are those of before when a run is closed."""
        for number, variant in enumerate(self.variants):
            before = _process()
            train_run(self.on(variant), tmp_path / str(number), data, stop_after=1)
            assert _process() == before


def _hooks(run: Run) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in run.model.modules())


def _process() -> dict[str, Any]:
    kernels = [f"{name}_sdp_enabled" for name in ("flash", "mem_efficient", "math")]
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "kernels": [getattr(torch.backends.cuda, name)() for name in kernels],
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
