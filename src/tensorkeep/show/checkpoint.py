"""What a checkpoint contains: its modules, and the statistics of every tensor, sampled where it is large."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tensorkeep.checkpoint.arguments import MemorySize, budget_pool, thread_count
from tensorkeep.checkpoint.info import InfoReport, describe, report_of
from tensorkeep.errors import PathLike
from tensorkeep.formats.base import Entry, OpenSettings
from tensorkeep.formats.finding import open_reader
from tensorkeep.formats.torch_file.unpickle import Allow, allowed_names
from tensorkeep.show.tensors.sampling import DEFAULT_SAMPLE, Sample, choose_sample, measure
from tensorkeep.show.tensors.statistics import Statistics
from tensorkeep.storage.buffers import DEFAULT_BUDGET
from tensorkeep.storage.parallel import Progress


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """The contents of a checkpoint.

    Attributes
    ----------
    info : InfoReport
    sample : Sample
        What was read of it.
    statistics : dict of str to Statistics
        Of every stored tensor; a view has those of the tensor whose storage it shares, in part or in full.
    """

    info: InfoReport
    sample: Sample
    statistics: dict[str, Statistics]

    def of(self, entry: Entry) -> Statistics:
        """Return the statistics of a tensor; of a view, those of the stored tensor."""
        return self.statistics[entry.alias_of or entry.name]

    @property
    def stored(self) -> list[Entry]:
        """The tensors that are no views of others."""
        return [entry for entry in self.info.entries if entry.alias_of is None]

    @property
    def not_finite(self) -> list[Entry]:
        """The stored tensors with NaN or infinities, those with most first."""
        found = [entry for entry in self.stored if self._not_finite(entry)]
        return sorted(found, key=lambda entry: -self._not_finite(entry))

    def _not_finite(self, entry: Entry) -> int:
        return self.statistics[entry.name].nan + self.statistics[entry.name].infinite

    @property
    def zero(self) -> list[Entry]:
        """The stored tensors whose elements, as far as they were read, are all 0."""
        found = ((entry, self.statistics[entry.name]) for entry in self.stored)
        return [entry for entry, statistics in found if 0 < statistics.numbers == statistics.zeros]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, as ``--json`` prints it."""
        return {
            "kind": "checkpoint",
            **{key: value for key, value in self.info.as_dict(largest=0).items() if key != "largest"},
            "sample": {"every": self.sample.every, "nbytes": self.sample.nbytes, "total": self.sample.total},
            "not_finite": [entry.name for entry in self.not_finite],
            "zero": [entry.name for entry in self.zero],
            "tensors": list(self._tensors()),
        }

    def _tensors(self) -> Iterator[dict[str, Any]]:
        for entry in self.info.entries:
            # A view may be a part only of the tensor that was measured.
            measured = None if entry.alias_of else self.statistics[entry.name].as_dict()
            yield {**describe(entry), "statistics": measured}


def read_contents(
    path: PathLike,
    *,
    sample: int = DEFAULT_SAMPLE,
    format: str | None = None,
    allow: Allow | None = None,
    threads: int | None = None,
    memory_budget: MemorySize = DEFAULT_BUDGET,
    progress: Progress | None = None,
) -> CheckpointContents:
    """Read a checkpoint of any format, about ``sample`` raw bytes of it, a block of each tensor at least.

    Raises the errors of `tensorkeep.open` and of its reading.
    """
    settings = OpenSettings(pool=budget_pool(memory_budget), allow=allowed_names(allow))
    with settings.pool as pool, open_reader(path, settings, format) as reader:
        chosen = choose_sample(reader, sample)
        statistics = measure(reader, chosen, threads=thread_count(threads), pool=pool, progress=progress)
        return CheckpointContents(report_of(path, reader), chosen, statistics)
