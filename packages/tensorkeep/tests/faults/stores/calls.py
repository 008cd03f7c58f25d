"""The calls whose requests are broken: saves, runs and reads. Each checks what the store holds afterwards."""

import os
import shutil
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import torch

import tensorkeep
from checkpoint.local_tier.copies import copy
from faults.stores.buckets import Call
from tensorkeep import CheckpointManager
from tensorkeep.paths import StorePath
from tensorkeep.runs.transfer import find_copy
from tensorkeep.storage import object_store
from tensorkeep.testing.equality import same

OLD: dict[str, Any] = {"model": {"w": torch.arange(3000.0), "b": torch.zeros(7)}, "frozen": torch.ones(500), "step": 1}
NEW: dict[str, Any] = {**OLD, "model": {"w": torch.arange(3000.0) * 2, "b": torch.ones(7)}, "step": 2}

LARGE: dict[str, Any] = {"w": torch.arange(5 * 2**17, dtype=torch.float32), "step": 3}
"""2.5 MiB, whose file goes up in parts of one."""


def holds(url: str) -> str:
    """Load the checkpoint at a URL and return which state it has, or "nothing"; other states fail the test."""
    try:
        found = tensorkeep.load(url)
    except tensorkeep.NotACheckpointError:
        return "nothing"
    for name, state in {"old": OLD, "new": NEW, "large": LARGE}.items():
        if same(found, state):
            return name
    raise AssertionError(f"{url} holds a state that was never saved")


class Save:
    """A save to a place where is nothing, or the old checkpoint."""

    def __init__(self, state: Mapping[str, Any] = NEW, *, before: str = "nothing", **options: Any) -> None:
        self.state = state
        self.before = before
        self.options = options

    def prepare(self, url: str) -> None:
        if self.before == "old":
            tensorkeep.save(OLD, url)

    def run(self, url: str) -> None:
        with mock.patch.object(object_store, "_PART_BYTES", 2**20):
            tensorkeep.save(self.state, url, overwrite=True, threads=2, **self.options)

    def check(self, url: str, *, returned: bool) -> str:
        found = holds(url)
        assert found in (("new", "large") if returned else (self.before, "new", "large"))
        return "new" if found == "large" else found


class BackgroundSave(Save):
    def run(self, url: str) -> None:
        tensorkeep.save_async(NEW, url, overwrite=True, threads=2).wait()


class Conversion(Save):
    def prepare(self, url: str) -> None:
        tensorkeep.save(NEW, f"{url}-source")

    def run(self, url: str) -> None:
        tensorkeep.convert(f"{url}-source", url, compression="lossless", overwrite=True)


class Upload(Save):
    """An upload of a step from a disk, which shares a file with the copy of the step before it."""

    def _steps(self, url: str) -> tuple[Path, Path]:
        folder = self._folder / url.removeprefix("s3://")
        return folder / "step-000001", folder / "step-000002"

    def prepare(self, url: str) -> None:
        self._folder = Path(mkdtemp())
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        first, second = self._steps(url)
        tensorkeep.save(OLD, first, incremental=True)
        tensorkeep.save(NEW, second, base=first)
        self._copied, _ = copy(first, StorePath(f"{url}-run/step-000001"))

    def run(self, url: str) -> None:
        second = self._steps(url)[1]
        with suppress(tensorkeep.DestinationExistsError):  # the answer to the last request was lost before
            copy(second, StorePath(f"{url}-run/step-000002"), self._copied)
        assert find_copy(second, StorePath(f"{url}-run/step-000002")) is not None

    def check(self, url: str, *, returned: bool) -> str:
        return super().check(f"{url}-run/step-000002", returned=returned)


class NextStep:
    """A run that is resumed and saves its next step, which shares data with the step before it."""

    before = (1,)
    after = (1, 2)

    def __init__(self, **options: Any) -> None:
        self.options = {"incremental": True, "threads": 2, **options}

    def prepare(self, url: str) -> None:
        with CheckpointManager(url, incremental=True) as manager:
            manager.save(1, OLD).wait()

    def run(self, url: str) -> None:
        with CheckpointManager(url, **self.options) as manager:
            manager.restore()
            manager.save(2, NEW, overwrite=True).wait()

    def check(self, url: str, *, returned: bool) -> str:
        listing = CheckpointManager(url).listing()
        assert not listing.broken
        numbers = tuple(step.number for step in listing.steps)
        assert numbers
        assert set(self.before) & set(self.after) <= set(numbers) <= set(self.before) | set(self.after)
        for step in listing.steps:
            assert same(tensorkeep.load(step.path), self.state_of(step.number)), step.path
        if returned:
            assert numbers == self.after
        return "new" if numbers == self.after else "old"

    def state_of(self, number: int) -> Mapping[str, Any]:
        return OLD if number == 1 else {**NEW, "step": number}


