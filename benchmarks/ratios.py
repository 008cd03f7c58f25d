"""Check the speed that the README states, as ratios to other tools in the same run: ``make bench``.

Prints one line per figure with PASS or MISS, and writes every raw sample with its environment to a JSON file. The exit
code is 1 if a figure misses its bound.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import timeit
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from peak_memory import COMPRESSIONS, INTERPRETER_ALLOWANCE, LAYOUTS, PeakMemory, measure_peak
from startup import COMMANDS, Startup, measure_startup
from tensorkeep import machine
from tensorkeep.bench.analysis.statistics import describe
from tensorkeep.bench.checkpoint.measure import COLD, INTO_COLD, INTO_WARM, LOADS, SAVE, STORED, WARM
from tensorkeep.bench.checkpoint.models import build, parse, spec_of_size
from tensorkeep.bench.checkpoint.probes import check_capacity, remove, sync_tree
from tensorkeep.bench.checkpoint.state_pair import COPIES_IN_MEMORY, StatePair
from tensorkeep.bench.checkpoint.tools.registry import COMMON_TOOLS
from tensorkeep.bench.checkpoint.workload import MEASURES
from tensorkeep.bench.experiment.workload import Outcome
from tensorkeep.bench.run.rounds import Measurement, Rounds, run_rounds, tool_measurements
from tensorkeep.cli.text import Table
from tensorkeep.errors import TensorkeepError, UnsupportedError
from tensorkeep.storage.buffers import DEFAULT_BUDGET
from tensorkeep.storage.parallel import default_threads
from tensorkeep.units import format_bytes, format_rate, format_seconds, parse_bytes
from yardstick import DirectWriter

SCHEMA = 1
SEED = 20_240_601
DIRECT = "O_DIRECT write"
RAW, LOSSLESS = "tensorkeep", "tensorkeep-lossless"


@dataclass(frozen=True, slots=True)
class Line:
    """One figure, which must be reached unless it has no bound.

    Attributes
    ----------
    what : str
    bound : float or None
        The least, or the most if ``at_most``.
    measured : float or None
        None if it could not be measured; that is a miss.
    low, high : float or None
        The spread over the rounds.
    unit : str
    at_most : bool
    """

    what: str
    bound: float | None
    measured: float | None
    low: float | None = None
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


def main() -> int:
    """Measure, print, write; return the exit code."""
    options = _options()
    spec = spec_of_size(options.size)
    options.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="tensorkeep-bench-", dir=options.dir))
    try:
        nbytes = parse(spec).nbytes
        check_capacity(folder, disk=2 * nbytes, memory=COPIES_IN_MEMORY * nbytes + 2 * DEFAULT_BUDGET)
        results = _measure(spec, options.rounds, folder)
    except TensorkeepError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        shutil.rmtree(folder)
    lines = list(_lines(*results))
    _print(spec, nbytes, results[0], lines)
    if options.out:
        document = _document(options, spec, nbytes, results, lines)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
        print(f"\nraw samples and environment: {options.out}")
    return 0 if all(line.reached for line in lines) else 1


Results = tuple[Rounds, list[PeakMemory], list[Startup]]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", type=parse_bytes, default="2GB", help="about this many bytes of bfloat16 weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds takes 1 or more")
    return options


def _measure(spec: str, rounds: int, folder: Path) -> Results:
    _note(f"building {spec}")
    states = StatePair(build(spec, seed=SEED))
    _note("start-up and peak memory, in processes of their own")
    startups = [measure_startup(command) for command in COMMANDS]
    peaks = [
        measure_peak(compression, layout, budget=DEFAULT_BUDGET, state_bytes=4 * DEFAULT_BUDGET, directory=_new(folder))
        for compression in COMPRESSIONS
        for layout in LAYOUTS
    ]
    arms = {**tool_measurements(COMMON_TOOLS, states, folder), DIRECT: _direct_write(states, folder)}
    total = rounds * len(arms)
    measured = run_rounds(arms, rounds, seed=SEED, progress=lambda done, arm: _note(f"{done + 1} of {total}: {arm}"))
    return measured, peaks, startups


def _new(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


def _direct_write(states: StatePair, folder: Path) -> Measurement:
    largest = max(states.flat.leaves.values(), key=lambda leaf: leaf.nbytes)
    sample = np.empty(largest.nbytes, np.uint8)
    largest.read(0, largest.nbytes, sample)
    writer = DirectWriter(sample, default_threads())
    path = folder / "direct"

    def write() -> None:
        writer.write(path, states.nbytes)
        sync_tree(path)

    def measure() -> Outcome:
        os.sync()
        try:
            return Outcome(figures={SAVE: timeit.timeit(write, number=1)})
        except UnsupportedError as error:
            return Outcome("not-run", error.message)
        finally:
            remove(path)

    return measure


def _note(text: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


def _lines(rounds: Rounds, peaks: list[PeakMemory], startups: list[Startup]) -> Iterator[Line]:
    def faster(what: str, bound: float, mine: tuple[str, str], theirs: tuple[str, str]) -> Line:
        return _line(what, bound, rounds.ratios(theirs, mine))

    yield faster("durable save, raw, against torch.save", 2.0, (RAW, SAVE), ("torch", SAVE))
    yield faster("durable save, raw, against safetensors", 2.2, (RAW, SAVE), ("safetensors", SAVE))
    yield faster("durable save, raw, against plain O_DIRECT writes", 0.85, (RAW, SAVE), (DIRECT, SAVE))
    stored = rounds.ratios((LOSSLESS, STORED), (RAW, STORED))
    yield _line("lossless: stored bytes over raw", 0.67, stored, at_most=True)
    yield faster("durable save, lossless, against torch.save", 3.0, (LOSSLESS, SAVE), ("torch", SAVE))
    yield faster("durable save, lossless, against raw", 1.2, (LOSSLESS, SAVE), (RAW, SAVE))
    for name, arm, warm_bound, cold_bound in (("raw", RAW, 3.0, 1.0), ("lossless", LOSSLESS, 1.5, 1.5)):
        what = f"load into tensors, {name}, verified, against torch.load"
        yield faster(f"{what}, warm", warm_bound, (arm, INTO_WARM), ("torch", WARM))
        yield faster(f"{what}, cold", cold_bound, (arm, INTO_COLD), ("torch", COLD))
    for peak in peaks:
        compression = "raw" if peak.compression == "none" else peak.compression
        what = f"peak memory beyond the state, {compression}, {peak.layout}"
        most = (peak.budget + INTERPRETER_ALLOWANCE) / 1e6
        yield Line(what, most, peak.worst / 1e6, unit="MB", at_most=True)
    for startup, bound in zip(startups, (0.2, 0.15), strict=True):
        measured = None if startup.imports_torch else startup.median
        low, high = min(startup.samples), max(startup.samples)
        yield Line(f"{startup.command}, without torch", bound, measured, low, high, unit="s", at_most=True)


def _line(what: str, bound: float, samples: list[float], *, unit: str = "x", at_most: bool = False) -> Line:
    if not samples:
        return Line(what, bound, None, unit=unit, at_most=at_most)
    found = describe(samples)
    return Line(what, bound, found.median, found.low, found.high, unit, at_most)


def _print(spec: str, nbytes: int, rounds: Rounds, lines: list[Line]) -> None:
    print(f"\n{spec}, {format_bytes(nbytes)}, medians of {rounds.count} interleaved rounds, seed {rounds.seed}\n")
    names = [*COMMON_TOOLS, DIRECT]
    labels = {measure.name: measure.label for measure in MEASURES}
    rows = [
        (labels[measure], *(_cell(measure, rounds.figures(name, measure), nbytes) for name in names))
        for measure in (SAVE, *LOADS, STORED)
    ]
    Table(("", *(f">{name}" for name in names)), rows).show()
    for reason in rounds.not_run.values():
        print(f"not run: {reason}")
    print()
    Table(("figure", ">median", ">spread", ">must reach", "verdict"), [r.row() for r in lines]).show()
    missed = sum(not line.reached for line in lines)
    print(f"\n{len(lines) - missed} of {len(lines)} reached")


def _cell(measure: str, figures: Mapping[int, float], nbytes: int) -> str:
    if not figures:
        return "-"
    median = describe(list(figures.values())).median
    if measure == STORED:
        return format_bytes(median)
    return f"{format_seconds(median)}, {format_rate(nbytes, median)}"


def _document(
    options: argparse.Namespace, spec: str, nbytes: int, results: Results, lines: list[Line]
) -> dict[str, Any]:
    rounds, peaks, startups = results
    storage = machine.storage(options.dir)
    return {
        "schema": SCHEMA,
        "command": f"benchmarks/ratios.py --size {options.size} --rounds {options.rounds}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {
            "versions": machine.versions(),
            "processor": machine.processor(),
            "memory": machine.memory(),
            "storage": {key: storage[key] for key in ("file_system", "direct_io", "total_bytes", "free_bytes")},
            "threads": default_threads(),
        },
        "state": {"spec": spec, "seed": SEED, "bytes": nbytes},
        "lines": [{**asdict(line), "reached": line.reached} for line in lines],
        "rounds": msgspec.to_builtins(rounds),
        "peak_memory": [asdict(peak) for peak in peaks],
        "startup": [asdict(startup) for startup in startups],
    }


if __name__ == "__main__":
    sys.exit(main())
