"""The results of a run while it is filled, as plain values; `tensorkeep.bench.results` defines the schema."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.bench.analysis.summary import summarise
from tensorkeep.bench.experiment.design import schedule
from tensorkeep.bench.experiment.experiment import Experiment
from tensorkeep.bench.experiment.workload import Workload
from tensorkeep.bench.results import Arm, Cell, Results
from tensorkeep.bench.results import Experiment as ExperimentRecord
from tensorkeep.bench.results_file import FILE_NAME, read_results, write_results
from tensorkeep.version import __version__

__all__ = ["AGAIN", "FILE_NAME", "now", "pending", "plan", "read", "summary_of", "write"]

AGAIN = ("planned", "disk")
"""Status of the cells that still have to run."""


def now() -> str:
    """Return the time, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def plan(experiment: Experiment, workload: Workload, command: str) -> dict[str, Any]:
    """Return the results of a run that has not begun: every cell is planned."""
    names = workload.measures_of(experiment.settings)
    results = Results(
        tensorkeep=__version__,
        command=command,
        started=now(),
        experiment=msgspec.convert(experiment.as_dict(), ExperimentRecord),
        measures=tuple(measure for measure in workload.measures if measure.name in names),
        arms=tuple(msgspec.convert(arm.as_dict(), Arm) for arm in experiment.arms),
        cells=tuple(Cell(arm, block, "planned", order) for block, order, arm in schedule(experiment)),
    )
    return _plain(results)


def pending(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the cells that still have to run, in their order."""
    cells = sorted(document["cells"], key=lambda cell: cell["order"])
    return (cell for cell in cells if cell["status"] in AGAIN)


def read(path: Path) -> dict[str, Any]:
    """Return the results of a run that is resumed; see `read_results` for what is raised."""
    return _plain(read_results(path, printable=False))


def write(document: dict[str, Any], path: Path) -> None:
    """Write the results as far as they are; see `write_results` for what is raised."""
    write_results(msgspec.convert(document, Results), path)


def summary_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of the cells that have figures so far."""
    return _plain(summarise(msgspec.convert(document, Results)))


def _plain(value: Any) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return built
