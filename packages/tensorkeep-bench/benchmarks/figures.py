"""What the benchmarks share: figures with bounds, the file of samples, options, and busy processes."""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tensorkeep import machine
from tensorkeep.cli.text import Table

Samples = dict[str, list[float]]
"""Samples by name, round by round."""


@dataclass(frozen=True, slots=True)
class Line:
    """One figure. Unless ``bound`` is None, the figure must be at least that, or at most that if ``at_most``."""

    what: str
    bound: float | None
    measured: float | None  # None if it could not be measured, which misses any bound
    low: float | None = None  # spread over the rounds
    high: float | None = None
    unit: str = "x"
    at_most: bool = False

    @property
    def reached(self) -> bool:
        """Whether the figure was measured and is on the right side of its bound."""
        if self.measured is None:
            return False
        if self.bound is None:
            return True
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound

    def row(self) -> tuple[str, ...]:
        """Return it as a row of the table."""
        spread = "" if self.low is None or self.high is None else f"{self.low:.2f} - {self.high:.2f}"
        measured = "not measured" if self.measured is None else f"{self.measured:.3g} {self.unit}"
        if self.bound is None:
            return (self.what, measured, spread, "", "")
        bound = f"{'<=' if self.at_most else '>='} {self.bound:.3g} {self.unit}"
        return (self.what, measured, spread, bound, "PASS" if self.reached else "MISS")


def median_line(
    what: str, bound: float | None, found: Sequence[float], *, unit: str = "x", at_most: bool = False
) -> Line:
    """Return the median and the range of some samples as a figure; without samples it was not measured."""
    if not found:
        return Line(what, bound, None, unit=unit, at_most=at_most)
    return Line(what, bound, statistics.median(found), min(found), max(found), unit, at_most)


def ratios(samples: Mapping[str, Sequence[float]], above: str, below: str) -> tuple[float, float, float]:
    """Return median, lowest and highest of the ratios of two figures of the same rounds."""
    found = [a / b for a, b in zip(samples[above], samples[below], strict=True)]
    return statistics.median(found), min(found), max(found)


def show(lines: Sequence[Line]) -> int:
    """Print the figures; return the exit code, 1 if one misses its bound."""
    Table(("figure", ">median", ">spread", ">must reach", "verdict"), [line.row() for line in lines]).show()
    return 0 if all(line.reached for line in lines) else 1


def parser_of(doc: str | None, *, rounds: int | None = None, folder: str = "") -> argparse.ArgumentParser:
    """Return a parser with the options ``--out`` and, if they are given here, ``--rounds`` and ``--dir``."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    if folder:
        parser.add_argument("--dir", type=Path, default=Path(), help=folder)
    parser.add_argument("--out", type=Path, help="the JSON file to write, with every raw sample")
    return parser


def write_samples(
    out: Path | None, command: str, *, folder: Path | None = None, lines: Sequence[Line] = (), **content: Any
) -> None:
    """Write samples with the command, the date, the environment, and the disk of a folder, if ``out`` is given."""
    if out is None:
        return
    environment: dict[str, Any] = dict(machine.describe(folder or Path()))
    storage = environment.pop("storage")
    if folder is not None:
        # The path of the folder says nothing on another machine.
        environment["storage"] = {key: value for key, value in storage.items() if key not in ("path", "mount_point")}
    document = {
        "command": f"packages/tensorkeep-bench/benchmarks/{command}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment,
        **content,
    }
    if lines:
        document["lines"] = [{**asdict(line), "reached": line.reached} for line in lines]
    out.write_text(json.dumps(document, indent=1) + "\n")


def note(text: str) -> None:
    """Print a line of progress with the time of day."""
    print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run processes that compute all the time while the block runs."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
