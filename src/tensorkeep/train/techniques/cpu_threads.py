"""CPU threads: as many as there are cores, each process kept on its own, so that nothing moves or waits."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec
import torch

from tensorkeep.errors import UsageError
from tensorkeep.machine import physical_cores, thread_ids
from tensorkeep.train.config.bounds import check_bounds
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import Section
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.machine import Machine

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run

_MOST = 65535
"""No machine has a processor of a higher number."""
_SEVERAL = "several processes on a machine would all take the same cores: torchrun --numa-binding tells them apart"


class CpuThreadsSettings(Section, frozen=True):
    """How many threads, and where.

    Attributes
    ----------
    threads : int or "auto"
        Threads that compute, as ``loop.threads``, whose place it takes. ``"auto"``: ``loop.threads``, or one for each
        core; the number is kept with the run, as results depend on it in their last bits.
    cores : str
        The processors that the process stays on, numbered as Linux does, such as ``"0-3,8"``. ``"auto"``: one of each
        physical core that the process may use; all of them if that is fewer than threads.
    """

    threads: int | Literal["auto"] = "auto"
    cores: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.threads, int):
            check_bounds("threads", self.threads, least=1, most=1024)
        if self.cores != "auto":
            _parsed(self.cores)


class CpuThreads(Technique):
    """Writing checkpoints stays on these processors, too."""

    name: ClassVar = "cpu-threads"
    kind: ClassVar = "systems"
    changes: ClassVar = "process"
    tolerance: ClassVar = 1e-3
    summary: ClassVar = "computes with one thread per physical core, and keeps the process on those cores"
    effect: ClassVar = "a real factor where torch would take hyper-threads or share cores; nothing where it would not"
    reference: ClassVar = "docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html; sched_setaffinity(2)"
    Settings: ClassVar = CpuThreadsSettings
    conflicts: ClassVar = dict.fromkeys(("ddp", "fsdp", "tensor-parallel", "pipeline-parallel"), _SEVERAL)

    def __init__(self, settings: Section) -> None:
        super().__init__(settings)
        self._pinned: set[int] = set()

    def lacks(self, machine: Machine) -> str | None:
        """Say which processors the process may not use, or that there are too few."""
        if not hasattr(os, "sched_setaffinity"):
            return "needs Linux, which alone keeps threads on processors"
        allowed, wanted = os.sched_getaffinity(0), self._cores(1)
        if not wanted <= allowed:
            return f"needs the processors {_in_words(wanted - allowed)}; this process may use {_in_words(allowed)}"
        room = len(allowed if self.settings.cores == "auto" else wanted)
        if self.settings.threads != "auto" and self.settings.threads > room:
            return f"needs {self.settings.threads} processors for as many threads; there are {room}"
        return None

    def configure(self, config: Config) -> Config:
        """Settle the number of threads, once for all processes of the run."""
        threads = self.settings.threads
        if threads == "auto":
            threads = config.loop.threads or len(self._cores(1))
        self.settings = msgspec.structs.replace(self.settings, threads=threads)
        return msgspec.structs.replace(
            config,
            loop=msgspec.structs.replace(config.loop, threads=threads),
            techniques={**config.techniques, self.name: msgspec.to_builtins(self.settings)},
        )

    def _cores(self, threads: int) -> set[int]:
        if self.settings.cores != "auto":
            return _parsed(self.settings.cores)
        allowed = os.sched_getaffinity(0)
        cores = physical_cores(allowed)
        return allowed if len(cores) < threads else cores

    @contextmanager
    def process(self) -> Iterator[None]:
        """Keep all threads, and those that they start, on the cores; set them free at the end."""
        threads, free = torch.get_num_threads(), os.sched_getaffinity(0)
        self._pinned = self._cores(self.settings.threads)
        try:
            _pin(self._pinned)
            torch.set_num_threads(self.settings.threads)
            yield
        finally:
            torch.set_num_threads(threads)
            _pin(free)

    def apply(self, run: Run) -> None:
        """Do nothing: it is the process that is changed, before the run is built."""

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Read back, after the step, the number of threads, and where each thread of the process may run."""
        proof = Proof()
        yield proof
        wanted, threads = self._pinned, torch.get_num_threads()
        if threads != self.settings.threads:
            raise self.not_active(
                f"torch computes with {threads} threads instead of {self.settings.threads}",
                "find out what sets the number of threads after the run began",
            )
        places = _places()
        strays = {thread: place for thread, place in places.items() if not place <= wanted}
        if strays:
            raise self.not_active(
                f"{len(strays)} of {len(places)} threads may leave the processors {_in_words(wanted)}",
                "find out what moves them after the run began",
            )
        proof.is_that(
            f"{threads} threads computed, and all {len(places)} of the process stayed on {_in_words(wanted)}",
            threads=threads,
            cores=sorted(wanted),
        )


def _pin(cores: set[int]) -> None:
    for thread in thread_ids():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, cores)


def _places() -> dict[int, set[int]]:
    places = {}
    for thread in thread_ids():
        with suppress(ProcessLookupError):
            places[thread] = os.sched_getaffinity(thread)
    return places


def _parsed(text: str) -> set[int]:
    try:
        ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
    except ValueError:
        ranges = []
    if not ranges or any(len(each) > 2 or not each[0] <= each[-1] <= _MOST for each in ranges):
        raise UsageError(f"cores is {text!r}", remedy='give numbers and ranges, such as "0-3,8", or "auto"')
    return {core for each in ranges for core in range(each[0], each[-1] + 1)}


def _in_words(cores: Iterable[int]) -> str:
    """Return processors as Linux lists them."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)