class ShorterRun(NextStep):
    """A run of three steps, each of which shares data with the one before it, some of which are deleted.

    A deleted step leaves its metrics, unless an error or a warning was raised.
    """

    before = (1, 2, 3)

    def __init__(self, run: Callable[[str], None], after: tuple[int, ...]) -> None:
        super().__init__()
        self._run = run
        self.after = after

    def prepare(self, url: str) -> None:
        self._failed = False
        with CheckpointManager(url, incremental=True) as manager:
            for number in self.before:
                manager.save(number, self.state_of(number), metrics={"loss": number}).wait()

    def run(self, url: str) -> None:
        try:
            self._run(url)
        except Exception:
            self._failed = True
            raise

    def check(self, url: str, *, returned: bool) -> str:
        log = tensorkeep.log(url)
        gone = {number: {"loss": number} for number in {*self.before} - {step.number for step in log.steps}}
        assert self._failed or {step.number: step.metrics for step in log.pruned} == gone
        return super().check(url, returned=returned)


def _save_and_retain(url: str) -> None:
    """Save a fourth step, and delete all others."""
    with CheckpointManager(url, keep_last=1, incremental=True) as manager:
        manager.save(4, {**NEW, "step": 4}, overwrite=True).wait()


def _prune(url: str) -> None:
    with CheckpointManager(url, keep_last=1) as manager:
        manager.prune()


def _delete(url: str) -> None:
    """Delete the second step, with which the third shares data."""
    with CheckpointManager(url) as manager:
        if 2 in [step.number for step in manager.steps()]:
            manager.delete(2)


class LocalRun(NextStep):
    """A run with a local tier that is resumed and saves its next step."""

    def _save(self, url: str, number: int) -> None:
        local = self._folder / url.removeprefix("s3://")
        with CheckpointManager(url, local=local, incremental=True, threads=2) as manager:
            manager.save(number, self.state_of(number), overwrite=True)

    def prepare(self, url: str) -> None:
        self._folder = Path(mkdtemp())
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._save(url, 1)

    def run(self, url: str) -> None:
        self._save(url, 2)


class Restore(NextStep):
    """A run of two steps that is resumed; an earlier step is used, with a warning, only if the last seems damaged."""

    before = after = (1, 2)

    def prepare(self, url: str) -> None:
        super().prepare(url)
        NextStep.run(self, url)

    def run(self, url: str) -> None:
        with warnings.catch_warnings(record=True) as caught, CheckpointManager(url) as manager:
            warnings.simplefilter("always")
            found = manager.restore()
        assert same(found, NEW) or (same(found, OLD) and caught)


class Load(Save):
    """A load into tensors that exist, and of a slice."""

    def check(self, url: str, *, returned: bool) -> str:
        assert holds(url) == "old"
        return "new"

    def run(self, url: str) -> None:
        into = {"model": {"w": torch.zeros(3000), "b": torch.ones(7)}, "frozen": torch.zeros(500), "step": 0}
        assert same(tensorkeep.load(url, into=into), OLD)
        with tensorkeep.open(url) as checkpoint:
            assert torch.equal(checkpoint["model.w"][7:9], OLD["model"]["w"][7:9])


class Verify(Load):
    """A verification, and the summary of a checkpoint."""

    def run(self, url: str) -> None:
        report = tensorkeep.verify(url)
        if not report.ok:
            raise tensorkeep.CorruptCheckpointError(report.problems[0].message, path=url, remedy="read it again")
        assert tensorkeep.info(url).entries


WRITES: dict[str, Call] = {
    "raw": Save(),
    "in several parts": Save(LARGE),
    "lossless": Save(compression="lossless"),
    "several files": Save(shard_bytes=4096),
    "replacement": Save(before="old"),
    "background": BackgroundSave(before="old"),
    "conversion": Conversion(),
    "incremental": NextStep(),
    "differences": NextStep(incremental="delta", compression="lossless"),
    "retention": ShorterRun(_save_and_retain, (4,)),
    "prune": ShorterRun(_prune, (3,)),
    "deletion": ShorterRun(_delete, (1, 3)),
}

CALLS: dict[str, Call] = {
    **WRITES,
    "upload": Upload(),
    "local tier": LocalRun(),
    "load": Load(before="old"),
    "verify": Verify(before="old"),
    "restore": Restore(),
}


def run_in_process(name: str, url: str, environment: Mapping[str, str]) -> None:
    """Do the call with a name; the body of a process that is killed meanwhile."""
    os.environ.update(environment)
    WRITES[name].run(url)
