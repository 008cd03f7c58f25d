"""Conformance suite of a training technique.

Subclass it in your tests, name the technique, and break a run on purpose: the technique must raise
TechniqueNotActiveError::

    class TestMyTechnique(TechniqueSuite):
        technique = my_package.my_technique.MyTechnique

        def break_on_purpose(self, run):
            run.model.blocks[0].forward = type(run.model.blocks[0]).forward.__get__(run.model.blocks[0])
"""

import itertools
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any, ClassVar, get_args

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from chatgot.config.config import Config
from chatgot.data.dataset import Dataset
from chatgot.data.prepare import prepare
from chatgot.loop import Silent, train
from chatgot.model.config import ModelConfig
from chatgot.run.folder import RunFolder
from chatgot.run.setup import open_run
from chatgot.run.state import OpenRun
from chatgot.step.device import chosen_device
from chatgot.step.state import StepState
from chatgot.step.train_step import take_step
from chatgot.techniques.base import TECHNIQUE_CLASSES, Changed, Kind, Machine, Proof, Technique
from tensorkeep import CheckpointManager
from tensorkeep.errors import TechniqueNotActiveError
from tensorkeep.testing.equality import difference

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
        "loop.gradient_accumulation_steps": 2,
        "loop.device": "cpu",
        "eval.every": 3,
        "checkpoint.every": 3,
        "checkpoint.asynchronous": False,
        "log.every": 1,
    }
)
"""The run that is trained: with dropout, tied weights, biases and accumulation."""

# Catches an update of half the length, or none; tolerates other zeros of dropout and states of 4 bits.
_DISTANCE_TOLERANCE = 0.25

_TEXT = "the quick brown fox jumps over the lazy dog; " * 60


