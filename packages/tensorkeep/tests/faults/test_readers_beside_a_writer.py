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
from tensorkeep import CheckpointManager, NotACheckpointError
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.storage.base import Directory
from tensorkeep.testing.equality import same
from tiers import exhaustive


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

    stand_ins = {name: followed(getattr(manifests, name)) for name in ("read", "read_outline")}
    with mock.patch.multiple(manifests, **stand_ins):
        yield
    assert not once


@pytest.mark.parametrize("look", ["latest", "restore", "listing"])
def test_a_step_is_replaced_or_deleted_while_it_is_opened(tmp_path: Path, look: str) -> None:
    others = CheckpointManager(tmp_path)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1)).wait()
        with looking(lambda: manager.save(1, state(2), overwrite=True).wait()), warnings.catch_warnings():
            warnings.simplefilter("error")
            found = getattr(others, look)()
        manager.save(2, state(2)).wait()
        with looking(lambda: manager.delete(1)):
            after = CheckpointManager(tmp_path).listing()
    if look == "latest":
        assert found.number == 1
    elif look == "restore":
        assert same(found, state(2))
    else:
        assert [step.number for step in found.steps] == [1]
        assert not found.broken
    assert [step.number for step in after.steps] == [2]
    assert not after.broken


def read_until(last: int, folder: Path, ready: Path, replaced: bool) -> None:
    """Restore the latest step until it is the last one; each is complete, and none is older than the one before."""
    warnings.simplefilter("error")
    manager, seen = CheckpointManager(folder), -1
    while seen < last:
        try:
            step, found = manager.latest(), manager.restore()
        except NotACheckpointError:
            if replaced:
                raise
            continue
        assert step is not None and (step.number == 7 or not replaced)
        assert bool((found["w"] == found["n"]).all()) and found["n"] >= seen, (found, seen)
        seen = found["n"]
        ready.touch()


@pytest.mark.integration
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("options", "replaced", "last"),
    [
        *[({}, True, 6), ({"incremental": "delta"}, True, 6)],
        *exhaustive(({}, True, 40), ({"incremental": "delta"}, True, 40)),
        *exhaustive(({"incremental": True, "keep_last": 2}, False, 20)),
    ],
)
def test_many_readers_of_steps_that_are_replaced_or_deleted_repeatedly(
    tmp_path: Path, options: dict[str, Any], replaced: bool, last: int, record_property: Any
) -> None:
    folder, files = tmp_path / "run", [(tmp_path / f"ready-{n}", tmp_path / f"output-{n}") for n in range(2)]
    with CheckpointManager(folder, **options) as manager:
        manager.save(7, state(0)).wait()
        readers = [start(read_until, last, folder, ready, replaced, output=output) for ready, output in files]
        for reader, (ready, _) in zip(readers, files, strict=True):
            while reader.is_alive() and not ready.exists():
                time.sleep(0.01)
        for number in range(1, last + 1):
            manager.save(7 if replaced else 7 + number, state(number), overwrite=True)
    for reader, (_, output) in zip(readers, files, strict=True):
        assert ended(reader) == 0, output.read_text()
    record_property("cases", last)
