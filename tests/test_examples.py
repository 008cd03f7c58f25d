"""The examples run, and a killed run that is resumed ends exactly where an uninterrupted one ends."""

import importlib.util
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import example_runner
import tensorkeep
from forked import CONTEXT, killed_at_exit
from tensorkeep import CheckpointManager

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

EXAMPLES = Path(__file__).parents[1] / "examples"


class Run:
    """An example that runs in a process of its own; ``options`` are those of `example_runner.run`."""

    def __init__(self, name: str, out: Path, steps: int, **options: Any) -> None:
        self.out = out
        self._log = out.with_name(f"{out.name}-{steps}-{time.monotonic_ns()}.log")
        words = ["--out", str(out), "--steps", str(steps)]
        given = EXAMPLES / name, words, self._log
        self.process = CONTEXT.Process(target=example_runner.run, args=given, kwargs=options)
        self.process.start()
        killed_at_exit(self.process)

    def finish(self) -> str:
        """Return the last line that the example prints."""
        return self.finished_lines()[-1]

    def finished_lines(self) -> list[str]:
        self.process.join(240)
        assert self.process.exitcode == 0, self._log.read_text()
        return self._log.read_text().strip().splitlines()

    def kill_after_a_save(self) -> None:
        while not any(self.out.glob("step*")):
            assert self.process.is_alive(), self._log.read_text()
            time.sleep(0.002)
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -9, "it ended before it was killed: give it more steps"


class RankRuns:
    """An example that runs on several ranks, with the environment that torchrun sets."""

    def __init__(self, name: str, out: Path, steps: int, *, ranks: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        master |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
        self.runs = [
            Run(name, out, steps, environment={**master, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]

    def finished_lines(self) -> list[str]:
        """Return the lines of rank 0."""
        first, *_ = [run.finished_lines() for run in self.runs]
        return first

    def kill_after_a_save(self) -> None:
        for run in self.runs:
            run.kill_after_a_save()


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("plain_loop.py", True),
        pytest.param("transformers_trainer.py", False, marks=[needs("transformers"), pytest.mark.exhaustive]),
    ],
)
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path: Path, name: str, waits: bool) -> None:
    steps = 60
    whole = Run(name, tmp_path / "whole", steps).finish()
    assert whole.startswith(f"step {steps}:")
    Run(name, tmp_path / "killed", steps, waits=waits).kill_after_a_save()
    assert Run(name, tmp_path / "killed", steps).finish() == whole
    last = [tmp_path / run / f"step-{steps:06}" for run in ("whole", "killed")]
    assert tensorkeep.diff(*last, select=["model.*", "optimizer.*", "rng.*"]).equal
    if name == "transformers_trainer.py":
        # The checkpoints of the trainer are steps of the manager.
        manager = CheckpointManager(tmp_path / "whole")
        assert [step.number for step in manager.steps()] == [steps - 10, steps]
        assert float(manager.steps()[-1].metrics["loss"]) > 0


@pytest.mark.exhaustive
def test_a_killed_run_of_two_ranks_resumes_on_three(tmp_path: Path) -> None:
    steps = 60
    whole = RankRuns("fsdp_train.py", tmp_path / "whole", steps, ranks=2).finished_lines()
    RankRuns("fsdp_train.py", tmp_path / "killed", steps, ranks=2).kill_after_a_save()
    resumed = RankRuns("fsdp_train.py", tmp_path / "killed", steps, ranks=3).finished_lines()
    saved = re.fullmatch(r"resumes on 3 ranks after step (\d+)", resumed[0])
    assert saved and 10 <= int(saved[1]) < steps
    final = [re.fullmatch(rf"step {steps}: loss (\d\.\d{{6}})", lines[-1])[1] for lines in (whole, resumed)]
    # The sums over ranks have another order.
    assert float(final[1]) == pytest.approx(float(final[0]), abs=2e-6)


@pytest.mark.exhaustive
@needs("lightning")
def test_ranks_of_lightning_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    name = "lightning_sharded.py"
    whole = RankRuns(name, tmp_path / "whole", 60, ranks=2).finished_lines()[-1]
    RankRuns(name, tmp_path / "resumed", 40, ranks=2).finished_lines()
    resumed = RankRuns(name, tmp_path / "resumed", 60, ranks=3).finished_lines()[-1]
    assert resumed.startswith("step 60 from step=40 with 3 ranks: |w| = ")
    final = [float(line.rpartition(" ")[2]) for line in (whole, resumed)]
    assert final[1] == pytest.approx(final[0], abs=2e-3)
    assert (tmp_path / "resumed" / "step=60.ckpt" / "manifest.json").is_file()


@pytest.mark.exhaustive
@needs("accelerate")
def test_ranks_of_accelerate_resume_with_their_random_states(tmp_path: Path) -> None:
    name = "accelerate_checkpoints.py"
    whole = RankRuns(name, tmp_path / "whole", 40, ranks=2).finished_lines()[-1]
    RankRuns(name, tmp_path / "resumed", 20, ranks=2).finished_lines()
    resumed = RankRuns(name, tmp_path / "resumed", 40, ranks=2).finished_lines()
    assert "resumes on 2 ranks after step 20" in resumed
    assert resumed[-1] == whole
    assert whole.startswith("step 40: loss ")
    assert tensorkeep.diff(tmp_path / "whole" / "step-last", tmp_path / "resumed" / "step-last").equal


@pytest.mark.exhaustive
@needs("lightning")
def test_lightning_resumes_as_from_its_own_checkpoints(tmp_path: Path) -> None:
    lines: dict[bool, list[str]] = {}
    saved: dict[bool, list[str]] = {}
    for own in (False, True):
        out = tmp_path / f"own-{own}"
        lines[own] = [Run("lightning_checkpoints.py", out, steps, own_checkpoints=own).finish() for steps in (60, 150)]
        assert all(path.is_dir() != own for path in out.iterdir())
        saved[own] = sorted(path.name for path in out.iterdir())
    assert lines[False][1].startswith("step 150:")
    assert lines[False] == lines[True]
    assert saved[False] == saved[True]
    assert "step=150.ckpt" in saved[False]
