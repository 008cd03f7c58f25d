"""The exam of CPU threads, and how processors are chosen, kept and given back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tensorkeep.errors import TechniqueNotActiveError, UnsupportedError, UsageError
from tensorkeep.machine import physical_cores
from tensorkeep.testing.technique_suite import TINY, TechniqueSuite, train_run, with_techniques
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import take_step
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques import cpu_threads
from tensorkeep.train.techniques.cpu_threads import (
    CpuThreads,
    CpuThreadsSettings,
    _in_words,
    _parsed,
)

ALLOWED = os.sched_getaffinity(0)
ONE = str(min(ALLOWED))


class TestCpuThreads(TechniqueSuite):
    technique = CpuThreads

    def sabotage(self, run: Run) -> None:
        # A library that is imported later sets the number by its own mind.
        torch.set_num_threads(torch.get_num_threads() + 1)

    def test_threads_stay_on_the_processors_and_are_set_free(self, tmp_path: Path, data: Path) -> None:
        """Within the run all of them, afterwards none."""
        with _opened(tmp_path, data, threads=1, cores=ONE):
            assert os.sched_getaffinity(0) == {int(ONE)}
            torch.randn(512, 512) @ torch.randn(512, 512)
            assert all(os.sched_getaffinity(int(each.name)) == {int(ONE)} for each in _tasks())
        assert all(os.sched_getaffinity(int(each.name)) == ALLOWED for each in _tasks())

    @pytest.mark.skipif(len(ALLOWED) < 2, reason="this process may use one processor only")
    def test_a_thread_that_leaves_is_caught(self, tmp_path: Path, data: Path) -> None:
        """The number is right, and the place is not."""
        with _opened(tmp_path, data, threads=1, cores=ONE) as run:
            os.sched_setaffinity(0, ALLOWED)
            with pytest.raises(TechniqueNotActiveError, match="may leave"), run.techniques.verified(run):
                take_step(run)

    def test_the_number_is_settled_once_for_a_run(self, tmp_path: Path, data: Path) -> None:
        """A run that goes on where there are more cores computes with as many threads, as its bits depend on them."""
        train_run(with_techniques(TINY, {"cpu-threads": {}}), tmp_path / "run", data, stop_after=1)
        kept = RunFolder(tmp_path / "run").record().config
        assert kept.loop.threads == kept.techniques["cpu-threads"]["threads"] == len(physical_cores(ALLOWED))

    def test_more_threads_than_processors_are_refused(self, tmp_path: Path, data: Path) -> None:
        """They would wait for each other; so would threads of a processor that is not there."""
        for settings in ({"threads": 1024}, {"threads": 2, "cores": ONE}, {"cores": "60000"}):
            with pytest.raises(UnsupportedError, match=r"needs .*processors"), _opened(tmp_path, data, **settings):
                raise AssertionError("it was opened")


@pytest.mark.skipif(len(ALLOWED) < 2, reason="this process may use one processor only")
def test_threads_are_set_free_where_some_could_not_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cpu_threads._pin

    def pin(cores: set[int]) -> None:
        real(cores)
        if cores != ALLOWED:
            raise PermissionError

    monkeypatch.setattr(cpu_threads, "_pin", pin)
    with pytest.raises(PermissionError), CpuThreads(CpuThreadsSettings(threads=1, cores=ONE)).process():
        raise AssertionError("it was begun")
    assert os.sched_getaffinity(0) == ALLOWED


def _opened(folder: Path, data: Path, **settings: Any) -> Any:
    return open_run(with_techniques(TINY, {"cpu-threads": settings}), RunFolder(folder / "run"), Dataset.open(data))


def _tasks() -> list[Path]:
    return list(Path("/proc/self/task").iterdir())


def test_the_threads_of_the_loop_are_taken_over() -> None:
    technique = CpuThreads(CpuThreadsSettings())
    config = technique.configure(TINY.changed({"loop.threads": 3}))
    assert config.loop.threads == technique.settings.threads == 3


@pytest.mark.parametrize("text", ["0", "0-3,8", "1,3,5-6"])
def test_processors_are_read_and_written_as_linux_does(text: str) -> None:
    assert _in_words(_parsed(text)) == text


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-2-3", "0,", "-1", "0-99999999"])
def test_what_is_no_list_of_processors_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cores is"):
        CpuThreadsSettings(cores=text)


def test_numbers_of_threads_are_checked() -> None:
    assert msgspec.convert({"threads": "4"}, CpuThreadsSettings, strict=False).threads == 4
    assert msgspec.convert({"threads": "auto"}, CpuThreadsSettings, strict=False).threads == "auto"
    with pytest.raises(UsageError, match="threads is 0"):
        CpuThreadsSettings(threads=0)
