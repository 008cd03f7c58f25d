"""When techniques are verified: in the first step, or in the first step that makes an update."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from chatgot.config.config import Config
from chatgot.data.dataset import Dataset
from chatgot.loop import train
from chatgot.run.folder import RunFolder
from chatgot.run.setup import open_run
from chatgot.run.state import ActivityTimer
from chatgot.step.state import StepState
from chatgot.techniques import stack
from chatgot.techniques.optimizer_offload import OptimizerOffload
from chatgot.testing import TINY, opened, train_run, verified_step, with_techniques
from tensorkeep.errors import TechniqueNotActiveError
from tiers import exhaustive

PROVED_BY_UPDATES = ("fused-optimizer", "low-bit-optimizer", "optimizer-offload")
# Wide enough to quantise the states.
WIDE = TINY.changed({"model.d_model": 64, "eval.every": 0})


def config_with(name: str, config: Config = TINY) -> Config:
    """Return a configuration with a technique on that is proved by updates, without a compiler."""
    return with_techniques(config, {name: {"compiled": False} if name == "low-bit-optimizer" else {}})


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow the offload on the CPU, where it saves no memory."""
    monkeypatch.setattr(OptimizerOffload, "missing", lambda self, machine: None)


class ProofListener:
    """Records the step in which each technique is proved."""

    def __init__(self) -> None:
        self.proofs: dict[str, int] = {}

    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None:
        if kind == "technique":
            assert values["seen"]
            self.proofs[values["name"]] = step


def overflowing_until(run: StepState, step: int) -> None:
    """Make gradients overflow before a step, as in float16 until the scale is low enough."""

    def overflow(gradient: Tensor) -> Tensor:
        return gradient * float("inf") if run.progress.step < step else gradient

    run.model.norm.weight.register_hook(overflow)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["fused-optimizer", "optimizer-offload", *exhaustive("low-bit-optimizer")])
def test_proof_or_error_waits_for_the_first_update(tmp_path: Path, data: Path, name: str) -> None:
    config = config_with(name).changed({"techniques.mixed-precision.dtype": "fp16"})
    with opened(config, tmp_path / "run", data) as run:
        overflowing_until(run, 3)
        listener, updates = ProofListener(), run.operations.update
        train(run, listener, stop=lambda: run.progress.step == 3)
        assert listener.proofs == {"mixed-precision": 1, name: 3}
        assert run.operations.update is updates
    with opened(config, tmp_path / "broken", data) as run:
        overflowing_until(run, 3)
        run.operations.update = lambda: None
        with pytest.raises(TechniqueNotActiveError, match=name):
            train(run, ProofListener())
        assert run.progress.step == 3


def other_update(run: StepState, weights: list[Tensor], factor: float) -> None:
    """Multiply the updates of weights."""
    update = run.operations.update

    def updated() -> None:
        before = [each.detach().clone() for each in weights]
        update()
        for each, old in zip(weights, before, strict=True):
            each.data.copy_(old + factor * (each.data - old))

    run.operations.update = updated


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        *(("fused-optimizer", factor) for factor in (0.0, float("nan"))),
        ("low-bit-optimizer", 1.1),
        *exhaustive(("low-bit-optimizer", 0.5)),
        *(("optimizer-offload", factor) for factor in (0.0, 1.1)),
    ],
)
def test_optimizer_that_makes_another_update_is_an_error(tmp_path: Path, data: Path, name: str, factor: float) -> None:
    """It does everything else: it calls its kernels, and has its states."""
    with opened(config_with(name, WIDE), tmp_path / "run", data) as run:
        other_update(run, list(run.model.parameters()), factor)
        match = f"{name} .*weights were not updated as AdamW would"
        with pytest.raises(TechniqueNotActiveError, match=match):
            train(run, ProofListener())
        assert run.progress.step == 1


@pytest.mark.parametrize("name", PROVED_BY_UPDATES)
def test_optimizer_that_leaves_out_one_weight_is_an_error(tmp_path: Path, data: Path, name: str) -> None:
    with opened(config_with(name, WIDE), tmp_path / "run", data) as run:
        other_update(run, [run.model.attentions[1].qkv.weight], 0.0)
        off = r"1 of .* weights .*blocks\.1\.attention\.qkv\.weight is 100% off"
        with pytest.raises(TechniqueNotActiveError, match=off):
            train(run, ProofListener())


@pytest.mark.parametrize("name", PROVED_BY_UPDATES)
def test_update_of_a_resumed_run_is_proved(tmp_path: Path, data: Path, name: str) -> None:
    """With moments and a step count, which the formula needs."""
    config = config_with(name, WIDE)
    train_run(config, tmp_path / "run", data, stop_after=2)
    with open_run(config, RunFolder(tmp_path / "run"), Dataset.open(data), resume=True) as run:
        listener = ProofListener()
        train(run, listener, stop=lambda: True)
        assert listener.proofs == {name: 3}


@pytest.mark.parametrize("name", PROVED_BY_UPDATES)
def test_missing_proof_ends_the_run(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(stack, "_MOST_OBSERVED", 4)
    with opened(config_with(name), tmp_path / "run", data) as run:
        run.operations.accepts = lambda loss, norm: False
        with pytest.raises(TechniqueNotActiveError, match=f"{name} .*4 steps did not show it"):
            train(run, ProofListener())
        assert run.progress.step == 4


def test_proved_techniques_are_not_verified_again(tmp_path: Path, data: Path) -> None:
    config = with_techniques(TINY, {"fused-optimizer": {}, "mixed-precision": {"dtype": "bf16"}})
    with opened(config, tmp_path / "run", data) as run:
        watched: list[str] = []
        for each in run.techniques.techniques:

            def noting(run: StepState, name: str = each.name, verify: Callable[[StepState], Any] = each.verify) -> Any:
                watched.append(name)
                return verify(run)

            each.verify = noting  # type: ignore[method-assign]
        for _ in range(3):
            verified_step(run)
        assert watched == ["mixed-precision", "fused-optimizer"]


def test_warm_up_is_timed_as_the_first_step(tmp_path: Path, data: Path) -> None:
    with opened(with_techniques(TINY, {"fused-optimizer": {}}), tmp_path / "run", data) as run:
        now = [0.0]
        run.clock = ActivityTimer(lambda: now[0])
        run.techniques.techniques[0].warm_up = lambda run: now.append(now.pop() + 100)  # type: ignore[method-assign]
        train(run, ProofListener(), stop=lambda: True)
        assert run.clock.seconds["first step"] == 100
        assert "train" not in run.clock.seconds
