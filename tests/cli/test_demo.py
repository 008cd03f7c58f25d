"""``tensorkeep demo`` and ``tensorkeep demo --training``: text, JSON, damage, interrupts, and the losses compared."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tensorkeep
from tensorkeep.bench.demo import training
from tensorkeep.bench.demo.training import KilledRun, TrainingDemo
from tensorkeep.checkpoint.manager.steps import Step
from tensorkeep.cli.main import main
from tensorkeep.cli.output import Output
from tensorkeep.cli.training_demo import training_demo
from tensorkeep.errors import StoreError

ARMS = {"torch", "safetensors", "tensorkeep", "tensorkeep-lossless"}
SMALL = ["demo", "--scale", "0.001", "--rounds", "1", "--no-progress"]


@pytest.fixture(scope="module")
def own_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of the user."""
    path = tmp_path_factory.mktemp("own") / "own"
    tensorkeep.save({"model": {"w": torch.randn(300, 200)}, "optimizer": [torch.ones(4)], "step": 3}, path)
    return path


def test_demo_measures_verifies_damages_and_cleans_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert list(tmp_path.iterdir()) == []
    for heading in ("1. The state", "2. Save and load", "3. Verify", "4. Damage", "Next: "):
        assert heading in out
    assert "237 tensors" in out
    header = next(line.split() for line in out.splitlines() if "safetensors" in line.split())
    assert set(header) == ARMS
    row = next(line for line in out.splitlines() if line.startswith("durable save "))
    assert len(re.findall(r"\d+\.\d\dx", row)) == len(ARMS - {"torch"})
    assert re.search(r"`tensorkeep verify` finds it: \S+: tensor '\S+': block \d", " ".join(out.split()))
    assert "did not notice" not in out


def test_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json", "--dir", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert document["tensors"] == 237
    assert document["verify"]["ok"] is True
    assert set(document["measures"]["save"]) == ARMS
    assert document["measures"]["stored"]["tensorkeep-lossless"]["against_torch"]["median"] < 0.9
    assert {cell["arm"] for cell in document["rounds"]["cells"]} == ARMS
    flip = document["damage"]["flip"]
    [problem] = document["damage"]["verify"]["problems"]
    assert (problem["file"], problem["name"], problem["block"]) == (flip["file"], flip["name"], flip["block"])


def test_quiet_prints_nothing(own_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--from", str(own_checkpoint), "--rounds", "1"]
    assert main([*arguments, "-q", "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr() == ("", "")


def test_checkpoint_of_the_user(own_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--from", str(own_checkpoint), "--rounds", "1"]
    assert main([*arguments, "--json", "--dir", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tensors"] == 2
    assert document["state_bytes"] == 300 * 200 * 4 + 16
    assert set(document["measures"]["load_warm"]) == ARMS
    assert list(tmp_path.iterdir()) == []
    assert tensorkeep.verify(own_checkpoint).ok


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--scale", "0"], 2, "out of range"),
        (["--scale", "1", "--from", "x"], 2, "exclude each other"),
        (["--rounds", "0"], 2, "rounds"),
        (["--from", "nothing-here"], 5, "nothing-here: does not exist"),
        (["--dir", "no/such/folder"], 3, "--dir"),
        (["--scale", "16"], 3, "the measurement needs"),
    ],
)
def test_invalid_arguments_are_refused_at_once(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []


def test_interrupt_cleans_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; from tensorkeep.cli.main import main; sys.exit(main())"]
    demo = subprocess.Popen(
        [*command, "demo", "--scale", "0.02", "--rounds", "1000", "--dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    # The rounds have started when the folder holds a checkpoint that is being measured.
    while not any(files for folder, _, files in os.walk(tmp_path) if folder != str(tmp_path)):
        assert time.monotonic() < deadline
        assert demo.poll() is None
        time.sleep(0.01)
    demo.send_signal(signal.SIGINT)
    _, err = demo.communicate(timeout=120)
    assert demo.returncode == 130
    assert err == "interrupted\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_training_demo_repeats_its_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(first, second):\n    return first + second\n" * 200)
    document = training_demo(tmp_path / "run", Output(progress=False), steps=60, every=7, source=str(text))
    assert document["ok"] is True
    repeated = document["repeated"]
    assert repeated["different"] == ()
    assert repeated["count"] == document["killed"]["step"] - document["killed"]["saved"] >= 7 // 3
    assert 24 <= document["killed"]["step"] < 60
    assert document["killed"]["saved"] % 7 == 0
    assert document["summary"]["step"] == 60
    assert document["sample"].startswith("def ")
    text_shown = capsys.readouterr().out
    for heading in (
        "1. The text",
        "2. A GPT trains",
        "3. The run resumed",
        "bit for bit",
        "4. The last",
        "5. The model",
    ):
        assert heading in text_shown


def test_different_loss_is_reported(tmp_path: Path) -> None:
    demo = TrainingDemo(tmp_path, steps=10, every=2)
    lines = [{"step": step, "kind": "train", "loss": float(step)} for step in range(1, 11)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    losses = {step: float(step) for step in range(1, 8)} | {6: 6.000001}
    killed = KilledRun(7, Step(4, "step-000004", 0.0, {}, 0, 0), losses)
    repeated = demo.repeated(killed)
    assert (repeated.first, repeated.last, repeated.count, repeated.different) == (5, 7, 3, (6,))
    assert not repeated.exact


def test_demo_without_compared_losses_fails(tmp_path: Path) -> None:
    demo = TrainingDemo(tmp_path, steps=10, every=2)
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 4, "kind": "train", "loss": 1.0}) + "\n")
    repeated = demo.repeated(KilledRun(4, Step(4, "step-000004", 0.0, {}, 0, 0), {4: 1.0}))
    assert (repeated.count, repeated.different) == (0, ())
    assert not repeated.exact


def test_run_is_killed_only_some_steps_after_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_POLL_SECONDS", 0.0)
    logged: list[int] = []
    looks: list[int] = []

    class ScriptedDemo(TrainingDemo):
        """A demo whose process only sleeps; step 12 is saved between two checks of the same step."""

        def _start(self, *more: str) -> subprocess.Popen[str]:
            self.process = subprocess.Popen(["sleep", "60"], text=True)
            return self.process

        def _losses(self) -> dict[int, float]:
            return {step: float(step) for step in logged}

        def _last_saved(self) -> Step:
            looks.append(len(logged))
            number = 12 if looks.count(12) > 1 else 9
            return Step(number, f"step-{number:06d}", 0.0, {}, 0, 0)

        def state(self) -> str:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    demo = ScriptedDemo(tmp_path / "run", steps=20, every=9)
    stopped: list[bool] = []

    def note(text: str) -> None:
        stopped.append(demo.state() == "T")
        logged.append(len(logged) + 1)

    killed = demo.train_until_killed(note)
    assert (killed.step, killed.saved.number) == (15, 12)
    assert looks.count(12) == looks.count(15) == 2
    assert stopped == [False] * 15
    assert demo.process.returncode == -signal.SIGKILL


def test_run_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    class FailingDemo(TrainingDemo):
        def _start(self, *more: str) -> subprocess.Popen[str]:
            return subprocess.Popen(["false"], text=True)

    with pytest.raises(StoreError, match="ended with exit code 1"):
        FailingDemo(tmp_path / "run", steps=20, every=9).train_until_killed(lambda text: None)
