"""The results file of a run: planned, filled cell by cell, and written so that it is whole at every moment.

``docs/reference/results.md`` says what it holds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tensorkeep.bench.analysis.samples import read_samples
from tensorkeep.bench.experiment.design import schedule
from tensorkeep.bench.experiment.experiment import Experiment
from tensorkeep.bench.experiment.workload import Workload
from tensorkeep.errors import NotACheckpointError, StoreError, UsageError
from tensorkeep.io.files import sync_directory
from tensorkeep.version import __version__

SCHEMA = 1
KIND = "tensorkeep-results"
FILE_NAME = "results.json"

_NEEDED = {"name", "workload", "settings", "limits"}

AGAIN = ("planned", "disk")
"""What a cell's status is when it still has to run."""


def now() -> str:
    """Return the time, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def plan(experiment: Experiment, workload: Workload, command: str) -> dict[str, Any]:
    """Return the results of a run that has not begun: every cell is planned."""
    names = workload.measures_of(experiment.settings)
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "tensorkeep": __version__,
        "command": command,
        "started": now(),
        "finished": None,
        "complete": False,
        "experiment": experiment.as_dict(),
        "environment": {},
        "subject": {},
        "measures": [measure.as_dict() for measure in workload.measures if measure.name in names],
        "arms": [arm.as_dict() for arm in experiment.arms],
        "cells": [_planned(block, order, arm) for block, order, arm in schedule(experiment)],
        "summary": {},
    }


def _planned(block: int, order: int, arm: str) -> dict[str, Any]:
    return {
        "arm": arm,
        "block": block,
        "order": order,
        "status": "planned",
        "reason": None,
        "command": [],
        "started": None,
        "seconds": None,
        "amount": None,
        "subject": None,
        "figures": {},
        "clocks": {},
        "seen": {},
    }


def pending(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the cells that still have to run, in their order."""
    cells = sorted(document["cells"], key=lambda cell: cell["order"])
    return (cell for cell in cells if cell["status"] in AGAIN)


def read(path: Path) -> dict[str, Any]:
    """Return the results in a file, to go on with them.

    Raises
    ------
    NotACheckpointError
        If there is no such file.
    UsageError
        If it holds something else.
    """
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise NotACheckpointError(
            "there are no results to go on with", path=path, remedy="leave out --resume"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot be read as results: {error}", path=path, remedy="choose another --out") from error
    if not isinstance(document, dict) or (document.get("kind"), document.get("schema")) != (KIND, SCHEMA):
        raise UsageError("is no results file of this version", path=path, remedy="choose another --out")
    read_samples(document)
    experiment = document.get("experiment")
    if (
        not isinstance(experiment, dict)
        or not experiment.keys() >= _NEEDED
        or not isinstance(document.get("cells"), list)
    ):
        raise UsageError("is no whole results file", path=path, remedy="choose another --out")
    return document


def write(document: dict[str, Any], path: Path) -> None:
    """Replace the file by the document, whole or not at all.

    Raises
    ------
    StoreError
        If it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(_finite(document), file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.absolute().parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write the results: {error.strerror}", path=path) from error


def _finite(value: Any) -> Any:
    """Return plain values as JSON has them: an infinite gain, of a figure of zero, is none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
