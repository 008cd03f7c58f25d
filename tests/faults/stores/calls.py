"""The calls whose requests are broken: saves, runs and reads. Each checks what the store holds afterwards."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

import tensorkeep
from tensorkeep import CheckpointManager
from tensorkeep.testing.equality import same

OLD: dict[str, Any] = {"model": {"w": torch.arange(3000.0), "b": torch.zeros(7)}, "frozen": torch.ones(500), "step": 1}
NEW: dict[str, Any] = {**OLD, "model": {"w": torch.arange(3000.0) * 2, "b": torch.ones(7)}, "step": 2}

LARGE: dict[str, Any] = {"w": torch.arange(9 * 2**18, dtype=torch.float32), "step": 3}
"""9 MiB: its file goes up in two parts."""


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
    """A save to a new place."""

    before = "nothing"

    def __init__(self, state: Mapping[str, Any] = NEW, **options: Any) -> None:
        self.state = state
        self.options = options

    def prepare(self, url: str) -> None:
        """Write nothing."""

    def run(self, url: str) -> None:
        tensorkeep.save(self.state, url, overwrite=True, threads=2, **self.options)

    def check(self, url: str, *, returned: bool) -> str:
        found = holds(url)
        assert found in (("new", "large") if returned else (self.before, "new", "large"))
        return "new" if found == "large" else found


class Replacement(Save):
    """A save in place of another checkpoint."""

    before = "old"

    def prepare(self, url: str) -> None:
        tensorkeep.save(OLD, url)


class BackgroundSave(Replacement):
    """A save in the background."""

    def run(self, url: str) -> None:
        tensorkeep.save_async(NEW, url, overwrite=True, threads=2).wait()


class Conversion(Save):
    """A conversion from one place of the store to another."""

    def prepare(self, url: str) -> None:
        tensorkeep.save(NEW, f"{url}-source")

    def run(self, url: str) -> None:
        tensorkeep.convert(f"{url}-source", url, compression="lossless", overwrite=True)


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


class _LongRun(NextStep):
    """A run of three steps, each of which shares data with the one before it."""

    before = (1, 2, 3)

    def prepare(self, url: str) -> None:
        with CheckpointManager(url, incremental=True) as manager:
            for number in self.before:
                manager.save(number, self.state_of(number)).wait()


class RetainingSave(_LongRun):
    """A run of three steps that saves a fourth and deletes all others."""

    after = (4,)

    def run(self, url: str) -> None:
        with CheckpointManager(url, keep_last=1, incremental=True) as manager:
            manager.save(4, self.state_of(4), overwrite=True).wait()


class Prune(_LongRun):
    """A run of three steps that is pruned to its last one."""

    after = (3,)

    def run(self, url: str) -> None:
        with CheckpointManager(url, keep_last=1) as manager:
            manager.prune()


class Deletion(_LongRun):
    """A run of three steps whose second one, with which the third shares data, is deleted."""

    after = (1, 3)

    def run(self, url: str) -> None:
        with CheckpointManager(url) as manager:
            if 2 in [step.number for step in manager.steps()]:
                manager.delete(2)


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


class Load(Replacement):
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


SAVES: dict[str, Save] = {
    "raw": Save(),
    "in several parts": Save(LARGE),
    "lossless": Save(compression="lossless"),
    "several files": Save(shard_bytes=4096),
    "replacement": Replacement(),
    "background": BackgroundSave(),
    "conversion": Conversion(),
}

RUNS: dict[str, NextStep] = {
    "incremental": NextStep(),
    "differences": NextStep(incremental="delta", compression="lossless"),
    "retention": RetainingSave(),
    "prune": Prune(),
    "deletion": Deletion(),
}

READS = {"load": Load(), "verify": Verify(), "restore": Restore()}

CALLS = SAVES | RUNS


def run_in_process(name: str, url: str, environment: Mapping[str, str]) -> None:
    """Do the call with a name; the body of a process that is killed meanwhile."""
    os.environ.update(environment)
    CALLS[name].run(url)
