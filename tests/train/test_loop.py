"""The training loop, and exact resumption of stopped and killed runs."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

import tensorkeep
from tensorkeep.errors import DivergedError
from tensorkeep.testing.equality import difference
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.loop import Summary, train
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import METRIC
from train.tiny_training import TEXT, Witness

CONFIG = Config(
    recipe="tiny", model=ModelConfig(vocab_size=1, context_length=16, n_layers=2, n_heads=2, d_model=16, dropout=0.1)
).changed(
    {
        "loop.steps": 12,
        "loop.batch_size": 3,
        "schedule.warmup_steps": 2,
        "eval.every": 4,
        "sample.every": 5,
        "sample.prompt": "the",
        "sample.tokens": 8,
        "checkpoint.every": 3,
        "log.every": 1,
    }
)


def run(
    config: Config, folder: Path, data: Path, *, resume: bool = False, stop_after: int | None = None
) -> tuple[Summary, Witness]:
    witness = Witness()
    steps = []

    def stop() -> bool:
        steps.append(None)
        return stop_after is not None and len(steps) >= stop_after

    with open_run(config, RunFolder(folder), Dataset.open(data), resume=resume) as opened:
        return train(opened, witness, stop=stop), witness


def trace(folder: Path) -> list[dict[str, Any]]:
    """Return the log without fields that depend on the machine."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    timed = {"tokens_per_second", "mfu", "path", "peak_memory_bytes"}
    return [{key: value for key, value in line.items() if key not in timed} for line in lines if line["kind"] != "save"]


def last_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = tensorkeep.CheckpointManager(folder / "checkpoints").restore()
    # The trainer neither seeds nor uses the generators of numpy and Python.
    for unused in ("numpy", "python"):
        del state["rng"][unused]
    return state


VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "accumulating": {"loop.accumulate": 3},
    "muon": {"optim.name": "muon"},
    "muon, split": {"optim.name": "muon", "optim.muon_split": True, "optim.muon_polynomials": "polar-express"},
    "shifts and convolutions": {"model.token_shift": "blocks", "model.convolution": 3},
    "averaged": {"ema.decay": 0.9},
    "grouped heads": {
        "model.kv_heads": 1,
        "model.qk_norm": True,
        "model.positions": "rotary",
        "model.rope_scaling.kind": "linear",
        "model.rope_scaling.factor": 2.0,
    },
    "plateau": {"schedule.name": "plateau", "schedule.patience": 1, "eval.every": 2},
    "random order": {"data.order": "random"},
    "shuffled order, differences": {"data.order": "shuffled", "checkpoint.incremental": "delta"},
    "stopping early": {"optim.lr": 1e-12, "optim.weight_decay": 0.0, "eval.every": 1, "eval.patience": 6},
    "evaluating a part": {"eval.every": 2, "eval.tokens": 40, "schedule.name": "plateau", "schedule.patience": 1},
    "synchronous": {"checkpoint.asynchronous": False, "checkpoint.incremental": False},
}


class Whole(NamedTuple):
    """A run that was not stopped."""

    config: Config
    folder: Path
    summary: Summary


@pytest.fixture(scope="module", params=VARIANTS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, data: Path) -> Whole:
    config, folder = CONFIG.changed(VARIANTS[request.param]), tmp_path_factory.mktemp("whole") / "run"
    summary, _ = run(config, folder, data)
    assert summary.reason == ("early stop" if request.param == "stopping early" else "done")
    return Whole(config, folder, summary)


