"""``tensorkeep data``, ``train``, ``generate`` and ``export`` on the command line."""

import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from forked import ended, start, start_tensorkeep
from tensorkeep.cli.main import main
from tensorkeep.cli.train import resume_command
from tensorkeep.errors import UsageError
from tensorkeep.train.run.folder import RunFolder

TINY = [
    *("--model.n_layers", "1", "--model.n_heads", "2", "--model.d_model", "16", "--model.context_length", "16"),
    *("--loop.batch_size", "2", "--schedule.warmup_steps", "1", "--eval.every", "5", "--checkpoint.every", "5"),
    *("--log.every", "1"),
]
RECIPE = "shakespeare-char-cpu"


@pytest.fixture(autouse=True)
def quick_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorkeep.train.run.setup.measured_peak", lambda device: 1e9)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("she sells sea shells on the sea shore; " * 60)
    return path


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "text.txt").write_text("she sells sea shells on the sea shore; " * 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorkeep.train.run.setup.measured_peak", lambda device: 1e9)
        command = ["train", RECIPE, "--data", folder / "text.txt", "--out", folder / "run", *TINY, "--loop.steps", "1"]
        assert main([*map(str, command), "-q"]) == 0
    return folder / "run"


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def losses(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


def test_from_text_to_text(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    code, ended = run_json(
        capsys, "train", RECIPE, "--data", text, "--out", run, *TINY, "--loop.steps=12", "--sample.every", "6"
    )
    assert (code, ended["step"], ended["reason"]) == (0, 12, "done")
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    evaluated = [line["validation_loss"] for line in lines if line["kind"] == "evaluate"]
    assert (ended["loss"], ended["best"], len(evaluated)) == (evaluated[-1], min(evaluated), 3)
    assert [step for step, _ in losses(run)] == list(range(1, 13))
    code, output = run_json(capsys, "generate", run, "--prompt", "she ", "--tokens", "9", "--seed", "4")
    assert (code, output["step"], output["tokens"], len(output["text"])) == (0, 12, 9, 13)
    assert output["text"].startswith("she ")
    again = run_json(capsys, "generate", run, "--prompt", "she ", "--tokens", "9", "--seed", "4", "--no-cache")[1]
    assert again["text"] == output["text"]
    assert main(["verify", str(run / "checkpoints" / "step-000012"), "-q"]) == 0
    for address, step in ((run / "checkpoints", 12), (f"{run}@10", 10), (f"{run}/checkpoints@latest", 12)):
        assert run_json(capsys, "generate", address, "--tokens", "1")[1]["step"] == step
    assert run_json(capsys, "export", f"{run}@10", "--out", tmp_path / "ten")[1]["step"] == 10
    assert run_json(capsys, "generate", f"{run}@6")[0] == 5
    assert run_json(capsys, "generate", f"{run}@10", "--which", "best")[0] == 2
    code, listed = run_json(capsys, "log", run)
    assert (code, listed["metric"], [step["number"] for step in listed["steps"]]) == (0, "validation_loss", [10, 12])
    code, exported = run_json(capsys, "export", run, "--out", tmp_path / "hf")
    assert (code, exported["architecture"]) == (0, "GPT2LMHeadModel")
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_data_that_was_prepared_before(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", str(text), "--tokenizer", "byte", "--out", str(tmp_path / "data"), "-q"]) == 0
    run = tmp_path / "run"
    assert (
        run_json(capsys, "train", RECIPE, "--data", tmp_path / "data", "--out", run, *TINY, "--loop.steps", "2")[0] == 0
    )
    assert not (run / "data").exists()
    (tmp_path / "data").rename(tmp_path / "moved")  # what was trained does not need it
    assert run_json(capsys, "generate", run, "--which", "best", "--prompt", "s", "--tokens", "3")[0] == 0


def test_a_file_of_settings(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'[train]\nout = "{tmp_path / "run"}"\n[train.loop]\nsteps = 3\n[train.optim]\nlr = 0.5\n')
    code, ended = run_json(capsys, "train", RECIPE, "--data", text, *TINY, "-C", file, "--optim.lr", "0.25")
    assert (code, ended["step"]) == (0, 3)
    config = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert config["optim"]["lr"] == 0.25


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["shakespear-char-cpu"], 2, "did you mean 'shakespeare-char-cpu'?"),
        ([], 2, "no recipe is given"),
        ([RECIPE, "--optm.lr", "1"], 2, "did you mean --optim.lr"),
        (["--resum", RECIPE], 2, "did you mean --resume?"),
        ([RECIPE, "--outt", "x"], 2, "did you mean --out?"),
        ([RECIPE, "--no-resume"], 2, "there is no option --no-resume"),
        (["--recipe", RECIPE], 2, "give the recipe as a word"),
        ([RECIPE, "--loop.steps"], 2, "--loop.steps has no value"),
        ([RECIPE, RECIPE], 2, "is not a setting"),
        ([RECIPE, "--data.source", "stdlib"], 2, "which is the same setting"),
        ([RECIPE, "--optim.lr", "inf"], 2, "optim.lr is 'inf'"),
        ([RECIPE, "--sample.top_k", "0"], 2, "sample.top_k is '0'"),
        ([RECIPE, "--checkpoint.compression", "nonsense"], 2, "there is no compression 'nonsense'"),
        ([RECIPE, "--checkpoint.memory_budget", "nonsense"], 2, "'nonsense' is not a size"),
        ([RECIPE, "--eval.patience", "3", "--eval.every", "0"], 2, "eval.every is 0"),
        ([RECIPE, "--schedule.name", "range"], 2, "schedule.warmup_steps is 100"),
        ([RECIPE, "--data.tokenizer", "bite"], 2, "did you mean 'byte'?"),
        ([RECIPE, "--data.vocab_size", "300"], 2, "has a fixed vocabulary size"),
        ([RECIPE, "--loop.device", "meta"], 2, "the device 'meta' cannot be used"),
        ([RECIPE, "--model.context_length", "100000"], 2, "a context of 100,000 needs"),
        ([RECIPE, "--loop.device", "cuda:99"], 2, "the device 'cuda:99' cannot be used"),
        ([RECIPE, "--data", "no-such-file"], 5, "no-such-file"),
        (["--resume"], 5, "contains no run to resume"),
        (["--branch", "no-such-run"], 5, "holds no run"),
    ],
)
def test_bad_input_is_one_clear_line(
    tmp_path: Path,
    text: Path,
    arguments: list[str],
    code: int,
    message: str,
    check_refused: Callable[..., list[str]],
) -> None:
    data = [] if "--data" in arguments else ["--data", str(text)]
    check_refused(["train", *arguments, *data, "--out", str(tmp_path / "run")], code, message)
    # A context that is longer than the data is known once the data is prepared, in the run's folder.
    assert (tmp_path / "run").exists() == ("a context of" in message)


@pytest.mark.parametrize(
    "raised",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError()],
    ids=["cuda", "cpu"],
)
def test_out_of_memory_in_a_step_has_a_remedy(
    tmp_path: Path, text: Path, raised: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(*_: object) -> None:
        raise raised

    monkeypatch.setattr("tensorkeep.train.model.gpt.token_loss", loss)
    assert main(["train", RECIPE, "--data", str(text), "--out", str(tmp_path / "run"), *TINY]) == 3
    output = capsys.readouterr().err
    assert "out of memory during training" in output
    assert "--loop.batch_size" in output
    assert f"tensorkeep tune training --run {tmp_path / 'run'} --memory SIZE" in output


def test_a_run_is_not_started_twice(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", RECIPE, "--data", text, "--out", tmp_path / "run", *TINY, "--loop.steps", "2"]
    assert run_json(capsys, *command)[0] == 0
    assert run_json(capsys, *command)[0] == 6
    assert main(["train", "gpt2-124m", "--out", str(tmp_path / "run"), "--resume"]) == 2
    assert "is a run of 'shakespeare-char-cpu', not of 'gpt2-124m'" in capsys.readouterr().err
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--optim.lr", "1"]) == 2
    assert "loop.steps is 2, and 2 steps are done: none is left" in capsys.readouterr().err
    code, ended = run_json(capsys, "train", "--out", tmp_path / "run", "--resume")
    assert (code, ended["step"]) == (0, 2)


def test_legs_and_branches_are_announced_and_logged(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, new = tmp_path / "run", tmp_path / "new"
    assert run_json(capsys, "train", RECIPE, "--data", text, "--out", run, *TINY, "--loop.steps", "4")[0] == 0
    assert main(["train", "--out", str(run), "--resume", "--schedule.name", "linear", "--loop.steps", "6"]) == 0
    errors = capsys.readouterr().err
    start = "leg 2 begins after step 4: schedule.name cosine -> linear, schedule.start 0 -> 4, schedule.warmup_steps"
    assert start in errors
    assert "(linear over steps 5 to 6)" in errors
    command = ["train", "--branch", f"{run}@6", "--out", str(new), "--optim.lr", "1e-4", "--loop.steps", "8"]
    assert main([*command, "--resume"]) == 0
    assert f"branches from {run} after step 6: optim.lr 0.001 -> 0.0001, loop.steps 6 -> 8" in capsys.readouterr().err
    # Without its origin, the same command resumes it.
    shutil.rmtree(run)
    code, ended = run_json(capsys, *command[:-1], "9", "--resume")
    assert (code, ended["step"], ended["steps"]) == (0, 9, 1)
    code, listed = run_json(capsys, "log", new)
    assert (code, listed["origin"]["step"], listed["legs"][0]["settings"]) == (0, 6, {"loop.steps": [8, 9]})
    assert main(["log", str(new)]) == 0
    out = capsys.readouterr().out
    assert f"branched from {run} after step 6: optim.lr" in out
    # A run that exists is resumed only as what it is.
    for option, address in (("--branch", f"{run}@3"), ("--branch", str(new)), ("--init-from", str(run))):
        assert main(["train", option, address, "--out", str(new), "--resume"]) == 2
        assert f"the run is a branch of {run}@6, and {option} is {address}" in capsys.readouterr().err
    # Data is taken as it was prepared.
    assert main(["train", "--branch", str(new), "--out", str(tmp_path / "b"), "--data.tokenizer", "byte"]) == 2
    assert "data.tokenizer is 'byte', and the data was prepared with" in capsys.readouterr().err
    assert "leg 2 began after step 8, " in out
    (new / "run.json").write_text("{")
    assert main(["log", str(new)]) == 0
    assert "the legs of the run are not known" in capsys.readouterr().out


def test_resume_without_a_run_prepares_the_given_data(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("abcdefgh" * 20)
    command = ["train", RECIPE, "--out", tmp_path / "run", "--resume", *TINY, "--loop.steps", "2"]
    assert run_json(capsys, *command, "--data", tmp_path / "short.txt", "--model.context_length", "500")[0] == 2
    assert run_json(capsys, *command, "--data", text)[0] == 0
    about = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["about"]
    assert about["vocab_size"] == len(set(text.read_text()))


def test_the_default_data_is_named_before_it_is_prepared(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "no --data is given: training on the sources of Python's standard library; --data FILE takes your text\n"

    def prepared_later(*_: object, **__: object) -> None:
        assert capsys.readouterr().err == note
        raise UsageError("stop here")

    command = ["train", RECIPE, "--out", str(tmp_path / "run"), *TINY, "--loop.steps", "1"]
    assert main([*command, "--data", str(text)]) == 0
    assert "no --data" not in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert "no --data" not in capsys.readouterr().err
    monkeypatch.setattr("tensorkeep.cli.train.open_data", prepared_later)
    assert main(["train", RECIPE, "--out", str(tmp_path / "other"), *TINY]) == 2
    assert "stop here" in capsys.readouterr().err


def test_settings_may_stand_before_the_recipe(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, ended = run_json(capsys, "train", "--loop.steps=2", *TINY, RECIPE, "--data", text, "--out", tmp_path / "run")
    assert (code, ended["step"]) == (0, 2)


def test_another_tokenizer_replaces_the_vocabulary_size(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "chatgot-85m", "--data", text, "--data.tokenizer", "byte", "--out", tmp_path / "run", *TINY]
    command += ["--default_techniques", "none"]
    assert run_json(capsys, *command, "--loop.steps", "1", "--sample.every", "0")[0] == 0


def test_a_relative_source_is_found_from_another_folder(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", "prepare", "text.txt", "--out", "prepared", "-q"]) == 0
    run = tmp_path / "run"
    command = ["train", RECIPE, "--out", run, *TINY, "--data.source", "prepared"]
    assert run_json(capsys, *command, "--loop.steps", "2")[0] == 0
    monkeypatch.chdir("/")
    assert run_json(capsys, "train", "--out", run, "--resume")[0] == 0
    (tmp_path / "prepared").rename(tmp_path / "moved")
    assert run_json(capsys, "train", "--out", run, "--resume")[0] == 5
    assert run_json(capsys, "train", "--out", run, "--resume", "--data", tmp_path / "moved")[0] == 0
    assert json.loads((run / "run.json").read_text())["resumed"][-1]["settings"] == {
        "data.source": [str(tmp_path / "prepared"), str(tmp_path / "moved")]
    }


def test_a_setting_that_contradicts_prepared_data_is_refused(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "prepare", str(text), "--tokenizer", "byte", "--out", str(tmp_path / "data"), "-q"]) == 0
    command = ["train", RECIPE, "--data", str(tmp_path / "data"), "--out", str(tmp_path / "run"), *TINY]
    assert main([*command, "--data.tokenizer", "char"]) == 2
    assert "data.tokenizer is 'char', and the data was prepared with 'byte'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*command, "--data.tokenizer", "byte", "--loop.steps", "1", "-q"]) == 0
    assert main([*command, "--data.tokenizer", "char", "--resume"]) == 2
    assert "data.tokenizer is 'char', and the data was prepared with 'byte'" in capsys.readouterr().err


def test_resuming_on_another_device_is_reported(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert run_json(capsys, "train", RECIPE, "--data", text, "--out", run, *TINY, "--loop.steps", "1")[0] == 0
    about = json.loads((run / "run.json").read_text())
    about["surroundings"]["torch"] = "1.0"
    (run / "run.json").write_text(json.dumps(about))
    assert main(["train", "--out", str(run), "--resume"]) == 0
    assert "may differ in the last bits" in (output := capsys.readouterr().err)
    assert "torch was 1.0, and is" in output


def test_the_resume_command_is_quoted_for_a_shell(tmp_path: Path) -> None:
    words = shlex.split(resume_command(RunFolder(tmp_path / "it's a run; really")))
    assert words == ["tensorkeep", "train", "--out", str(tmp_path / "it's a run; really"), "--resume"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "meta"], "the device 'meta' cannot be used"),
        (["--tokens", "0"], "--tokens"),
        (["--tokens", "9999999999999"], "--tokens"),
        (["--top-k", "0"], "top_k is 0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--prompt", "%"], "%"),
    ],
)
def test_bad_input_to_generate_is_one_clear_line(
    tiny_run: Path, arguments: list[str], message: str, check_refused: Callable[..., list[str]]
) -> None:
    check_refused(["generate", str(tiny_run), *arguments], 2, message)


def test_generating_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path)]) == 5
    assert "holds no run" in capsys.readouterr().err


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


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ctrl_c_saves_and_the_run_resumes_exactly(tmp_path: Path, text: Path, number: signal.Signals) -> None:
    train = partial(start_tensorkeep, "train", RECIPE, output=tmp_path / "output")
    command = ["--data", text, *TINY, "--loop.steps", "3000", "--eval.every", "0", "--sample.every", "0"]
    process = train(*command, "--out", tmp_path / "parts")
    wait_for_steps(tmp_path / "parts", process, 5)
    assert process.pid is not None
    os.kill(process.pid, number)
    code, errors = ended(process), (tmp_path / "output").read_text()
    assert code == 130, errors
    assert "stopped after step" in errors
    assert "--resume" in errors
    stopped = tensorkeep.CheckpointManager(tmp_path / "parts" / "checkpoints").latest()
    assert stopped is not None
    assert losses(tmp_path / "parts")[-1][0] == stopped.number
    resumed = train("--out", tmp_path / "parts", "--resume")
    wait_for_steps(tmp_path / "parts", resumed, stopped.number + 20)
    resumed.kill()
    whole = train(*command, "--out", tmp_path / "whole")
    wait_for_steps(tmp_path / "whole", whole, stopped.number + 20)
    whole.kill()
    count = stopped.number + 20
    assert losses(tmp_path / "parts")[:count] == losses(tmp_path / "whole")[:count]


