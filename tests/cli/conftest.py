"""Two small checkpoints that differ, and a way to call the command line in this process."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import tensorkeep
from tensorkeep.bench.checkpoint.probes import remove
from tensorkeep.bench.experiment.workload import Outcome, Task
from tensorkeep.bench.results import Limits
from tensorkeep.bench.run import runner
from tensorkeep.bench.run.worker import run_task
from tensorkeep.cli.main import main
from tensorkeep.report import files as report_files


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied embedding, an optimizer, a plain value; 3 tensors of its own and a view."""
    path = tmp_path_factory.mktemp("cli") / "first"
    embedding = torch.arange(4096, dtype=torch.float32).reshape(64, 64).bfloat16()
    model = {"wte.weight": embedding, "lm_head.weight": embedding, "bias": torch.zeros(7)}
    state = {"model": model, "optimizer": {"exp_avg": torch.ones(64, 64), "lr": 3e-4}}
    tensorkeep.save(state, path, metadata={"run": "unit"})
    return path


@pytest.fixture(scope="session")
def second(first: Path) -> Path:
    """The first checkpoint with one changed element, one more tensor and another learning rate."""
    state = tensorkeep.load(first)
    state["model"]["bias"][3] = 0.5
    state["model"]["extra"] = torch.ones(2)
    state["optimizer"]["lr"] = 1e-4
    tensorkeep.save(state, first.with_name("second"))
    return first.with_name("second")


@pytest.fixture
def cells_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the cells of the bench in this process, where processes are not what is tested."""

    def run_cell(task: Task, limits: Limits) -> Outcome:
        try:
            return msgspec.structs.replace(run_task(task, time.perf_counter()), seconds=1.0)
        finally:
            remove(Path(task.directory))

    monkeypatch.setattr(runner, "run_cell", run_cell)


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write reports without plots, which take seconds, where the report is not what is tested."""
    monkeypatch.setattr(report_files, "draw_plots", lambda results: [])


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A checkpoint with one flipped byte in the middle of its only tensor."""
    path = tmp_path / "damaged"
    tensorkeep.save({"model": {"w": torch.ones(100_000)}}, path)
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return path


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Call the command line with ``--json`` and return its exit code and the one document."""

    def call(*arguments: str | Path) -> tuple[int, Any]:
        code = main([*map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def check_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str], int, str], list[str]]:
    """Call the command line, which must end with a code and an error; return the error, which has at most two lines."""

    def check(arguments: list[str], code: int, message: str) -> list[str]:
        monkeypatch.chdir(tmp_path)
        assert main(arguments) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        assert "Traceback" not in err
        lines = err.splitlines()
        assert len(lines) <= 2
        return lines

    return check