@pytest.mark.parametrize("stop_after", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_stopped_run_is_resumed_exactly(tmp_path: Path, data: Path, whole: Whole, stop_after: int) -> None:
    stopped, _ = run(whole.config, tmp_path / "parts", data, stop_after=stop_after)
    assert (stopped.reason, stopped.step) == ("stopped", stop_after)
    random.random(), np.random.random(), torch.rand(5)  # another process would have other random states
    ended, _ = run(whole.config, tmp_path / "parts", data, resume=True)
    assert (whole.summary.reason, whole.summary.step) == (ended.reason, ended.step)
    assert trace(tmp_path / "parts") == trace(whole.folder)
    assert difference(last_state(tmp_path / "parts"), last_state(whole.folder)) is None
    assert ended.best == whole.summary.best


def test_resuming_an_ended_run_changes_nothing(tmp_path: Path, data: Path) -> None:
    early = {"optim.lr": 1e-12, "optim.weight_decay": 0.0, "eval.every": 1, "eval.patience": 2}
    for name, changes in {"early": early, "done": {}}.items():
        first, _ = run(CONFIG.changed(changes), tmp_path / name, data)
        again, witness = run(CONFIG.changed(changes), tmp_path / name, data, resume=True)
        assert (again.step, again.reason, again.loss) == (first.step, first.reason, first.loss)
        assert witness.seen == []


@pytest.mark.parametrize("damage", ["bytes", "manifest"])
def test_damaged_checkpoint_is_skipped_and_saved_again(tmp_path: Path, data: Path, damage: str) -> None:
    run(CONFIG, tmp_path / "whole", data)
    run(CONFIG, tmp_path / "parts", data, stop_after=9)
    step = tmp_path / "parts" / "checkpoints" / "step-000009"
    victim = (
        step / "manifest.json" if damage == "manifest" else max(step.iterdir(), key=lambda path: path.stat().st_size)
    )
    content = bytearray(victim.read_bytes())
    content[-100] ^= 1
    victim.unlink()
    victim.write_bytes(content)
    with pytest.warns(UserWarning, match="is skipped"):
        ended, _ = run(CONFIG, tmp_path / "parts", data, resume=True)
    assert ended.reason == "done"
    assert trace(tmp_path / "parts") == trace(tmp_path / "whole")
    assert difference(last_state(tmp_path / "parts"), last_state(tmp_path / "whole")) is None


def test_second_process_is_refused_while_the_run_is_live(tmp_path: Path, data: Path) -> None:
    with open_run(CONFIG, RunFolder(tmp_path / "run"), Dataset.open(data)) as opened:
        train(opened, Witness(), stop=lambda: opened.progress.step >= 7)
        before = (tmp_path / "run" / "log.jsonl").read_bytes()
        with pytest.raises(tensorkeep.BusyError):
            run(CONFIG, tmp_path / "run", data, resume=True)
        assert (tmp_path / "run" / "log.jsonl").read_bytes() == before


def test_checkpoints_of_another_run_are_refused(tmp_path: Path, data: Path) -> None:
    run(CONFIG, tmp_path / "run", data)
    (tmp_path / "run" / "run.json").unlink()
    for resume in (False, True):
        with pytest.raises(tensorkeep.DestinationExistsError, match=r"without its run\.json"):
            run(CONFIG, tmp_path / "run", data, resume=resume)


def test_too_short_validation_split_is_refused_immediately(tmp_path: Path, data: Path) -> None:
    length = len(Dataset.open(data).validation)
    with pytest.raises(tensorkeep.UsageError, match="the validation split has"):
        run(CONFIG.changed({"model.context_length": length}), tmp_path / "run", data)
    assert not (tmp_path / "run").exists()


def test_the_loss_falls(tmp_path: Path, data: Path) -> None:
    config = CONFIG.changed({"loop.steps": 80, "optim.lr": 1e-2, "eval.every": 40, "model.dropout": 0.0})
    summary, witness = run(config, tmp_path / "run", data)
    losses = [values["loss"] for _, kind, values in witness.seen if kind == "train"]
    assert losses[0] == pytest.approx(math.log(Dataset.open(data).vocab_size), abs=0.2)
    assert losses[-1] < 0.7 * losses[0]
    assert summary.best <= summary.loss < losses[0]
    assert 0 < summary.mfu <= 1
    assert {"train", "first step", "evaluate", "checkpoint"} <= summary.seconds.keys()


def test_accumulated_batches_are_one_large_batch(tmp_path: Path, data: Path) -> None:
    config = CONFIG.changed({"model.dropout": 0.0, "loop.steps": 4, "data.order": "random"})
    run(config.changed({"loop.batch_size": 6}), tmp_path / "large", data)
    run(config.changed({"loop.batch_size": 2, "loop.accumulate": 3}), tmp_path / "small", data)
    large, small = (last_state(tmp_path / name)["model"] for name in ("large", "small"))
    for name, tensor in large.items():
        assert torch.allclose(tensor, small[name], atol=1e-5), name


def test_evaluating_and_sampling_change_nothing(tmp_path: Path, data: Path) -> None:
    run(CONFIG, tmp_path / "often", data)
    run(CONFIG.changed({"eval.every": 0, "sample.every": 0}), tmp_path / "never", data)
    often, never = ([line for line in trace(tmp_path / name) if line["kind"] == "train"] for name in ("often", "never"))
    assert often == never


def test_early_stop(tmp_path: Path, data: Path) -> None:
    config = CONFIG.changed({"optim.lr": 1e-12, "eval.every": 1, "eval.patience": 2, "schedule.name": "constant"})
    config = config.changed({"optim.weight_decay": 0.0})
    summary, _ = run(config, tmp_path / "run", data)
    assert summary.reason == "early stop"
    assert summary.step < 12
    assert tensorkeep.CheckpointManager(tmp_path / "run" / "checkpoints").steps()[-1].number == summary.step


def poison(opened: Any, at: int) -> None:
    """Let the loss of a step be infinite."""
    real = opened.model.loss

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = real(inputs, targets)
        return found * (math.inf if opened.progress.step == at else 1.0)

    opened.model.loss = loss


def test_nonfinite_loss_stops_the_run_before_the_update(tmp_path: Path, data: Path) -> None:
    with open_run(CONFIG, RunFolder(tmp_path / "run"), Dataset.open(data)) as opened:
        poison(opened, at=8)
        with pytest.raises(DivergedError, match=r"step 8: the loss is inf.* on batches 7 to 7 ") as raised:
            train(opened, Witness())
        assert "resume from step 6 with --resume --loop.on_divergence skip" in str(raised.value)
        assert all(parameter.isfinite().all() for parameter in opened.model.parameters())


def test_diverged_run_can_be_resumed_with_skipping(tmp_path: Path, data: Path) -> None:
    with open_run(CONFIG, RunFolder(tmp_path / "run"), Dataset.open(data)) as opened:
        poison(opened, at=8)
        with pytest.raises(DivergedError):
            train(opened, Witness())
    skipping = CONFIG.changed({"loop.on_divergence": "skip"})
    with open_run(skipping, RunFolder(tmp_path / "run"), Dataset.open(data), resume=True) as opened:
        assert opened.progress.step == 6
        poison(opened, at=8)
        assert train(opened, Witness()).reason == "done"


def test_nonfinite_updates_are_skipped_on_request(tmp_path: Path, data: Path) -> None:
    config = CONFIG.changed({"loop.on_divergence": "skip"})
    with open_run(config, RunFolder(tmp_path / "run"), Dataset.open(data)) as opened:
        poison(opened, at=8)
        summary = train(opened, Witness())
        assert summary.reason == "done"
        assert opened.progress.skipped == 1
        assert math.isfinite(summary.loss)
    line = next(line for line in trace(tmp_path / "run") if line["kind"] == "train" and line["step"] == 8)
    assert line["loss"] is None


def test_record_describes_the_start_of_a_run(tmp_path: Path, data: Path) -> None:
    run(CONFIG, tmp_path / "run", data)
    folder = RunFolder(tmp_path / "run")
    record = folder.record()
    assert record.data.fingerprint == Dataset.open(data).fingerprint
    assert record.environment["versions"]["torch"] == metadata.version("torch")
    assert record.config.model.vocab_size == Dataset.open(data).vocab_size
    with pytest.raises(tensorkeep.DestinationExistsError, match="holds a run already"):
        run(CONFIG, tmp_path / "run", data)


def test_changed_configuration_is_refused_with_the_settings_that_differ(tmp_path: Path, data: Path) -> None:
    run(CONFIG, tmp_path / "run", data, stop_after=4)
    other = CONFIG.changed({"model.norm": "rmsnorm", "checkpoint.every": 7})
    with pytest.raises(
        tensorkeep.UsageError, match=r"configuration: model\.norm: 'layernorm' then, 'rmsnorm' now"
    ) as e:
        run(other, tmp_path / "run", data, resume=True)
    assert "checkpoint.every" not in str(e.value)


def test_data_that_has_changed_is_refused(tmp_path: Path, data: Path) -> None:
    run(CONFIG, tmp_path / "run", data, stop_after=4)
    (tmp_path / "text").write_text(TEXT.replace("fox", "xof"))
    prepare(tmp_path / "text", tmp_path / "other", tokenizer="char")
    with pytest.raises(tensorkeep.UsageError, match="has changed since the run began"):
        run(CONFIG, tmp_path / "run", tmp_path / "other", resume=True)


def test_a_context_longer_than_the_data_is_refused(tmp_path: Path, data: Path) -> None:
    with pytest.raises(tensorkeep.UsageError, match="a context of 100,000 needs"):
        run(CONFIG.changed({"model.context_length": 100_000}), tmp_path / "run", data)
    assert not (tmp_path / "run").exists()


def test_log_drops_repeated_steps(tmp_path: Path, data: Path) -> None:
    run(CONFIG, tmp_path / "run", data, stop_after=4)
    log = tmp_path / "run" / "log.jsonl"
    log.write_text(log.read_text() + '{"step": 9, "kind": "train", "loss": 1.0}\n{"step": 10, "ki')
    run(CONFIG, tmp_path / "run", data, resume=True)
    run(CONFIG, tmp_path / "whole", data)
    assert trace(tmp_path / "run") == trace(tmp_path / "whole")


KILLED = """
import sys, json
from pathlib import Path
import tensorkeep.train.run.setup
tensorkeep.train.run.setup.measured_peak = lambda device: 1e9
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import train
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.folder import RunFolder
class Witness:
    def on_event(self, step, kind, values):
        print(step, kind, flush=True)
config = Config.from_dict(json.loads(sys.argv[1]))
with open_run(config, RunFolder(sys.argv[2]), Dataset.open(sys.argv[3]), resume=True) as run:
    train(run, Witness())
"""


def start(config: Config, folder: Path, data: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", KILLED, msgspec.json.encode(config).decode(), str(folder), str(data)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_repeatedly_killed_run_is_resumed_exactly(tmp_path: Path, data: Path) -> None:
    config = CONFIG.changed({"loop.steps": 400, "loop.accumulate": 2, "eval.every": 7, "checkpoint.every": 5})
    output, errors = start(config, tmp_path / "whole", data).communicate(timeout=240)
    assert "400 save" in output, errors
    draw = random.Random(5)
    kills = 0
    while True:
        process = start(config, tmp_path / "killed", data)
        assert process.stdout is not None
        process.stdout.readline()  # a step was done: whatever follows is hit at random, saves and evaluations among it
        time.sleep(draw.uniform(0, 0.7))
        process.send_signal(signal.SIGKILL)
        output, errors = process.communicate()
        kills += 1
        if process.returncode == 0 or kills >= 15:
            break
    start(config, tmp_path / "killed", data).communicate(timeout=240)
    assert kills > 3
    assert trace(tmp_path / "killed") == trace(tmp_path / "whole")
    assert difference(last_state(tmp_path / "killed"), last_state(tmp_path / "whole")) is None


def test_the_best_step_is_kept_and_found(tmp_path: Path, data: Path) -> None:
    config = CONFIG.changed({"eval.every": 3, "checkpoint.keep_last": 1})
    summary, _ = run(config, tmp_path / "run", data)
    best = tensorkeep.CheckpointManager(tmp_path / "run" / "checkpoints").best(METRIC)
    assert best is not None
    assert best.metrics[METRIC] == summary.best
