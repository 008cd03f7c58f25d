"""CPU threads: 0.94 times the plain speed on 2 cores of a CPU; it helps where torch would use hyper-threads.

One thread for each physical core, and the process is bound to those cores.
"""

import os
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from typing import Annotated, ClassVar, Literal

import msgspec
import torch
from msgspec import Meta

from chatgot.techniques.base import Config, Machine, Proof, Section, StepState, Technique, Verification
from chatgot.techniques.distributed import PARALLEL_TECHNIQUES
from tensorkeep.errors import UsageError
from tensorkeep.ext import machine

# The highest processor number that is accepted.
_MAX_CPU = 65535
# Why the technique conflicts with several processes.
_SEVERAL = "all processes on a machine would bind to the same cores: use torchrun --numa-binding"


class CpuThreadsSettings(Section, frozen=True):
    """The number of threads, and their processors."""

    # Threads that compute; it sets loop.threads. "auto": loop.threads, or one for each core. The number is stored with
    # the run, because the last bits of results depend on it.
    threads: Annotated[int, Meta(ge=1, le=1024)] | Literal["auto"] = "auto"
    # The processors to bind the process to, numbered as in Linux, such as "0-3,8". "auto": one processor of each
    # physical core that the process may use, or all its processors if there are more threads than cores.
    cores: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cores != "auto":
            _parse_cores(self.cores)


class CpuThreads(Technique):
    """The threads that write checkpoints are bound to the same processors."""

    name: ClassVar = "cpu-threads"
    aliases: ClassVar = ("cpu-affinity", "cpu-affinity-optimization", "affinity", "cpu-pinning")
    changes: ClassVar = "process"
    tolerance: ClassVar = 1e-3
    summary: ClassVar = "computes with one thread per physical core, and binds the process to those cores"
    effect: ClassVar = "faster where torch would use hyper-threads or cores that others use; no effect elsewhere"
    reference: ClassVar = "docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html; sched_setaffinity(2)"
    predicts_memory: ClassVar = True
    conflicts: ClassVar = dict.fromkeys(PARALLEL_TECHNIQUES, _SEVERAL)
    settings: CpuThreadsSettings

    _bound: AbstractSet[int] = frozenset()

    def missing(self, machine: Machine) -> str | None:
        allowed, cores = os.sched_getaffinity(0), self._cores(1)
        if not cores <= allowed:
            return (
                f"needs the processors {_format_cores(cores - allowed)}; this process may use {_format_cores(allowed)}"
            )
        # Beyond the physical cores, "auto" takes hyper-threads.
        available = len(allowed if self.settings.cores == "auto" else cores)
        if self.settings.threads != "auto" and self.settings.threads > available:
            return f"needs {self.settings.threads} processors for as many threads; there are {available}"
        return None

    def configure(self, config: Config) -> Config:
        threads = self.settings.threads
        if threads == "auto":
            threads = config.loop.threads or len(self._cores(1))
        # A resumed run on another machine must compute with the same number.
        self.settings = msgspec.structs.replace(self.settings, threads=threads)
        return config.changed({"loop.threads": threads, f"techniques.{self.name}": msgspec.to_builtins(self.settings)})

    def _cores(self, threads: int) -> set[int]:
        if self.settings.cores != "auto":
            return _parse_cores(self.settings.cores)
        allowed = os.sched_getaffinity(0)
        cores = machine.physical_cores(allowed)
        return allowed if len(cores) < threads else cores

    @contextmanager
    def process(self) -> Iterator[None]:
        # The affinity of a new thread is its parent's, so later threads are bound as well.
        threads, allowed = torch.get_num_threads(), os.sched_getaffinity(0)
        self._bound = self._cores(1 if self.settings.threads == "auto" else self.settings.threads)
        try:
            _bind(self._bound)
            yield
        finally:
            torch.set_num_threads(threads)
            _bind(allowed)

    def verify(self, run: StepState) -> Verification:
        yield
        threads = torch.get_num_threads()
        if threads != self.settings.threads:
            raise self.not_active(
                f"torch computes with {threads} threads instead of {self.settings.threads}",
                "find out what sets the number of threads after the run began",
            )
        # Each thread, because a library may bind its own threads again.
        affinities = _affinities()
        strays = sum(not affinity <= self._bound for affinity in affinities)
        if strays:
            raise self.not_active(
                f"{strays} of {len(affinities)} threads may leave the processors {_format_cores(self._bound)}",
                "find out what changes their affinity after the run began",
            )
        summary = (
            f"{threads} threads computed, and all {len(affinities)} of the process stayed on "
            f"{_format_cores(self._bound)}"
        )
        return Proof(summary, threads=threads, cores=sorted(self._bound))


def _bind(cores: set[int]) -> None:
    for thread in machine.thread_ids():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, cores)


def _affinities() -> list[set[int]]:
    found = []
    for thread in machine.thread_ids():
        with suppress(ProcessLookupError):  # it has ended
            found.append(os.sched_getaffinity(thread))
    return found


def _parse_cores(text: str) -> set[int]:
    try:
        ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
    except ValueError:
        ranges = []
    if not ranges or any(len(each) > 2 or not each[0] <= each[-1] <= _MAX_CPU for each in ranges):
        raise UsageError(f"cores is {text!r}", remedy='give numbers and ranges, such as "0-3,8", or "auto"')
    return {core for each in ranges for core in range(each[0], each[-1] + 1)}


def _format_cores(cores: Iterable[int]) -> str:
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], core]
        else:
            ranges.append([core])
    return ",".join("-".join(map(str, each)) for each in ranges)