def train_on_a_terminal(words: list[str], terminal: str) -> None:
    os.setsid()
    # A terminal that the leader of a session opens controls the session, to which it sends SIGHUP.
    device = os.open(terminal, os.O_RDWR)
    for standard in range(3):
        os.dup2(device, standard)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.exit(main(["train", *words]))


def test_a_closing_terminal_lets_the_run_save(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    command = [RECIPE, "--data", text, "--out", run, *TINY, "--loop.steps", "1000000", "--eval.every", "0"]
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    process = start(train_on_a_terminal, [*map(str, command)], os.ttyname(theirs), output=tmp_path / "output")
    while not (run / "log.jsonl").exists() or len(losses(run)) < 5:
        assert process.is_alive(), process.exitcode
        with suppress(BlockingIOError):
            os.read(ours, 1 << 16)  # a full pipe would block the run
        time.sleep(0.02)
    os.close(theirs)
    os.close(ours)
    assert ended(process) == 130
    saved = tensorkeep.CheckpointManager(run / "checkpoints").latest()
    assert saved is not None
    assert losses(run)[-1][0] == saved.number


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, text: Path) -> None:
    # One step takes minutes here, with its 20,000 small batches.
    command = ["train", RECIPE, "--data", text, "--loop.accumulate", "20000", "--out", tmp_path / "run"]
    process = start_tensorkeep(*command, output=tmp_path / "output")
    assert process.pid is not None
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
