"""``tensorkeep info`` of steps that share files."""

from pathlib import Path

import torch

from cli.calls import Call, RunJson
from tensorkeep import CheckpointManager
from tensorkeep.units import format_bytes


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