def with_techniques(config: Config, techniques: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return a configuration with techniques on, from their settings by name."""
    return config.changed({f"techniques.{name}": dict(settings) for name, settings in techniques.items()})


def prepared_text(folder: Path) -> Path:
    """Prepare a short text in a folder, once; return the prepared data."""
    if not (folder / "prepared").exists():
        folder.mkdir(exist_ok=True)
        (folder / "text.txt").write_text(_TEXT)
        prepare(folder / "text.txt", folder / "prepared", tokenizer="char")
    return folder / "prepared"


def opened(config: Config, folder: Path, data: Path) -> AbstractContextManager[OpenRun]:
    """Open a new run in a folder."""
    return open_run(config, RunFolder(folder), Dataset.open(data))


def train_run(config: Config, folder: Path, data: Path, *, resume: bool = False, stop_after: int | None = None) -> None:
    """Train in a folder to the end, or for a number of steps."""
    steps = itertools.count(1)
    with open_run(config, RunFolder(folder), Dataset.open(data), resume=resume) as run:
        train(run, Silent(), stop=lambda: next(steps) == stop_after)


def killed_copy(run: Path, folder: Path, *, step: int) -> Path:
    """Copy a finished run to a new folder, as if it had been killed after the checkpoint of a step; return the copy."""
    # A killed run has the checkpoints so far, and a log that may be longer.
    copytree(run, folder)
    for each in (folder / "checkpoints").glob("step-*"):
        if int(each.name.removeprefix("step-")) > step:
            rmtree(each)
    return folder


@dataclass(frozen=True)
class WholeRun:
    """What was recorded of a run that was trained to its end."""

    folder: Path
    start: Mapping[str, Tensor]
    """The full weights before the first step, also if they are sharded."""
    plain_names: Sequence[str]
    """The names of the weights of the same model without techniques."""
    proofs: Mapping[str, Proof]
    hooks: tuple[int, int]
    """The number of hooks of modules, before the first step and after the last one."""
    settings: tuple[dict[str, Any], dict[str, Any]]
    """The settings of the process before the run was opened, and after it was closed."""


_WHOLE_RUNS: dict[Path, WholeRun] = {}


def whole_run(config: Config, data: Path) -> WholeRun:
    """Train a run with a configuration to its end, once for all tests, and return what was recorded."""
    # The name identifies the configuration, so that tests of several classes share a run.
    folder = data.parent / f"trained-{zlib.crc32(json.dumps(config.as_dict(), sort_keys=True).encode()):08x}"
    if folder not in _WHOLE_RUNS:
        # A failed attempt may have left files.
        rmtree(folder, ignore_errors=True)
        # Before the run opens: an opened run changes them.
        settings = _process_settings()
        with opened(config, folder, data) as run:
            state = run.model.state_dict()
            full = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}
            start = {name: each.clone().cpu() for name, each in full.items()}
            plain_names = list(type(run.model)(run.config.model, device="meta").state_dict())
            hooks = _count_hooks(run)
            train(run, Silent())
            both = hooks, _count_hooks(run)
        both_settings = settings, _process_settings()
        _WHOLE_RUNS[folder] = WholeRun(folder, start, plain_names, run.techniques.proofs, both, both_settings)
    return _WHOLE_RUNS[folder]


def trained(config: Config, data: Path) -> Path:
    """Return the folder of a finished run with a configuration; it is trained once for all tests."""
    return whole_run(config, data).folder


def verified_step(run: OpenRun) -> dict[str, dict[str, Any]]:
    """Make one step; return the figures of the proof of every technique."""
    with run.techniques.verified(run):
        take_step(run)
    return {name: proof.figures for name, proof in run.techniques.proofs.items()}


def losses(folder: Path) -> list[tuple[int, str, float]]:
    """Return the step, kind and value of every loss in a run's log."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    names = {"train": "loss", "evaluate": "validation_loss"}
    return [(line["step"], line["kind"], line[names[line["kind"]]]) for line in lines if line["kind"] in names]


def last_state(folder: Path) -> dict[str, Any]:
    """Return the last checkpoint of a run, without the random states of NumPy and Python, which are not used."""
    state: dict[str, Any] = CheckpointManager(folder / "checkpoints").restore()
    for unused in ("numpy", "python"):
        del state["rng"][unused]
    return state


class TechniqueSuite(ABC):
    """The tests that every technique must pass, in a tiny run on the CPU."""

    technique: ClassVar[type[Technique]]
    variants: ClassVar[Sequence[Any]] = ({},)
    """The settings to test; a `pytest.param` adds marks."""

    config: ClassVar[Config] = TINY

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run the tests that take a variant once for each variant."""
        if "variant" in metafunc.fixturenames:
            metafunc.parametrize("variant", self.variants, ids=str)

    @pytest.fixture(scope="class")
    @classmethod
    def data(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Prepare a text, once for all classes that use this one."""
        return prepared_text(tmp_path_factory.getbasetemp() / "technique-suite")

    @pytest.fixture(autouse=True)
    def check_machine(self) -> None:
        """Skip, with the reason, if this machine cannot run the technique."""
        machine = Machine(chosen_device(self.config.loop.device))
        for each in self.variants:
            variant = each if isinstance(each, Mapping) else each.values[0]
            lack = self.technique(self.technique.Settings(**variant)).missing(machine)
            if lack is not None:
                pytest.skip(f"{self.technique.name} {lack}")

    def config_with(self, variant: Mapping[str, Any]) -> Config:
        return with_techniques(self.config, {self.technique.name: variant})

    @abstractmethod
    def break_on_purpose(self, run: StepState) -> None:
        """Make an applied technique silently inactive in this run."""

    def test_declaration_is_complete(self) -> None:
        """It has a kind, texts for users and a reference, and is registered by its name."""
        assert TECHNIQUE_CLASSES.get(self.technique.name) is self.technique
        assert self.technique.kind in get_args(Kind)
        assert self.technique.changes in get_args(Changed)
        for text in (self.technique.summary, self.technique.effect, self.technique.reference):
            assert text and "\n" not in text and not text.endswith(".")
        self.technique.Settings()
        for other, reason in self.technique.conflicts.items():
            assert other in TECHNIQUE_CLASSES.names() and reason

    def test_losses_are_within_the_tolerance(self, data: Path, variant: Mapping[str, Any]) -> None:
        """A systems technique has the losses of the plain run; an algorithmic technique has finite losses."""
        plain = losses(trained(self.config, data))
        found = losses(trained(self.config_with(variant), data))
        assert [each[:2] for each in found] == [each[:2] for each in plain]
        if self.technique.kind == "systems":
            expected, tolerance = [each[2] for each in plain], self.technique.tolerance
            assert [each[2] for each in found] == (pytest.approx(expected, rel=tolerance) if tolerance else expected)
        assert all(each[2] < 20 for each in found)

    def test_weights_move_as_far_as_without_it(self, data: Path, variant: Mapping[str, Any]) -> None:
        """A systems technique moves the weights as far as the plain run, although its losses may differ."""
        # The losses do not test this: in so few steps they would hardly differ if the weights did not move at all.
        if self.technique.kind != "systems":
            return
        plain = whole_run(self.config, data)
        found = _distance(plain.start, trained(self.config_with(variant), data))
        assert found == pytest.approx(_distance(plain.start, plain.folder), rel=_DISTANCE_TOLERANCE)

    def test_resume_is_exact(self, tmp_path: Path, data: Path, variant: Mapping[str, Any]) -> None:
        """A run that was killed and resumed ends bit-identical to an uninterrupted run."""
        whole = trained(self.config_with(variant), data)
        # The copy continues after the middle step, and must reach the state of the original.
        resumed = killed_copy(whole, tmp_path / "resumed", step=STEPS // 2)
        train_run(RunFolder(resumed).record().config, resumed, data, resume=True)
        assert losses(resumed) == losses(whole)
        assert difference(last_state(resumed), last_state(whole)) is None

    def test_parameter_names_are_unchanged(self, data: Path, variant: Mapping[str, Any]) -> None:
        """A checkpoint saved with the technique can be loaded without it."""
        run = whole_run(self.config_with(variant), data)
        assert list(run.start) == run.plain_names

    def test_active_technique_is_proved(self, data: Path, variant: Mapping[str, Any]) -> None:
        """The proof is one line with figures, and no hook remains."""
        run = whole_run(self.config_with(variant), data)
        proof = run.proofs[self.technique.name]
        assert proof.figures
        assert proof.summary and "\n" not in proof.summary
        assert run.hooks[0] == run.hooks[1]

    def test_inactive_technique_is_an_error(self, tmp_path: Path, data: Path, variant: Mapping[str, Any]) -> None:
        """A run that was broken on purpose raises an error that names the technique."""
        with opened(self.config_with(variant), tmp_path / "run", data) as run:
            self.break_on_purpose(run)
            with pytest.raises(TechniqueNotActiveError, match=self.technique.name):
                verified_step(run)

    def test_process_settings_are_restored(self, data: Path, variant: Mapping[str, Any]) -> None:
        """Threads, default dtype and other settings of the process are restored when a run is closed."""
        before, after = whole_run(self.config_with(variant), data).settings
        assert after == before


def _distance(start: Mapping[str, torch.Tensor], folder: Path) -> float:
    end = last_state(folder)["model"]
    return float(torch.stack([(end[name] - each).norm() for name, each in start.items()]).norm())


def _count_hooks(run: StepState) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in run.model.modules())


def _process_settings() -> dict[str, Any]:
    kernels = [f"{name}_sdp_enabled" for name in ("flash", "mem_efficient", "math")]
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "kernels": [getattr(torch.backends.cuda, name)() for name in kernels],
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
