"""``tensorkeep data``, ``train``, ``generate`` and ``export`` on the command line."""

import json
import os
import shlex
import shutil
import signal
import time
from contextlib import suppress
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tensorkeep
from chatgot.cli import train as techniques
from chatgot.cli.train import resume_command
from chatgot.run.folder import RunFolder
from chatgot.techniques.base import TECHNIQUE_CLASSES, Machine
from chatgot.techniques.stack import COMBINATIONS
from command_line import Call, RunJson, run_on_terminal
from forked import ended, start, start_tensorkeep
from tensorkeep.cli.main import main
from tensorkeep.errors import UsageError
from tensorkeep.testing.cases import case

TINY = [
    *("--model.n_layers", "1", "--model.n_heads", "2", "--model.d_model", "16", "--model.context_length", "16"),
    *("--loop.batch_size", "2", "--schedule.warmup_steps", "1", "--eval.every", "5", "--checkpoint.every", "5"),
    *("--log.every", "1"),
]
RECIPE = "shakespeare-char-cpu"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("she sells sea shells on the sea shore; " * 60)
    return path


def losses(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


def test_from_text_to_text(tmp_path: Path, text: Path, run_json: RunJson) -> None:
    run = tmp_path / "run"
    command = ["train", RECIPE, "--data", text, "--out", run, *TINY]
    ended = run_json(*command, "--loop.steps=12", "--sample.every", "6")
    assert (ended["step"], ended["reason"]) == (12, "done")
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    evaluated = [line["validation_loss"] for line in lines if line["kind"] == "evaluate"]
    assert (ended["loss"], ended["best"], len(evaluated)) == (evaluated[-1], min(evaluated), 3)
    assert [step for step, _ in losses(run)] == list(range(1, 13))
    output = run_json("generate", run, "--prompt", "she ", "--tokens", "9", "--seed", "4")
    assert (output["step"], output["tokens"], len(output["text"])) == (12, 9, 13)
    assert output["text"].startswith("she ")
    again = run_json("generate", run, "--prompt", "she ", "--tokens", "9", "--seed", "4", "--no-cache")
    assert again["text"] == output["text"]
    assert main(["verify", str(run / "checkpoints" / "step-000012"), "-q"]) == 0
    for address, step in ((run / "checkpoints", 12), (f"{run}@10", 10), (f"{run}/checkpoints@latest", 12)):
        assert run_json("generate", address, "--tokens", "1")["step"] == step
    assert run_json("export", f"{run}@10", "--out", tmp_path / "ten")["step"] == 10
    run_json("generate", f"{run}@6", code=5)
    run_json("generate", f"{run}@10", "--which", "best", code=2)
    listed = run_json("log", run)
    assert (listed["metric"], [step["number"] for step in listed["steps"]]) == ("validation_loss", [10, 12])
    exported = run_json("export", run, "--out", tmp_path / "hf")
    assert exported["architecture"] == "GPT2LMHeadModel"
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_a_settings_file_and_no_note_on_given_data(tmp_path: Path, text: Path, call: Call, run_json: RunJson) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'[train]\nout = "{tmp_path / "run"}"\n[train.loop]\nsteps = 3\n[train.optim]\nlr = 0.5\n')
    # Settings may stand before the recipe.
    shown = call("train", *TINY, RECIPE, "--data", text, "-C", file, "--optim.lr", "0.25")
    config = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert (config["optim"]["lr"], losses(tmp_path / "run")[-1][0]) == (0.25, 3)
    assert "no --data" not in shown.err + call("train", "--out", tmp_path / "run", "--resume").err


