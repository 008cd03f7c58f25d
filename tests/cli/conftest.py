"""Two small checkpoints that differ, and a way to call the command line in this process."""

import json
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

import tensorkeep
from cli.calls import Call, RunJson, Shown
from tensorkeep import machine
from tensorkeep.bench.checkpoint.files import remove
from tensorkeep.bench.results import Limits
from tensorkeep.bench.run import runner
from tensorkeep.bench.run.cell import run_task
from tensorkeep.bench.workload import Outcome, Task
from tensorkeep.cli.main import main
from tensorkeep.report import html as report_files


@pytest.fixture(scope="module")
def quick_training() -> Iterator[None]:
    """Let runs measure no speed of this machine and record nothing of the repository, which take longer than they."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("tensorkeep.train.run.folder._git", lambda: None)
        patches.setattr(machine, "versions", cache(machine.versions))
        patches.setattr("tensorkeep.train.run.setup.measured_peak", lambda device: 1e9)
        yield


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
    monkeypatch.setattr(report_files, "draw_plots", lambda results, **_: [])


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
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Call the command line, which must exit with a code, and return what it printed."""

    def call(*words: object, code: int = 0) -> Shown:
        capsys.readouterr()
        found = main([*map(str, words)])
        shown = Shown(*capsys.readouterr())
        assert found == code, shown
        return shown

    return call


@pytest.fixture
def run_json(call: Call) -> RunJson:
    """Call the command line with ``--json``, which must exit with a code, and return the one document."""
    return lambda *words, code=0: json.loads(call(*words, "--json", code=code).out)


@pytest.fixture
def check_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> Callable[..., list[str]]:
    """Call the command line, which must end with a code and an error; return the error and its remedy."""

    def check(arguments: list[str], code: int, message: str) -> list[str]:
        monkeypatch.chdir(tmp_path)
        out, err = call(*arguments, code=code)
        assert out == ""
        assert message in err
        assert "Traceback" not in err
        lines = err.splitlines()
        assert len(lines) == 2
        return lines

    return check
