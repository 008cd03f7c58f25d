"""Steps are replaced and deleted while others read them; readers never report that as damage."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from forked import ended, start
from tensorkeep import CheckpointManager
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.io.directory import Directory
from tensorkeep.testing.equality import same


def state(number: int) -> dict[str, Any]:
    return {"w": torch.full((3000,), float(number)), "n": number}


@contextmanager
def looking(meanwhile: Callable[[], object]) -> Iterator[None]:
    """Call a function once, after a manifest or its outline is read and before its files are opened."""
    once = [meanwhile]

    def followed(real: Callable[..., Any]) -> Callable[..., Any]:
        def read(directory: Directory, *name: str) -> Any:
            manifest = real(directory, *name)
            if once:
                once.pop()()
            return manifest

        return read

    with (
        mock.patch.object(manifests, "read", followed(manifests.read)),
        mock.patch.object(manifests, "read_outline", followed(manifests.read_outline)),
    ):
        yield
    assert not once


@pytest.mark.parametrize("look", ["latest", "restore", "listing"])
def test_the_only_step_is_replaced_while_it_is_opened(tmp_path: Path, look: str) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1)).wait()
        others = CheckpointManager(tmp_path)
        with looking(lambda: manager.save(1, state(2), overwrite=True).wait()), warnings.catch_warnings():
            warnings.simplefilter("error")
            found = getattr(others, look)()
    if look == "latest":
        assert found.number == 1
    elif look == "restore":
        assert same(found, state(2))
    else:
        assert [step.number for step in found.steps] == [1]
        assert not found.broken


def test_a_step_is_deleted_while_it_is_opened(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for number in (1, 2):
            manager.save(number, state(number)).wait()
        with looking(lambda: manager.delete(1)):
            found = CheckpointManager(tmp_path).listing()
    assert [step.number for step in found.steps] == [2]
    assert not found.broken


def read_until(last: int, folder: Path, ready: Path) -> None:
    """Restore the step until its state is the last one; each is complete, and none is older than the one before."""
    warnings.simplefilter("error")
    manager, seen = CheckpointManager(folder), -1
    while seen < last:
        step = manager.latest()
        assert step is not None and step.number == 7
        found = manager.restore()
        assert bool((found["w"] == found["n"]).all()) and found["n"] >= seen, (found, seen)
        seen = found["n"]
        ready.touch()


@pytest.mark.parametrize("last", [6, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("incremental", [False, "delta"])
def test_many_readers_of_a_step_that_is_replaced_repeatedly(
    tmp_path: Path, incremental: Any, last: int, record_property: Any
) -> None:
    folder, files = tmp_path / "run", [(tmp_path / f"ready-{n}", tmp_path / f"output-{n}") for n in range(2)]
    with CheckpointManager(folder, incremental=incremental) as manager:
        manager.save(7, state(0)).wait()
        readers = [start(read_until, last, folder, ready, output=output) for ready, output in files]
        for reader, (ready, _) in zip(readers, files, strict=True):
            while reader.is_alive() and not ready.exists():
                time.sleep(0.01)
        for number in range(1, last + 1):
            manager.save(7, state(number), overwrite=True)
    for reader, (_, output) in zip(readers, files, strict=True):
        assert ended(reader) == 0, output.read_text()
    record_property("cases", last)
