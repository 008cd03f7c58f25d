"""``tensorkeep demo`` and ``tensorkeep demo --training``: text, JSON, page, interrupts, and the losses compared."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch

import tensorkeep
from command_line import Call
from documents import document, results, truth
from report.demo_results import demo_results
from tensorkeep.cli.main import main
from tensorkeep.cli.output import Output
from tensorkeep.errors import StoreError
from tensorkeep.runs.steps import Step
from tensorkeep_bench.analysis.summary import summarise
from tensorkeep_bench.checkpoint import measure
from tensorkeep_bench.cli.demo import training_demo
from tensorkeep_bench.demo import faults, speed, training
from tensorkeep_bench.demo.training import ComparedRuns, KilledRun, TrainingDemo

ARMS = {"torch", "safetensors", "tensorkeep", "tensorkeep-lossless", "tensorstore"}
SIX_WAY = ("tensorstore", "pytorch", "t5x", "ts+concurrency", "ts+chunks", "ts+compression")
TINY = ("--loop.batch_size", "2", "--eval.batches", "1", "--loop.threads", "1", "--model.n_layers", "2")
ONCE = ["--rounds", "1", "--no-progress"]


@pytest.fixture(scope="module")
def own_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of the user."""
    path = tmp_path_factory.mktemp("own") / "own"
    tensorkeep.save({"model": {"w": torch.randn(300, 200)}, "optimizer": [torch.ones(4)], "step": 3}, path)
    return path


@pytest.mark.exhaustive
def test_demo_of_the_users_checkpoint_keeps_every_promise(
    own_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    losses = [4.0, 3.0, 2.0, 1.5]
    monkeypatch.setattr(training, "compare_runs", lambda *_, **__: ComparedRuns(losses, losses, 3, 2))
    models = {"model": "openllama-3b:scale=0.001:float16", "slow_model": "openllama-3b:scale=0.0005:layers=1:float16"}
    monkeypatch.setattr(speed, "_MODELS", models)
    (tmp_path / "work").mkdir()
    page = tmp_path / "page.html"
    arguments = ["demo", "--from", own_checkpoint, "--rounds", "1", "--json", "--dir", tmp_path / "work", "--out", page]
    assert main(list(map(str, arguments))) == 0
    out, err = capfd.readouterr()
    assert err == ""
    document = json.loads(out)
    assert document["ok"] is True
    assert (document["tensors"], document["state_bytes"]) == (2, 300 * 200 * 4 + 16)
    assert set(document["measures"]["save"]) == set(document["measures"]["load_first"]) == ARMS
    assert {cell["arm"] for cell in document["rounds"]["cells"]} == ARMS
    flip = document["damage"]["flip"]
    [problem] = document["damage"]["verify"]["problems"]
    assert (problem["file"], problem["name"], problem["block"]) == (flip["file"], flip["name"], flip["block"])
    silent = {peer["tool"]: peer["silent"] for peer in document["damage"]["peers"]}
    assert silent == {"torch": True, "safetensors": True}
    assert {kill["tool"]: kill["intact"] for kill in document["kills"]} == {"torch": False, "tensorkeep": True}
    assert all(0 < kill["written"] < kill["nbytes"] for kill in document["kills"])
    assert document["training"]["exact"] is True
    assert document["training"]["same"] == 4
    arms = {cell["arm"]: cell["status"] for cell in document["six_way"]["cells"]}
    assert set(arms) == {*SIX_WAY, "tensorkeep", "tensorkeep-lossless"}
    assert set(arms.values()) == {"ok"}
    assert document["six_way"]["summary"]["recommendations"] == []
    assert document["page"] == str(page)
    text = page.read_text()
    assert all(arm in text for arm in (*ARMS, *arms))
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "work"]
    assert list((tmp_path / "work").iterdir()) == []
    assert tensorkeep.verify(own_checkpoint).ok


@pytest.mark.exhaustive
def test_killed_and_unbroken_run_have_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(training, "_QUICK", TINY)
    runs = training.compare_runs(tmp_path, lambda text: None, steps=40, every=8)
    assert runs.exact
    assert runs.same == len(runs.unbroken) == 40
    assert runs.resumed_from < runs.killed_at < 40


