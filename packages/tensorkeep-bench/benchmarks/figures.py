"""What the benchmarks share: figures with bounds, the file of samples, options, processes, steps of training."""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tensorkeep import machine
from tensorkeep.cli.text import Table
from tensorkeep.units import parse_bytes
from tensorkeep_bench.statistics import Comparison, compare

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
    spread = (statistics.median(found), min(found), max(found)) if found else (None, None, None)
    return Line(what, bound, *spread, unit, at_most)


def compared(above: Sequence[float], below: Sequence[float]) -> Comparison:
    """Return the mean ratio of two figures of the same rounds, and its 95% interval."""
    return compare([math.log(a / b) for a, b in zip(above, below, strict=True)])


def mean_line(what: str, bound: float | None, found: Comparison, *, at_most: bool = False) -> Line:
    """Return a mean ratio and its 95% interval as a figure."""
    return Line(what, bound, found.gain, found.low, found.high, at_most=at_most)


def ratios(samples: Mapping[str, Sequence[float]], above: str, below: str) -> tuple[float, float, float]:
    """Return median, lowest and highest of the ratios of two figures of the same rounds."""
    found = [a / b for a, b in zip(samples[above], samples[below], strict=True)]
    return statistics.median(found), min(found), max(found)


def ratio_line(
    what: str, bound: float | None, samples: Samples, above: str, below: str, *, at_most: bool = False
) -> Line:
    """Return the median ratio of two figures of the same rounds, and its range, as a figure."""
    return Line(what, bound, *ratios(samples, above, below), at_most=at_most)


def show(lines: Sequence[Line]) -> int:
    """Print the figures; return the exit code, 1 if one misses its bound."""
    Table(("figure", ">median", ">spread", ">must reach", "verdict"), [line.row() for line in lines]).show()
    return 0 if all(line.reached for line in lines) else 1


def parser_of(
    doc: str | None,
    *,
    rounds: int | None = None,
    folder: str = "",
    size: str = "",
    parts: "Mapping[str, Part] | None" = None,
) -> argparse.ArgumentParser:
    """Return a parser with the option ``--out`` and the options that have a value here."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    if rounds is not None:
        parser.add_argument("--rounds", type=positive, default=rounds)
    if folder:
        parser.add_argument("--dir", type=Path, default=Path(), help=folder)
    if size:
        parser.add_argument("--size", type=parse_bytes, default=size, help="about this many bytes of bfloat16 weights")
    if parts:
        parser.add_argument("--only", nargs="*", choices=list(parts), default=list(parts))
    parser.add_argument("--out", type=Path, help="the JSON file to write, with every raw sample")
    return parser


def positive(text: str) -> int:
    """Return the number of an option that takes 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("takes 1 or more")
    return number


Part = tuple[Callable[[Path, argparse.Namespace], Any], Callable[[Any], Iterator[Line]]]
"""One part of a benchmark: what measures it in a folder and returns samples, and what makes figures of the samples."""


def run_parts(script: str, parts: Mapping[str, Part], options: argparse.Namespace) -> int:
    """Measure the parts that are asked for, print and write; return the exit code."""
    samples: dict[str, Any] = {}
    lines: list[Line] = []
    for name in options.only:
        note(name)
        measure, lines_of = parts[name]
        with tempfile.TemporaryDirectory(prefix="tensorkeep-bench-", dir=options.dir) as folder:
            samples[name] = measure(Path(folder), options)
        lines += lines_of(samples[name])
    command = f"{script} --size {options.size} --rounds {options.rounds}"
    write_samples(options.out, command, folder=options.dir, lines=lines, samples=samples)
    return show(lines)


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


class Worker:
    """A process that answers each line of its input with a line of JSON; its first answer says that it is ready."""

    def __init__(self, *command: str, **options: Any) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)

    def send(self, request: object = None) -> None:
        """Let the process do something."""
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """Wait for the next answer; SystemExit if the process has failed."""
        for line in self.process.stdout or ():
            # Libraries print lines of their own.
            if line[0] in "{[":
                return json.loads(line)
        raise SystemExit(f"a process has failed, see above: {self.process.args}")

    def ask(self, request: object = None) -> Any:
        """Let the process do something, and return its answer."""
        self.send(request)
        return self.answer()

    def close(self) -> None:
        """End the input of the process, and wait until it has ended."""
        self.process.communicate()


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def training_step(width: int = 512, batch: int = 256, **options: Any) -> Callable[[], None]:
    """Return a training step of a stack of layers on the CPU; ``options`` are those of AdamW."""
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    inputs = torch.randn(batch, width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def median_step(
    step: Callable[[], None],
    busy: Callable[[], bool],
    seconds: Callable[[Callable[[], object]], float] = seconds_of,
) -> float:
    """Return the median seconds of the steps that are made while something is busy, at least five."""
    found = []
    while busy() or len(found) < 5:
        found.append(seconds(step))
    return statistics.median(found)


def for_seconds(duration: float) -> Callable[[], bool]:
    """Return a function that returns True for so many seconds."""
    end = time.perf_counter() + duration
    return lambda: time.perf_counter() < end
