"""The training loop, and exact resumption of stopped and killed runs."""

import math
import random
import shutil
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forked
import tensorkeep
from chatgot.config.config import Config
from chatgot.data.dataset import Dataset
from chatgot.data.prepare import prepare
from chatgot.loop import train
from chatgot.run.folder import METRIC, RunFolder
from chatgot.run.setup import open_run
from faults.injection import flip_bit
from tensorkeep.testing.cases import case
from tiny_training import CONFIG as TINY
from tiny_training import TEXT, Trained, Witness, check_same, last_state, lines, run

CONFIG = TINY.changed(
    {"loop.steps": 9, "schedule.name": "cosine", "schedule.warmup_steps": 2, "eval.every": 4}
    | {"sample.every": 5, "sample.prompt": "the", "sample.tokens": 8, "checkpoint.every": 3}
)

VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "accumulating": {"loop.gradient_accumulation_steps": 3},
    "muon": {"optim.name": "muon"},
    "muon, split": {"optim.name": "muon", "optim.muon_split": True, "optim.muon_polynomials": "polar-express"},
    "shifts and convolutions": {"model.token_shift": "blocks", "model.convolution": 3},
    "averaged": {"ema.decay": 0.9},
    "grouped heads": {"model.kv_heads": 1, "model.qk_norm": True, "model.head_dim": 12, "model.positions": "rotary"}
    | {"model.rope_scaling.kind": "linear", "model.rope_scaling.factor": 2.0},
    "plateau": {"schedule.name": "plateau", "schedule.patience": 1, "eval.every": 2},
    "random order": {"data.order": "random"},
    "shuffled order, differences": {"data.order": "shuffled", "checkpoint.incremental": "delta"},
    "stopping early": {"optim.lr": 1e-12, "optim.weight_decay": 0.0, "eval.every": 1, "eval.patience": 6},
    "evaluating a part": {"eval.every": 2, "eval.tokens": 40, "schedule.name": "plateau", "schedule.patience": 1},
    "synchronous": {"checkpoint.asynchronous": False, "checkpoint.incremental": False},
}
COMBINED = [
    ("accumulating", "muon", "averaged", "random order", "evaluating a part", "shifts and convolutions"),
    ("stopping early", "synchronous"),
]
OTHERS = [("muon, split", "grouped heads", "shuffled order, differences"), *((name,) for name in VARIANTS)]
ALONE = [pytest.param(names, marks=pytest.mark.exhaustive) for names in OTHERS]


@pytest.mark.parametrize("stop_at", [pytest.param(1, marks=pytest.mark.exhaustive), 5])
@pytest.mark.parametrize("names", [*COMBINED, *ALONE], ids=str)
def test_stopped_run_is_resumed_exactly_and_an_ended_one_stays(
    tmp_path: Path, data: Path, trained: Trained, names: tuple[str, ...], stop_at: int
) -> None:
    config = CONFIG.changed({setting: value for name in names for setting, value in VARIANTS[name].items()})
    whole = trained(config, tmp_path / "whole")
    assert (whole.reason, whole.step < 9) == (("early stop", True) if "stopping early" in names else ("done", False))
    assert tensorkeep.CheckpointManager(tmp_path / "whole" / "checkpoints").steps()[-1].number == whole.step
    stopped = run(config, tmp_path / "parts", data, stop_at=stop_at)
    assert (stopped.reason, stopped.step) == ("stopped", stop_at)
    random.random(), np.random.random(), torch.rand(5)  # another process would have other random states
    ended = run(config, tmp_path / "parts", data, resume=True)
    assert (ended.reason, ended.step, ended.best) == (whole.reason, whole.step, whole.best)
    check_same(tmp_path / "parts", tmp_path / "whole")
    witness = Witness()
    again = run(config, tmp_path / "parts", data, resume=True, listener=witness)
    assert (again.step, again.reason, again.loss) == (ended.step, ended.reason, ended.loss)
    assert witness.seen == []


@pytest.mark.parametrize("damage", ["bytes", "manifest"])
def test_damaged_checkpoint_is_skipped_and_saved_again(
    tmp_path: Path, data: Path, trained: Trained, damage: str
) -> None:
    trained(CONFIG, tmp_path / "whole")
    trained(CONFIG, tmp_path / "parts", stop_at=6)
    files = (tmp_path / "parts" / "checkpoints" / "step-000006").iterdir()
    by_size = {path.name == "manifest.json": path for path in sorted(files, key=lambda path: path.stat().st_size)}
    victim = by_size[damage == "manifest"]
    shutil.copy(victim, tmp_path / "copy")
    (tmp_path / "copy").replace(victim)  # so that no other step that links the file is damaged
    flip_bit(victim, -100)
    with pytest.warns(UserWarning, match="is skipped"):
        assert run(CONFIG, tmp_path / "parts", data, resume=True).reason == "done"
    check_same(tmp_path / "parts", tmp_path / "whole")


def test_second_process_is_refused_while_the_run_is_live(tmp_path: Path, data: Path) -> None:
    with open_run(CONFIG, RunFolder(tmp_path / "run"), Dataset.open(data)) as opened:
        train(opened, Witness(), stop=lambda: opened.progress.step >= 2)
        before = (tmp_path / "run" / "log.jsonl").read_bytes()
        with pytest.raises(tensorkeep.BusyError):
            run(CONFIG, tmp_path / "run", data, resume=True)
        assert (tmp_path / "run" / "log.jsonl").read_bytes() == before


