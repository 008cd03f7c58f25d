"""Resuming with other settings: which may change, legs that begin, their exact resume, and the record of them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tensorkeep
from chatgot.config.config import Config
from chatgot.data.dataset import Dataset
from chatgot.run.folder import RunFolder
from chatgot.run.resume import current_config, with_schedule_start
from chatgot.run.setup import open_run
from chatgot.step.state import StepState
from faults.injection import flip_bit
from tensorkeep.cli.main import main
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference
from tiny_training import CONFIG, Trained, check_same, last_state, lines, run

COSINE = {"schedule.name": "cosine"}


def notes(config: Config, folder: Path, data: Path) -> tuple[str, ...]:
    """Return the notes of a resume that does no step."""
    with open_run(config, RunFolder(folder), Dataset.open(data), resume=True) as opened:
        return opened.notes


def edit_record(folder: Path, change: Callable[[dict[str, Any]], object]) -> Config:
    """Change the record of a run, as if another version or machine had written it; return its current settings."""
    record = json.loads((folder / "run.json").read_text())
    change(record)
    (folder / "run.json").write_text(json.dumps(record))
    return current_config(RunFolder(folder).record())


def check_ends_as(folder: Path, whole: Path) -> None:
    """Check that a run has the last state of another one, but for what other settings change."""
    for part in ("model", "average", "optimizers", "batches", "rng"):
        assert difference(last_state(folder)[part], last_state(whole)[part]) is None, part


@pytest.mark.exhaustive
def test_longer_run_with_a_constant_rate_is_that_of_its_length(tmp_path: Path, data: Path, trained: Trained) -> None:
    longer = CONFIG.changed({"loop.steps": 20})
    trained(longer, tmp_path / "whole")
    trained(CONFIG, tmp_path / "run")
    assert notes(longer, tmp_path / "run", data) == (
        "segment 2 begins after step 12: loop.steps 12 -> 20; its result is that of a run of 20 steps from the start",
    )
    assert run(longer, tmp_path / "run", data, resume=True).step == 20
    check_ends_as(tmp_path / "run", tmp_path / "whole")


def test_longer_run_has_the_schedule_of_its_length_and_resumes(tmp_path: Path, data: Path, trained: Trained) -> None:
    short = CONFIG.changed(COSINE)
    longer = short.changed({"loop.steps": 24, "log.every": 2})
    trained(short, tmp_path / "run")
    trained(short, tmp_path / "parts")
    (note,) = notes(longer, tmp_path / "run", data)
    assert note == (
        "segment 2 begins after step 12: loop.steps 12 -> 24; the learning rate goes from 0.0001 to 0.000519 "
        "(cosine over steps 1 to 24), and the result differs from that of a run of 24 steps from the start"
    )
    run(longer, tmp_path / "run", data, resume=True)
    trained(longer.changed({"log.every": 1}), tmp_path / "whole")
    rates = {line["step"]: line["learning_rate"] for line in lines(tmp_path / "run", "train")}
    new = {line["step"]: line["learning_rate"] for line in lines(tmp_path / "whole", "train")}
    assert [rates[step] for step in range(14, 25, 2)] == [new[step] for step in range(14, 25, 2)]
    assert rates[12] < new[12]
    run(longer, tmp_path / "parts", data, resume=True, stop_at=17)
    current = current_config(RunFolder(tmp_path / "parts").record())
    assert (current.loop.steps, current.log.every) == (24, 2)
    assert notes(current, tmp_path / "parts", data) == ()
    assert run(current, tmp_path / "parts", data, resume=True).step == 24
    assert difference(last_state(tmp_path / "parts"), last_state(tmp_path / "run")) is None


def test_settings_that_only_observe_may_change_and_are_recorded(tmp_path: Path, data: Path, trained: Trained) -> None:
    trained(CONFIG, tmp_path / "whole")
    trained(CONFIG, tmp_path / "run", stop_at=5)
    first = CONFIG.changed({"eval.every": 2, "eval.batches": 1, "sample.every": 3, "sample.tokens": 2, "log.every": 4})
    run(first, tmp_path / "run", data, resume=True, stop_at=8)
    saves = {"checkpoint.every": 1, "checkpoint.keep_last": 3, "checkpoint.incremental": False}
    second = first.changed({"eval.patience": 50, "log.every": 1, **saves})
    run(second, tmp_path / "run", data, resume=True)
    check_ends_as(tmp_path / "run", tmp_path / "whole")
    resumed = RunFolder(tmp_path / "run").record().resumed
    assert [(each.step, each.settings.get("log.every")) for each in resumed] == [(5, (1, 4)), (8, None)]
    assert resumed[-1].settings["eval.patience"] == (None, 50)
    assert len(tensorkeep.CheckpointManager(tmp_path / "run" / "checkpoints").steps()) >= 3


def test_what_differs_from_now_on_is_noted(tmp_path: Path, data: Path, trained: Trained) -> None:
    # Stages depend on the length of the run.
    stages = {"techniques.progressive-length": {"pieces": [2, 1], "shares": [0.5, 0.5]}}
    windows = "validation losses are measured on other windows from now on"
    for number, (start, changes, message) in enumerate(
        (
            ({}, {"eval.tokens": 1}, windows),
            ({}, {"eval.batches": 1}, windows),
            (stages, {"loop.steps": 24}, "the result differs from that of a run of 24 steps"),
        )
    ):
        config = CONFIG.changed(start)
        trained(config, tmp_path / str(number), stop_at=5)
        (note,) = notes(config.changed(changes), tmp_path / str(number), data)
        assert message in note


def test_what_a_technique_has_set_does_not_stay_unnoticed(tmp_path: Path, data: Path, trained: Trained) -> None:
    for technique, setting, remedy in (
        ("fused-optimizer", "optim.implementation", "leave the technique on"),
        ("lr-plateau", "schedule.name", "state another schedule.name, too"),
    ):
        folder = tmp_path / technique
        trained(CONFIG.changed({f"techniques.{technique}": "on", "eval.every": 2}), folder, stop_at=4)
        began = current_config(RunFolder(folder).record())
        without = began.changed({f"techniques.{technique}": "off", "loop.steps": 30})
        message = rf"{technique} is turned off, and {setting} would stay"
        with pytest.raises(tensorkeep.UsageError, match=message) as raised:
            run(without, folder, data, resume=True)
        assert raised.value.remedy == remedy
    run(without.changed({"schedule.name": "cosine"}), folder, data, resume=True, stop_at=5)


def test_losses_of_other_windows_do_not_end_a_run(tmp_path: Path, data: Path, trained: Trained) -> None:
    """A best loss that no later one reaches ends the run, unless it is of other windows."""
    config = CONFIG.changed({"eval.every": 1, "eval.patience": 2, "eval.tokens": 16, "schedule.name": "plateau"})

    def unreachable(opened: StepState) -> None:
        opened.progress.best = 1e-3
        opened.plateau.load_state_dict({**opened.plateau.state_dict(), "best": 1e-3})

    for tokens, ends in ((16, True), (None, False)):
        folder = tmp_path / str(tokens)
        trained(config, folder, stop_at=1)
        summary = run(config.changed({"eval.tokens": tokens}), folder, data, resume=True, arrange=unreachable)
        assert (summary.step == 3, summary.best == 1e-3) == (ends, ends), tokens


def test_settings_that_the_state_does_not_fit_are_refused(
    tmp_path: Path, data: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(CONFIG, tmp_path / "run", stop_at=4)
    refused: list[tuple[dict[str, object], str]] = [
        ({"model.d_model": 32}, r"model\.d_model: 16 then, 32 now \(the weights of the run have the shape"),
        ({"optim.name": "muon"}, r"optim\.name: 'adamw' then, 'muon' now$"),
        ({"loop.seed": 3}, r"loop\.seed: 1337 then, 3 now$"),
        ({"ema.decay": 0.9}, r"ema\.decay: 0\.0 then, 0\.9 now \(the average of the weights begins with the run\)"),
        ({"loop.steps": 4}, r"loop\.steps is 4, and 4 steps are done: none is left"),
        ({"optim.lr": 0.1, "loop.steps": 3}, r"loop\.steps is 3, and 4 steps are done: none is left"),
        ({"schedule.start": 5}, r"schedule\.start is 5, and the next step is 5"),
    ]
    for changes, message in refused:
        with case(changes):
            with pytest.raises(tensorkeep.UsageError) as raised:
                run(CONFIG.changed(changes), tmp_path / "run", data, resume=True)
            assert re.search(message, raised.value.message)
            # Nothing is recorded.
            assert RunFolder(tmp_path / "run").record().resumed == []

    def refuse(*_: object, **__: object) -> None:
        raise tensorkeep.StateMismatchError("optimizers.adamw has other tensors")

    monkeypatch.setattr(tensorkeep.CheckpointManager, "restore", refuse)
    with pytest.raises(tensorkeep.StateMismatchError, match="the run does not fit the changed settings: optimizers"):
        run(CONFIG.changed({"techniques.activation-checkpointing": "on"}), tmp_path / "run", data, resume=True)


LEGS: dict[str, dict[str, object]] = {
    "longer": {"loop.steps": 14},
    "anneal": {"schedule.name": "linear", "schedule.final": 0.0, "schedule.start": 6, "loop.steps": 12},
    "shorter": {"loop.steps": 9},
    "rates and decay": {"optim.lr": 1e-4, "optim.weight_decay": 0.3, "optim.beta2": 0.99, "optim.grad_clip": 0.1},
    "batches": {"loop.batch_size": 4, "loop.gradient_accumulation_steps": 2},
    "dropout": {"model.dropout": 0.3},
    "technique": {"techniques.activation-checkpointing": "on"},
    "lengths": {"techniques.progressive-length": {"pieces": [4, 1], "shares": [0.75, 0.25]}},
    "16 bits": {"techniques.mixed-precision": {"dtype": "bf16"}},
    "to plateau": {"schedule.name": "plateau", "eval.every": 1, "schedule.patience": 1},
}
COMBINED = [
    ("longer", "technique", "rates and decay", "to plateau"),
    ("anneal", "batches"),
    ("shorter", "dropout", "16 bits", "lengths"),
]
ALONE = [pytest.param((name,), marks=pytest.mark.exhaustive) for name in LEGS]


@pytest.mark.parametrize("names", [*COMBINED, *ALONE], ids=str)
def test_leg_resumes_exactly_from_its_start_and_from_within(
    tmp_path: Path, data: Path, trained: Trained, names: tuple[str, ...]
) -> None:
    start = CONFIG.changed({**COSINE, "checkpoint.every": 2, "loop.steps": 10})
    leg = start.changed({setting: value for name in names for setting, value in LEGS[name].items()})
    for name in ("whole", "parts"):
        trained(start, tmp_path / name, stop_at=6)
    run(leg, tmp_path / "whole", data, resume=True)
    # Opened without a step, as if it had been killed before its first checkpoint; then stopped within the leg.
    assert len(notes(leg, tmp_path / "parts", data)) == 1
    current = current_config(RunFolder(tmp_path / "parts").record())
    assert current == RunFolder(tmp_path / "whole").record().last_config
    run(current, tmp_path / "parts", data, resume=True, stop_at=7)
    run(current, tmp_path / "parts", data, resume=True)
    # Not "technique": each process verifies them again.
    check_same(tmp_path / "parts", tmp_path / "whole", "train", "evaluate", "leg")
    (entry,) = RunFolder(tmp_path / "parts").record().segments
    assert entry.step == 6 and entry.config == current


def test_settings_of_a_leg_take_effect(tmp_path: Path, data: Path, trained: Trained) -> None:
    trained(CONFIG, tmp_path / "run", stop_at=4)
    changes = {"optim.lr": 1e-4, "optim.weight_decay": 0.3, "loop.batch_size": 2, "loop.steps": 6}
    with open_run(CONFIG.changed(changes), RunFolder(tmp_path / "run"), Dataset.open(data), resume=True) as opened:
        (optimizer,) = opened.optimizers.values()
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
        # 4 batches of 3 sequences are 6 batches of 2.
        assert opened.batches.position == 6
    run(CONFIG.changed(changes), tmp_path / "run", data, resume=True)
    assert [line["learning_rate"] for line in lines(tmp_path / "run", "train")] == [1e-3] * 4 + [1e-4] * 2
    (line,) = lines(tmp_path / "run", "leg")
    assert (line["step"], line["leg"], line["settings"]["optim.lr"]) == (5, 2, [1e-3, 1e-4])


def test_schedule_of_a_leg_covers_its_steps(tmp_path: Path, data: Path, trained: Trained) -> None:
    trained(CONFIG, tmp_path / "run", stop_at=8)
    linear = CONFIG.changed({"schedule.name": "linear", "schedule.final": 0.0, "loop.steps": 13})
    anneal = with_schedule_start(linear, CONFIG, (), 8)
    assert (anneal.schedule.start, anneal.schedule.warmup_steps) == (8, 0)
    run(anneal, tmp_path / "run", data, resume=True)
    rates = [line["learning_rate"] for line in lines(tmp_path / "run", "train")][8:]
    assert rates == pytest.approx([1e-3, 0.8e-3, 0.6e-3, 0.4e-3, 0.2e-3])
    # A start that was given is kept, and other settings do not restart the schedule.
    assert with_schedule_start(anneal, CONFIG, ["schedule.start"], 3).schedule.start == 8
    assert with_schedule_start(CONFIG.changed({"optim.lr": 1}), CONFIG, (), 8).schedule.start == 0


def test_leg_without_a_step_is_replaced_and_a_lost_start_an_error(tmp_path: Path, data: Path, trained: Trained) -> None:
    folder, start = RunFolder(tmp_path / "run"), CONFIG.changed({"checkpoint.every": 2, "checkpoint.keep_last": 9})
    trained(start, folder.path, stop_at=4)
    assert len(notes(start.changed({"optim.lr": 0.1}), folder.path, data)) == 1
    (note,) = notes(start.changed({"optim.lr": 0.2}), folder.path, data)
    assert note.startswith("segment 2 begins after step 4: optim.lr 0.001 -> 0.2")
    assert [leg.settings for leg in RunFolder(folder.path).record().segments] == [{"optim.lr": (1e-3, 0.2)}]
    # Back to the settings of the first leg.
    assert notes(start, folder.path, data) == ()
    assert RunFolder(folder.path).record().segments == []
    leg = start.changed({"optim.lr": 0.1})
    run(leg, folder.path, data, resume=True, stop_at=6)
    for step in (4, 6):
        tensorkeep.CheckpointManager(folder.checkpoints).delete(step)
    message = "began after step 4, and the last undamaged checkpoint"
    with pytest.raises(tensorkeep.CorruptCheckpointError, match=message):
        run(leg, folder.path, data, resume=True)


def test_records_of_earlier_versions_are_read(tmp_path: Path, data: Path, trained: Trained) -> None:
    """One of a run that was made longer, and one without ``eval.tokens``, which evaluates all tokens."""
    trained(CONFIG, tmp_path / "longer")

    def earlier(record: dict[str, Any]) -> None:
        del record["legs"], record["origin"]
        record["resumed"] = [{"step": 12, "time": "", "settings": {"loop.steps": [12, 20]}, "surroundings": {}}]

    current = edit_record(tmp_path / "longer", earlier)
    assert current.loop.steps == 20
    assert run(current, tmp_path / "longer", data, resume=True).step == 20
    trained(CONFIG, tmp_path / "run", stop_at=5)
    current = edit_record(tmp_path / "run", lambda record: record["config"]["eval"].pop("tokens"))
    assert current.eval.tokens is None
    assert notes(current, tmp_path / "run", data) == ()


def test_run_of_a_gpu_resumes_on_a_cpu_without_its_techniques(tmp_path: Path, data: Path, trained: Trained) -> None:
    """The error has the options with which the run continues, as a new leg."""
    trained(CONFIG, tmp_path / "run", stop_at=4)

    def of_a_gpu(record: dict[str, Any]) -> None:
        record["config"]["techniques"] = {"fused-optimizer": {}, "tf32": {}, "cuda-graphs": {}}
        record["config"]["optim"]["implementation"] = "fused"

    current = edit_record(tmp_path / "run", of_a_gpu)
    with pytest.raises(tensorkeep.UnsupportedError) as raised:
        run(current, tmp_path / "run", data, resume=True)
    # Some CPUs have tf32.
    assert "cuda-graphs needs a CUDA device; the run is on cpu" in raised.value.message
    off = {"techniques.tf32": "off", "techniques.cuda-graphs": "off"}
    assert "--techniques.cuda-graphs off" in str(raised.value.remedy)
    cpu = current.changed(off)
    assert notes(cpu, tmp_path / "run", data)[-1].startswith(
        "segment 2 begins after step 4: techniques.tf32 on -> none, techniques.cuda-graphs on -> none"
    )
    assert run(cpu, tmp_path / "run", data, resume=True).step == 12


def test_rates_in_notes_are_those_that_plateau_has_reduced(tmp_path: Path, data: Path, trained: Trained) -> None:
    # Losses that stay the same: each evaluation but the first one halves the rate.
    plateau = {"schedule.name": "plateau", "schedule.patience": 1, "schedule.factor": 0.5, "eval.every": 2}
    start = CONFIG.changed({**plateau, "optim.lr": 1e-9, "loop.steps": 10})
    for changes in ({"optim.lr": 5e-10, "loop.steps": 10}, {"schedule.name": "constant"}):
        folder = tmp_path / str(len(changes))
        trained(start, folder, stop_at=6)
        (note,) = [each for each in notes(start.changed(changes), folder, data) if "learning rate goes" in each]
        run(start.changed(changes), folder, data, resume=True, stop_at=7)
        rate = lines(folder, "train")[-1]["learning_rate"]
        assert f"; the learning rate goes to {rate:.3g} (" in note, changes


def test_remedy_for_a_schedule_that_begins_after_a_damaged_checkpoint_is_an_option(
    tmp_path: Path, data: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(CONFIG.changed({"checkpoint.every": 4, "checkpoint.keep_last": 9}), tmp_path / "run", stop_at=8)
    files = [each for each in (tmp_path / "run" / "checkpoints" / "step-000008").rglob("*") if each.is_file()]
    damaged = max(files, key=lambda each: each.stat().st_size)
    flip_bit(damaged, damaged.stat().st_size // 2)
    command = ["train", "--out", str(tmp_path / "run"), "--resume", "--schedule.name", "cosine", "--quiet"]
    with pytest.warns(UserWarning, match="step-000008 is skipped"):
        assert main(command) == 2
    assert "give 4 or less, such as --schedule.start 4" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="step-000008 is skipped"):
        assert main([*command, "--schedule.start", "4"]) == 0
