"""Runs on the command line: addresses of steps, `log`, and `info` of a run."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensorkeep
from command_line import Call, RunJson
from tensorkeep import CheckpointManager
from tensorkeep.checkpoint.log import RUN_RECORDS
from tensorkeep.units import format_bytes


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 to 30 with a loss that is smallest at 7."""
    path = tmp_path_factory.mktemp("runs") / "run"
    with tensorkeep.CheckpointManager(path / "checkpoints", compression="lossless") as manager:
        for step in range(1, 31):
            state = {"w": torch.full((9000,), step, dtype=torch.bfloat16)}
            manager.save(step, state, metrics={"loss": abs(step - 7) + 0.5, "lr": 1e-3})
    return path


@pytest.fixture
def run(saved_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A copy of the run, as ``run`` in the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved_run, "run")
    return "run"


def test_log_lists_the_newest_step_first_and_as_many_as_are_asked_for(run: str, run_json: RunJson, call: Call) -> None:
    heading, *rows, best = call("log", run).out.splitlines()
    assert heading.split() == ["step", "age", "loss", "lr", "size", "new", "ratio"]
    assert [int(re.findall(r"\d+", row)[0]) for row in rows] == list(range(30, 0, -1))
    assert [row for row in rows if row.startswith("*")] == [rows[23]]
    assert best == "* best: step 7, loss 0.5 (smallest)"
    lines = call("log", run, "--last", "2", "--metric", "lr", "--mode", "max").out.splitlines()
    assert ("loss" in lines[0], len(lines)) == (False, 5)
    assert lines[-1] == "and 28 earlier steps (--last 30 shows all)"
    document = run_json("log", run, "--last", "2")
    assert ([step["number"] for step in document["steps"]], document["count"]) == ([29, 30], 30)
    call("log", run, "--metric", "lr", code=2)


def test_log_lists_the_steps_of_a_chatgot_run_without_chatgot(
    run: str, run_json: RunJson, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_built_in", "_entries"):
        monkeypatch.setattr(RUN_RECORDS, name, {})
    monkeypatch.setattr(RUN_RECORDS, "_loaded", {})
    Path(run, "run.json").write_text("{}")
    first, second = call("log", run).out.splitlines()[-2:]
    assert first == "the segments of the run are not known, because chatgot is not installed"
    assert second == "in a clone of Tensorkeep: pip install ./packages/chatgot"
    document = run_json("log", run)
    assert (document["record"], document["count"]) == (f"{first}\n{second}", 30)


def test_log_names_damage_and_verifies(run: str, call: Call) -> None:
    path = Path(run, "checkpoints/step-000030/model.tensorkeep")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    assert "problem" not in call("log", run, "--last", "1").out
    assert f"damaged: {path.name}: " in call("log", run, "--verify", code=4).out
    path.write_bytes(data[:-1])
    assert f"damaged: {path.name}: " in call("log", run, "--last", "1").out


def test_info_sums_up_a_run(run: str, run_json: RunJson, call: Call) -> None:
    lines = call("info", run).out.splitlines()
    assert lines[0] == "run/checkpoints: 30 steps, 1 to 30"
    assert "best: step 7, loss 0.5 (smallest)" in lines
    document = run_json("info", run)
    assert (document["steps"], document["best"]["number"], document["metrics"]["loss"]["max"]) == (30, 7, 23.5)
    assert run_json("info", f"{run}@best")["details"]["step"]["number"] == 7


def test_the_step_that_was_chosen_is_named_on_stderr(run: str, call: Call) -> None:
    assert call("ls", run).err == "run: step 30, the latest\n"
    assert call("ls", "run@best").err == "run@best: step 7, the best: loss 0.5\n"
    assert call("ls", "run@12").err == ""
    Path("run/checkpoints/step-000030/manifest.json").write_bytes(b"{}")
    warning, chosen = call("ls", run).err.splitlines()
    assert warning.startswith("warning: step 30 is skipped: run/checkpoints/step-000030/manifest.json: its checksum")
    assert chosen == "run: step 29, the latest"


def test_verify_of_a_run_verifies_every_step_and_other_commands_take_one(run: str, run_json: RunJson) -> None:
    run_json("diff", "run@1", "run@2", code=1)
    run_json("convert", "run@5", "five.pt", "--to", "torch")
    assert torch.load("five.pt")["w"][0] == 5
    document = run_json("prune", run, "--keep-last", "28", "--dry-run")
    assert [step["step"] for step in document["deleted"]] == [1, 2]
    assert run_json("ls", "run@44", code=5)["error"]["remedy"] == "the nearest steps are 27, 28, 29, 30"
    manifest = Path("run/checkpoints/step-000003/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-5])
    document = run_json("verify", run, code=4)
    assert (document["ok"], len(document["checkpoints"])) == (False, 30)
    assert [each["path"] for each in document["checkpoints"] if not each["ok"]] == ["run/checkpoints/step-000003"]
    run_json("verify", "run@latest", "run@4")


@pytest.mark.integration
def test_looking_at_a_run_does_not_import_torch(run: str) -> None:
    code = """
import sys
from tensorkeep.cli.main import main
for words in ("log run", "info run", "ls run@best", "diff run@1 run@1", "prune run --keep-last 1 --dry-run"):
    assert main(words.split()) == 0, words
    assert "torch" not in sys.modules, words
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def lines_of(path: Path, call: Call) -> list[str]:
    return call("info", path, "--largest", 0).out.splitlines()


def test_info_shows_new_bytes_and_disk_usage_of_a_step(tmp_path: Path, call: Call, run_json: RunJson) -> None:
    with CheckpointManager(tmp_path, incremental=True) as manager:
        for number in (1, 2):
            state = {"frozen": torch.arange(60_000.0), "w": torch.full((9000,), number)}
            report = manager.save(number, state, metrics={"loss": 0.5}).wait()
    path = tmp_path / "step-000002"
    lines = lines_of(path, call)
    assert lines[2].startswith("step 2, saved 20")
    assert lines[2].endswith(", loss 0.5")
    linked = format_bytes((path / "from-step-000001-model.tensorkeep").stat().st_size)
    wrote = f"wrote {format_bytes(report.new_bytes)}; shares files of 1 earlier step: {linked} of step-000001"
    assert lines[3] == wrote
    space = run_json("info", path)["details"]["space"]
    own, shared, occupied = (format_bytes(space[f"{kind}_bytes"]) for kind in ("own", "shared", "occupied"))
    assert lines[4] == f"occupies {occupied}: {own} of its own, {shared} shared with others"


def test_info_shows_a_delta_chain_and_of_a_plain_checkpoint_no_history(first: Path, tmp_path: Path, call: Call) -> None:
    assert not any(line.startswith(("wrote", "occupies", "step")) for line in lines_of(first, call))
    with CheckpointManager(tmp_path, incremental="delta") as manager:
        for number in (1, 2):
            manager.save(number, {"w": torch.arange(9000.0) * (1 + number * 2.0**-18)}).wait()
    (line,) = [line for line in lines_of(tmp_path / "step-000002", call) if line.startswith("wrote ")]
    assert line.endswith("; a block is read through up to 1 delta")