@pytest.mark.parametrize("raised", [torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError()])
def test_out_of_memory(tmp_path: Path, text: Path, raised: Any, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setattr("chatgot.model.gpt.token_loss", mock.Mock(side_effect=raised))
    output = call("train", RECIPE, "--data", text, "--out", tmp_path / "run", *TINY, code=3).err
    tune = f"tensorkeep tune training --run {tmp_path / 'run'} --memory SIZE"
    assert all(text in output for text in ("out of memory during training", "--loop.batch_size", tune)), output


def test_a_run_starts_once_and_resumes_with_a_note(tmp_path: Path, text: Path, call: Call, run_json: RunJson) -> None:
    run = tmp_path / "run"
    command = ["train", RECIPE, "--data", text, "--out", run, *TINY, "--loop.steps", "2"]
    run_json(*command)
    run_json(*command, code=6)
    shown = call("train", "gpt2-124m", "--out", run, "--resume", code=2)
    assert "is a run of 'shakespeare-char-cpu', not of 'gpt2-124m'" in shown.err
    shown = call("train", "--out", run, "--resume", "--optim.lr", "1", code=2)
    assert "loop.steps is 2, and 2 steps are done: none is left" in shown.err
    ended = run_json("train", "--out", run, "--resume")
    assert ended["step"] == 2
    about = json.loads((run / "run.json").read_text())
    about["surroundings"]["torch"] = "1.0"
    (run / "run.json").write_text(json.dumps(about))
    errors = call("train", "--out", run, "--resume").err
    assert "may differ in the last bits" in errors and "torch was 1.0, and is" in errors


def test_legs_and_branches_are_announced_and_logged(tmp_path: Path, text: Path, call: Call, run_json: RunJson) -> None:
    run, new = tmp_path / "run", tmp_path / "new"
    run_json("train", RECIPE, "--data", text, "--out", run, *TINY, "--loop.steps", "4")
    errors = call("train", "--out", run, "--resume", "--schedule.name", "linear", "--loop.steps", "6").err
    start = (
        "segment 2 begins after step 4: schedule.name cosine -> linear, schedule.start 0 -> 4, schedule.warmup_steps"
    )
    assert start in errors and "(linear over steps 5 to 6)" in errors
    command = ["train", "--branch", f"{run}@6", "--out", str(new), "--optim.lr", "1e-4", "--loop.steps", "8"]
    branch = f"branches from {run} after step 6: optim.lr 0.001 -> 0.0001, loop.steps 6 -> 8"
    assert branch in call(*command, "--resume").err
    # Without its origin, the same command resumes it.
    shutil.rmtree(run)
    ended = run_json(*command[:-1], "9", "--resume")
    assert (ended["step"], ended["steps"]) == (9, 1)
    listed = run_json("log", new)
    assert (listed["origin"]["step"], listed["segments"][0]["settings"]) == (6, {"loop.steps": [8, 9]})
    assert listed["legs"] == listed["segments"]  # the older name
    out = call("log", new).out
    assert f"branched from {run} after step 6: optim.lr" in out
    # A run that exists is resumed only as what it is.
    for option, address in (("--branch", f"{run}@3"), ("--branch", str(new)), ("--init-from", str(run))):
        shown = call("train", option, address, "--out", new, "--resume", code=2)
        assert f"the run is a branch of {run}@6, and {option} is {address}" in shown.err
    # Data is taken as it was prepared.
    shown = call("train", "--branch", new, "--out", tmp_path / "b", "--data.tokenizer", "byte", code=2)
    assert "data.tokenizer is 'byte', and the data was prepared with" in shown.err
    assert "segment 2 began after step 8, " in out
    (new / "run.json").write_text("{")
    assert "the segments of the run are not known" in call("log", new).out


def test_resume_prepares_data_and_a_tokenizer_gives_the_vocab_size(tmp_path: Path, text: Path, call: Call) -> None:
    (tmp_path / "short.txt").write_text("abcdefgh" * 20)
    command = ["train", RECIPE, "--out", tmp_path / "run", "--resume", *TINY, "--loop.steps", "2"]
    call(*command, "--data", tmp_path / "short.txt", "--model.context_length", "500", code=2)
    call(*command, "--data", text)
    about = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["about"]
    assert about["vocab_size"] == len(set(text.read_text()))
    command = ["train", "chatgot-85m", "--data", text, "--data.tokenizer", "byte", "--out", tmp_path / "new", *TINY]
    call(*command, "--default_techniques", "none", "--loop.steps", "1", "--sample.every", "0")


def test_the_default_data_is_named_before_it_is_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "no --data is given: training on the sources of Python's standard library; --data FILE takes your text\n"

    def prepared_later(*_: object, **__: object) -> None:
        assert capsys.readouterr().err == note
        raise UsageError("stop here")

    monkeypatch.setattr("chatgot.cli.train.open_data", prepared_later)
    assert main(["train", RECIPE, "--out", str(tmp_path / "other"), *TINY]) == 2
    assert "stop here" in capsys.readouterr().err


def test_a_relative_source_is_found_from_another_folder(
    tmp_path: Path, text: Path, call: Call, run_json: RunJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call("data", "prepare", "text.txt", "--out", "prepared")
    run = tmp_path / "run"
    command = ["train", RECIPE, "--out", run, *TINY, "--data.source", "prepared"]
    run_json(*command, "--loop.steps", "2")
    monkeypatch.chdir("/")
    run_json("train", "--out", run, "--resume")
    (tmp_path / "prepared").rename(tmp_path / "moved")
    run_json("train", "--out", run, "--resume", code=5)
    run_json("train", "--out", run, "--resume", "--data", tmp_path / "moved")
    assert json.loads((run / "run.json").read_text())["resumed"][-1]["settings"] == {
        "data.source": [str(tmp_path / "prepared"), str(tmp_path / "moved")]
    }


def test_prepared_data_is_used_and_a_setting_against_it_refused(tmp_path: Path, text: Path, call: Call) -> None:
    call("data", "prepare", text, "--tokenizer", "byte", "--out", tmp_path / "data", "-q")
    command = ["train", RECIPE, "--data", tmp_path / "data", "--out", tmp_path / "run", *TINY, "--loop.steps", "2"]
    contradiction = "data.tokenizer is 'char', and the data was prepared with 'byte'"
    assert contradiction in call(*command, "--data.tokenizer", "char", code=2).err
    assert not (tmp_path / "run").exists()
    call(*command, "--data.tokenizer", "byte")
    assert contradiction in call(*command, "--data.tokenizer", "char", "--resume", code=2).err
    assert not (tmp_path / "run" / "data").exists()
    (tmp_path / "data").rename(tmp_path / "moved")  # what was trained does not need it
    call("generate", tmp_path / "run", "--which", "best", "--prompt", "s", "--tokens", "3")


def test_the_resume_command_is_quoted_for_a_shell(tmp_path: Path) -> None:
    words = shlex.split(resume_command(RunFolder(tmp_path / "it's a run; really")))
    assert words == ["tensorkeep", "train", "--out", str(tmp_path / "it's a run; really"), "--resume"]


def wait_for_steps(run: Path, process: ForkServerProcess, count: int) -> None:
    while not (run / "log.jsonl").exists() or len(losses(run)) < count:
        assert process.is_alive(), process.exitcode
        time.sleep(0.02)


def handles(process: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    status = Path("/proc", str(process), "status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def cpu_seconds(process: int) -> float:
    user, system = Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.integration
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)])
def test_ctrl_c_saves_and_the_run_resumes_exactly(tmp_path: Path, text: Path, number: signal.Signals) -> None:
    train = partial(start_tensorkeep, "train", RECIPE, output=tmp_path / "output")
    command = ["--data", text, *TINY, "--loop.steps", "3000", "--eval.every", "0", "--sample.every", "0"]
    process = train(*command, "--out", tmp_path / "parts")
    wait_for_steps(tmp_path / "parts", process, 5)
    os.kill(process.pid, number)
    code, errors = ended(process), (tmp_path / "output").read_text()
    assert code == 130, errors
    assert "stopped after step" in errors
    assert "--resume" in errors
    stopped = tensorkeep.CheckpointManager(tmp_path / "parts" / "checkpoints").latest()
    assert losses(tmp_path / "parts")[-1][0] == stopped.number
    resumed = train("--out", tmp_path / "parts", "--resume")
    wait_for_steps(tmp_path / "parts", resumed, stopped.number + 20)
    resumed.kill()
    whole = train(*command, "--out", tmp_path / "whole")
    wait_for_steps(tmp_path / "whole", whole, stopped.number + 20)
    whole.kill()
    count = stopped.number + 20
    assert losses(tmp_path / "parts")[:count] == losses(tmp_path / "whole")[:count]


@pytest.mark.integration
@pytest.mark.xdist_group("processes")
def test_a_closing_terminal_lets_the_run_save(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    words = ["--data", str(text), "--out", str(run), *TINY, "--loop.steps", "1000000", "--eval.every", "0"]
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    command = ["train", RECIPE, *words]
    process = start(run_on_terminal, os.ttyname(theirs), command, {}, output=tmp_path / "output")
    while not (run / "log.jsonl").exists() or len(losses(run)) < 5:
        assert process.is_alive(), process.exitcode
        with suppress(BlockingIOError):
            os.read(ours, 1 << 16)  # a full pipe would block the run
        time.sleep(0.02)
    os.close(theirs)
    os.close(ours)
    assert ended(process) == 130
    assert losses(run)[-1][0] == tensorkeep.CheckpointManager(run / "checkpoints").latest().number


@pytest.mark.integration
@pytest.mark.xdist_group("processes")
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, text: Path) -> None:
    # One step takes minutes here, with its 20,000 small batches.
    command = [
        "train",
        RECIPE,
        "--data",
        text,
        "--loop.gradient_accumulation_steps",
        "20000",
        "--out",
        tmp_path / "run",
    ]
    process = start_tensorkeep(*command, output=tmp_path / "output")
    while not handles(process.pid, signal.SIGHUP):  # the last of the handlers of a run
        assert process.is_alive(), process.exitcode
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    # Signals that arrive together are one; once the process has computed, it has handled the first.
    before = cpu_seconds(process.pid)
    while process.is_alive() and cpu_seconds(process.pid) < before + 0.2:
        time.sleep(0.02)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGINT)
    code, errors = ended(process), (tmp_path / "output").read_text()
    assert code == 130, errors
    assert "Traceback" not in errors