@pytest.fixture
def quick_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the parts that take long by their results."""
    losses = [4.0, 3.0, 2.0, 1.5]
    monkeypatch.setattr(training, "compare_runs", lambda *_, **__: ComparedRuns(losses, losses, 3, 2))
    found = results(document({name: truth() for name in (*SIX_WAY, "tensorkeep")}, runs=1))
    found = msgspec.structs.replace(found, summary=summarise(found))
    monkeypatch.setattr(speed, "compare_six_ways", lambda *_, **__: found)


@pytest.mark.exhaustive
@pytest.mark.xdist_group("processes")  # the first process of a worker starts the fork server, which takes seconds
@pytest.mark.usefixtures("quick_parts")
@pytest.mark.parametrize("own", [True, False])
def test_text_has_five_parts_five_facts_and_a_page(own: bool, own_checkpoint: Path, tmp_path: Path, call: Call) -> None:
    page = tmp_path / "page.html"
    state = ["--from", str(own_checkpoint)] if own else ["--scale", "0.001"]
    out, err = call("demo", *state, *ONCE, "--dir", tmp_path, "--out", page)
    assert err == ""
    assert list(tmp_path.iterdir()) == [page]
    headings = ("1. Save", "2. One bit", "3. kill -9", "4. A small GPT", "5. Six")
    places = [out.index(f"\n{heading}") for heading in headings]
    assert places == sorted(places)
    assert f"{2 if own else 237} tensors" in out
    assert "these times say little" in " ".join(out.split())
    assert len(re.findall(r"^   torch .*(ms|s|[kM]B)$", out, re.MULTILINE)) == 3
    assert len(re.findall(r"^ - ", out, re.MULTILINE)) == 5
    assert "all 4 losses are the same" in " ".join(out.split())
    assert out.splitlines()[-1].endswith(str(page))
    assert all(len(line) <= 80 for line in out.splitlines() if str(tmp_path) not in line)
    assert "\x1b" not in out


@pytest.mark.usefixtures("quick_parts")
def test_quiet_prints_nothing_and_a_broken_promise_is_reported_and_fails(
    own_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    found = demo_results()
    monkeypatch.setattr(speed, "measure_rounds", lambda *_, **__: found.rounds)
    monkeypatch.setattr(speed, "measure_t5x", lambda *_: found.t5x)
    monkeypatch.setattr(faults, "kill_saves", lambda *_: found.kills)
    arguments = ["demo", "--from", own_checkpoint, *ONCE, "--out", tmp_path / "page.html", "--dir", tmp_path]
    assert call(*arguments, "-q") == ("", "")
    different = ComparedRuns([4.0, 3.0], [4.0, 3.1], 2, 1)
    monkeypatch.setattr(training, "compare_runs", lambda *_, **__: different)
    assert "only 1 of 2 losses are the same" in " ".join(call(*arguments, code=1).out.split())


def test_an_interrupt_in_a_round_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setattr(measure, "first_load", mock.Mock(side_effect=KeyboardInterrupt))
    assert call("demo", "--scale", "0.001", *ONCE, "--dir", tmp_path, code=130).err == "interrupted\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_ctrl_c_in_a_terminal_cleans_up(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tensorkeep", "demo", "--scale", "0.002", "--rounds", "1000", "--dir", tmp_path]
    demo = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # The rounds have started when the folder holds a checkpoint that is being measured.
    while not any(files for folder, _, files in os.walk(tmp_path) if folder != str(tmp_path)):
        assert demo.poll() is None
        time.sleep(0.01)
    os.killpg(demo.pid, signal.SIGINT)  # As Ctrl-C in a terminal, which reaches all processes.
    _, err = demo.communicate(timeout=120)
    assert (demo.returncode, err) == (130, "interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
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
    headings = ["1. The text", "2. A GPT trains", "3. The run resumed", "bit for bit", "4. The last", "5. The model"]
    assert [heading for heading in headings if heading not in text_shown] == []


def test_different_loss_is_reported(tmp_path: Path) -> None:
    demo = TrainingDemo(tmp_path, steps=10, every=2)
    lines = [{"step": step, "kind": "train", "loss": float(step)} for step in range(1, 11)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    losses = {step: float(step) for step in range(1, 8)} | {6: 6.000001}
    killed = KilledRun(7, Step(4, "step-000004", 0.0, {}, 0, 0), losses)
    repeated = demo.repeated(killed)
    assert (repeated.first, repeated.last, repeated.count, repeated.different) == (5, 7, 3, (6,))
    assert not repeated.exact
    # No step after the saved one: nothing was compared.
    repeated = demo.repeated(KilledRun(4, Step(4, "step-000004", 0.0, {}, 0, 0), {4: 4.0}))
    assert (repeated.count, repeated.different, repeated.exact) == (0, (), False)


@pytest.mark.integration
def test_run_is_killed_only_some_steps_after_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_POLL_SECONDS", 0.0)
    logged: list[int] = []
    looks: list[int] = []

    class ScriptedDemo(TrainingDemo):
        """A demo whose process only sleeps; step 12 is saved between two checks of the same step."""

        def _start(self, *more: str) -> subprocess.Popen[str]:
            self.process = subprocess.Popen(["sleep", "60"], text=True)
            return self.process

        def losses(self) -> dict[int, float]:
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
    assert (stopped, demo.process.returncode) == ([False] * 15, -signal.SIGKILL)


@pytest.mark.integration
def test_run_that_ends_too_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingDemo, "_start", lambda *_: subprocess.Popen(["false"], text=True))
    with pytest.raises(StoreError, match="ended with exit code 1"):
        TrainingDemo(tmp_path / "run", steps=20, every=9).train_until_killed(lambda text: None)