def test_a_context_longer_than_a_split_is_refused_immediately(tmp_path: Path, data: Path) -> None:
    assert len(Dataset.open(data).validation) == 270 < len(Dataset.open(data).train)
    for context, message in ((270, "the validation split has"), (100_000, "a context of 100,000 needs")):
        with case(context), pytest.raises(tensorkeep.UsageError, match=message):
            run(CONFIG.changed({"model.context_length": context}), tmp_path / "run", data)
        assert not (tmp_path / "run").exists()


def test_the_loss_falls(tmp_path: Path, data: Path) -> None:
    config = TINY.changed({"loop.steps": 60, "optim.lr": 2e-2, "eval.every": 30, "model.dropout": 0.0})
    summary = run(config, tmp_path / "run", data)
    losses = [line["loss"] for line in lines(tmp_path / "run", "train")]
    assert losses[0] == pytest.approx(math.log(Dataset.open(data).vocab_size), abs=0.2)
    assert losses[-1] < 0.7 * losses[0]
    assert summary.best <= summary.loss < losses[0]
    assert 0 < summary.mfu <= 1
    assert {"train", "first step", "evaluate", "checkpoint"} <= summary.seconds.keys()


def test_accumulated_batches_are_one_large_batch(tmp_path: Path, data: Path) -> None:
    config = TINY.changed({"model.dropout": 0.0, "loop.steps": 4, "data.order": "random"})
    run(config.changed({"loop.batch_size": 6}), tmp_path / "large", data)
    run(config.changed({"loop.batch_size": 2, "loop.gradient_accumulation_steps": 3}), tmp_path / "small", data)
    large, small = (last_state(tmp_path / name)["model"] for name in ("large", "small"))
    for name, tensor in large.items():
        assert torch.allclose(tensor, small[name], atol=1e-5), name


def test_evaluating_and_sampling_change_nothing_and_the_best_step_is_kept(tmp_path: Path, trained: Trained) -> None:
    summary = trained(CONFIG.changed({"eval.every": 3, "checkpoint.keep_last": 1}), tmp_path / "often")
    trained(CONFIG.changed({"eval.every": 0, "sample.every": 0}), tmp_path / "never")
    assert lines(tmp_path / "often", "train") == lines(tmp_path / "never", "train")
    best = tensorkeep.CheckpointManager(tmp_path / "often" / "checkpoints").best(METRIC)
    assert best is not None
    assert best.metrics[METRIC] == summary.best


def test_record_describes_the_start_of_a_run_and_keeps_other_runs_settings_and_data_out(
    tmp_path: Path, data: Path, trained: Trained
) -> None:
    trained(CONFIG, tmp_path / "run", stop_at=4)
    record = RunFolder(tmp_path / "run").record()
    assert record.data.fingerprint == Dataset.open(data).fingerprint
    assert record.environment["versions"]["torch"] == metadata.version("torch")
    assert record.config.model.vocab_size == Dataset.open(data).vocab_size
    other = CONFIG.changed({"model.norm": "rmsnorm", "checkpoint.every": 7})
    with pytest.raises(tensorkeep.UsageError, match=r"model\.norm: 'layernorm' then, 'rmsnorm' now") as caught:
        run(other, tmp_path / "run", data, resume=True)
    assert "checkpoint.every" not in str(caught.value)
    (tmp_path / "text").write_text(TEXT.replace("fox", "xof"))
    prepare(tmp_path / "text", tmp_path / "other", tokenizer="char")
    with pytest.raises(tensorkeep.UsageError, match="has changed since the run began"):
        run(CONFIG, tmp_path / "run", tmp_path / "other", resume=True)
    with pytest.raises(tensorkeep.DestinationExistsError, match="holds a run already"):
        run(CONFIG, tmp_path / "run", data)
    # Without the record, the checkpoints are those of another run.
    (tmp_path / "run" / "run.json").unlink()
    for resume in (False, True):
        with pytest.raises(tensorkeep.DestinationExistsError, match=r"without its run\.json"):
            run(CONFIG, tmp_path / "run", data, resume=resume)


def test_log_drops_repeated_steps(tmp_path: Path, data: Path, trained: Trained) -> None:
    trained(CONFIG, tmp_path / "whole")
    trained(CONFIG, tmp_path / "run", stop_at=4)
    log = tmp_path / "run" / "log.jsonl"
    log.write_text(log.read_text() + '{"step": 9, "kind": "train", "loss": 1.0}\n{"step": 10, "ki')
    run(CONFIG, tmp_path / "run", data, resume=True)
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


def live(config: dict[str, Any], folder: Path, data: Path) -> None:
    """Train in a process of its own until it is killed."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("chatgot.run.setup.measured_peak", lambda device: 1e9)
        run(Config.from_dict(config), folder, data, resume=True)


@pytest.mark.exhaustive
@pytest.mark.xdist_group("processes")
def test_repeatedly_killed_run_is_resumed_exactly(tmp_path: Path, data: Path) -> None:
    config = CONFIG.changed(
        {"loop.steps": 400, "loop.gradient_accumulation_steps": 2, "eval.every": 7, "checkpoint.every": 5}
    )
    run(config, tmp_path / "whole", data)
    draw, kills, log = random.Random(5), 0, tmp_path / "killed" / "log.jsonl"
    while kills < 15:
        before = log.stat().st_size if log.exists() else 0
        process = forked.start(live, config.as_dict(), tmp_path / "killed", data, output=tmp_path / "output")
        while process.is_alive() and (not log.exists() or log.stat().st_size == before):
            time.sleep(0.01)
        # Whatever follows is hit at random, saves and evaluations among it.
        time.sleep(draw.uniform(0, 0.7))
        forked.kill(process)
        if process.exitcode == 0:
            break
        kills += 1
    assert kills > 3, (tmp_path / "output").read_text()
    run(config, tmp_path / "killed", data, resume=True)
    check_same(tmp_path / "killed", tmp_path / "whole")