TRAIN = ["train", "shakespeare-char-cpu", "--loop.device", "cpu"]


def test_mistyped_techniques_and_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setattr("chatgot.techniques.base.find_spec", lambda _: None)
    (tmp_path / "mine.toml").write_text('[train.techniques]\ncompil = "off"\n')
    shown = call(*TRAIN, "-C", tmp_path / "mine.toml", "--out", tmp_path / "run", code=7)
    assert "there is no technique named 'compil'" in shown.err
    shown = call(*TRAIN, "--out", tmp_path / "run", "--technique", "low-bit-optimizer", code=7)
    assert "low-bit-optimizer needs the package 'torchao', which is missing: pip install" in shown.err
    assert not (tmp_path / "run").exists()


def test_named_techniques_are_turned_on(run_json: RunJson) -> None:
    for words, on in (
        ("--technique fused-optimizer,fused-optimizer", {"fused-optimizer": {}}),
        ("--technique C", {name: {} for name in COMBINATIONS["C"]}),
        ("--technique compile --techniques.compile off", {}),
        ("--techniques.mixed-precision.dtype bf16 --technique mixed-precision", {"mixed-precision": {"dtype": "bf16"}}),
    ):
        with case(words):
            settings = run_json(*TRAIN, *words.split(), "--list-settings")
            assert settings["techniques"] == on


def test_the_list_shows_needs_effect_and_settings(run_json: RunJson, call: Call) -> None:
    found = run_json("train", "--list-techniques", "--loop.device", "cpu")
    assert [each["name"] for each in found["techniques"]] == TECHNIQUE_CLASSES.names()
    assert found["combinations"] == json.loads(json.dumps(COMBINATIONS))
    lines = call("train", "--list-techniques", "--loop.device", "cpu").out.splitlines()
    here, elsewhere = lines.index("Can run here"), lines.index("Cannot run here")
    for each in found["techniques"]:
        at = lines.index(f"{each['name']} ({each['kind']})")
        assert (here < at < elsewhere) is (each["lacks"] is None)
        own = lines[at : lines.index("", at)]
        assert f"    effect: {each['effect']}" in own
        assert each["lacks"] is None or f"    {each['lacks']}" in own
        assert all(any(f"{name} = " in line for line in own) for name in each["settings"])


def test_the_list_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((60, 24)))
    import torch

    for name in TECHNIQUE_CLASSES.names():
        each = techniques.described(name, Machine(torch.device("cpu")))
        techniques.print_technique(each)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{each['name']} ({each['kind']})"
        assert all(len(line) <= 60 for line in lines)
