"""``holdfast data``, ``train``, ``generate`` and ``export`` on the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.cli.main import main

TINY = [
    *("--model.n_layers", "1", "--model.n_heads", "2", "--model.d_model", "16", "--model.context_length", "16"),
    *("--loop.batch_size", "2", "--schedule.warmup_steps", "1", "--eval.every", "5", "--checkpoint.every", "5"),
    *("--log.every", "1"),
]
RECIPE = "shakespeare-char-cpu"


@pytest.fixture(autouse=True)
def quick_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.train.run.measured_peak", lambda device: 1e9)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("she sells sea shells on the sea shore; " * 60)
    return path


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
    assert ended["loss"] == ended["best"] or ended["best"] < ended["loss"]
    assert [step for step, _ in losses(run)] == list(range(1, 13))
    code, said = run_json(capsys, "generate", run, "--prompt", "she ", "--tokens", "9", "--seed", "4")
    assert (code, said["step"], said["tokens"], len(said["text"])) == (0, 12, 9, 13)
    assert said["text"].startswith("she ")
    again = run_json(capsys, "generate", run, "--prompt", "she ", "--tokens", "9", "--seed", "4", "--no-cache")[1]
    assert again["text"] == said["text"]
    assert main(["verify", str(run / "checkpoints" / "step-000012"), "-q"]) == 0
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
        (["shakespear-char-cpu"], 2, "did you mean shakespeare-char-cpu?"),
        ([], 2, "no recipe is given"),
        ([RECIPE, "--optm.lr", "1"], 2, "did you mean optim.lr"),
        ([RECIPE, "--model.context_length", "100000"], 2, "a context of 100,000 needs"),
        ([RECIPE, "--loop.device", "cuda:99"], 2, "loop.device is 'cuda:99'"),
        ([RECIPE, "--data", "no-such-file"], 5, "no-such-file"),
        (["--resume"], 5, "holds no run to go on with"),
    ],
)
def test_bad_input_is_one_clear_line(
    tmp_path: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    data = [] if "--data" in arguments else ["--data", str(text)]
    assert main(["train", *arguments, *data, "--out", str(tmp_path / "run")]) == code
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors


def test_a_run_is_not_started_twice(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", RECIPE, "--data", text, "--out", tmp_path / "run", *TINY, "--loop.steps", "2"]
    assert run_json(capsys, *command)[0] == 0
    assert run_json(capsys, *command)[0] == 6
    assert main(["train", "gpt2-124m", "--out", str(tmp_path / "run"), "--resume"]) == 2
    assert "is a run of 'shakespeare-char-cpu', not of 'gpt2-124m'" in capsys.readouterr().err
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--optim.lr", "1"]) == 2
    assert "optim.lr: 0.001 there, 1.0 now" in capsys.readouterr().err
    code, ended = run_json(capsys, "train", "--out", tmp_path / "run", "--resume")
    assert (code, ended["step"]) == (0, 2)


def test_resuming_what_was_never_started_prepares_the_data_that_is_given(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("abcdefgh" * 20)
    command = ["train", RECIPE, "--out", tmp_path / "run", "--resume", *TINY, "--loop.steps", "2"]
    assert run_json(capsys, *command, "--data", tmp_path / "short.txt", "--model.context_length", "500")[0] == 2
    assert run_json(capsys, *command, "--data", text)[0] == 0
    about = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["about"]
    assert about["vocab_size"] == len(set(text.read_text()))


def test_generating_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path)]) == 5
    assert "holds no run" in capsys.readouterr().err


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "holdfast", "train", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_steps(run: Path, process: subprocess.Popen[str], count: int) -> None:
    while not (run / "log.jsonl").exists() or len(losses(run)) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_the_run_goes_on_exactly(tmp_path: Path, text: Path, number: signal.Signals) -> None:
    command = [RECIPE, "--data", text, *TINY, "--loop.steps", "3000", "--eval.every", "0", "--sample.every", "0"]
    process = start(*command, "--out", tmp_path / "parts")
    wait_for_steps(tmp_path / "parts", process, 5)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "stopped after step" in errors
    assert "--resume" in errors
    stopped = holdfast.CheckpointManager(tmp_path / "parts" / "checkpoints").latest()
    assert stopped is not None
    assert losses(tmp_path / "parts")[-1][0] == stopped.number
    resumed = start(RECIPE, "--out", tmp_path / "parts", "--resume")
    wait_for_steps(tmp_path / "parts", resumed, stopped.number + 20)
    resumed.kill()
    resumed.communicate()
    whole = start(*command, "--out", tmp_path / "whole")
    wait_for_steps(tmp_path / "whole", whole, stopped.number + 20)
    whole.kill()
    whole.communicate()
    count = stopped.number + 20
    assert losses(tmp_path / "parts")[:count] == losses(tmp_path / "whole")[:count]


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, text: Path) -> None:
    # One step takes minutes here.
    command = [RECIPE, "--data", text, "--loop.accumulate", "1000000", "--out", tmp_path / "run"]
    process = start(*command)
    while not (tmp_path / "run" / "log.jsonl").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
