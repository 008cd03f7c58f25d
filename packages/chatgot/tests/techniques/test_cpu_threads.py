"""CPU threads: conformance suite, and how processors are chosen, bound and released."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from chatgot.run.folder import RunFolder
from chatgot.step.state import StepState
from chatgot.techniques.experimental import cpu_threads
from chatgot.techniques.experimental.cpu_threads import (
    CpuThreads,
    CpuThreadsSettings,
    _format_cores,
    _parse_cores,
)
from chatgot.testing import TINY, TechniqueSuite, opened, train_run, verified_step, with_techniques
from tensorkeep.errors import TechniqueNotActiveError, UnsupportedError, UsageError
from tensorkeep.machine import physical_cores

ALLOWED = os.sched_getaffinity(0)
ONE = str(min(ALLOWED))


class TestCpuThreads(TechniqueSuite):
    technique = CpuThreads

    def break_on_purpose(self, run: StepState) -> None:
        # As a library that is imported later and sets the number.
        torch.set_num_threads(torch.get_num_threads() + 1)

    def test_threads_are_bound_and_released(self, tmp_path: Path, data: Path) -> None:
        """All threads are bound within the run, and none afterwards."""

        def affinities() -> list[set[int]]:
            return [os.sched_getaffinity(int(each.name)) for each in Path("/proc/self/task").iterdir()]

        with _opened(tmp_path, data, threads=1, cores=ONE):
            assert os.sched_getaffinity(0) == {int(ONE)}
            torch.randn(512, 512) @ torch.randn(512, 512)
            assert all(each == {int(ONE)} for each in affinities())
        assert all(each == ALLOWED for each in affinities())

    @pytest.mark.skipif(len(ALLOWED) < 2, reason="this process may use one processor only")
    def test_unbound_thread_is_an_error(self, tmp_path: Path, data: Path) -> None:
        """The number of threads is correct, and the affinity is not."""
        with _opened(tmp_path, data, threads=1, cores=ONE) as run:
            os.sched_setaffinity(0, ALLOWED)
            with pytest.raises(TechniqueNotActiveError, match="may leave"):
                verified_step(run)

    def test_number_of_threads_is_stored_with_the_run(self, tmp_path: Path, data: Path) -> None:
        """A run resumed with more cores uses as many threads, because its bits depend on them."""
        train_run(with_techniques(TINY, {"cpu-threads": {}}), tmp_path / "run", data, stop_after=1)
        kept = RunFolder(tmp_path / "run").record().config
        assert kept.loop.threads == kept.techniques["cpu-threads"]["threads"] == len(physical_cores(ALLOWED))

    def test_more_threads_than_processors_are_refused(self, tmp_path: Path, data: Path) -> None:
        """Also processors that do not exist."""
        for settings in ({"threads": 1024}, {"threads": 2, "cores": ONE}, {"cores": "60000"}):
            with pytest.raises(UnsupportedError, match=r"needs .*processors"), _opened(tmp_path, data, **settings):
                raise AssertionError("it was opened")


@pytest.mark.skipif(len(ALLOWED) < 2, reason="this process may use one processor only")
def test_threads_are_released_when_binding_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cpu_threads._bind

    def bind(cores: set[int]) -> None:
        real(cores)
        if cores != ALLOWED:
            raise PermissionError

    monkeypatch.setattr(cpu_threads, "_bind", bind)
    with pytest.raises(PermissionError), CpuThreads(CpuThreadsSettings(threads=1, cores=ONE)).process():
        raise AssertionError("it was begun")
    assert os.sched_getaffinity(0) == ALLOWED


def _opened(folder: Path, data: Path, **settings: Any) -> Any:
    return opened(with_techniques(TINY, {"cpu-threads": settings}), folder / "run", data)


def test_threads_of_the_loop_are_used_and_numbers_checked() -> None:
    technique = CpuThreads(CpuThreadsSettings())
    config = technique.configure(TINY.changed({"loop.threads": 3}))
    assert config.loop.threads == technique.settings.threads == 3
    for text, threads in (("4", 4), ("auto", "auto")):
        assert msgspec.convert({"threads": text}, CpuThreadsSettings, strict=False).threads == threads
    with pytest.raises(UsageError, match="threads is 0"):
        CpuThreadsSettings(threads=0)


@pytest.mark.parametrize("text", ["0", "0-3,8", "1,3,5-6"])
def test_processors_are_parsed_and_formatted_as_in_linux(text: str) -> None:
    assert _format_cores(_parse_cores(text)) == text
