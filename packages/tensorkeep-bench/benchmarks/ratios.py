"""Check the speed that the README states, as ratios to other tools in the same run: ``make bench``.

Prints one line per figure with PASS or MISS, and writes every raw sample with its environment to a JSON file. The exit
code is 1 if a figure misses its bound.
"""

import argparse
import os
import shutil
import sys
import tempfile
import timeit
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from figures import Line, median_line, note, parser_of, show, write_samples
from peak_memory import COMPRESSIONS, INTERPRETER_ALLOWANCE, LAYOUTS, PeakMemory, measure_peak
from startup import COMMANDS, Startup, measure_startup
from tensorkeep.cli.text import Table
from tensorkeep.errors import TensorkeepError, UnsupportedError
from tensorkeep.storage.buffers import DEFAULT_BUDGET
from tensorkeep.storage.parallel import default_threads
from tensorkeep.units import format_bytes, format_rate, format_seconds, parse_bytes
from tensorkeep_bench.checkpoint.files import check_capacity, remove, sync_tree
from tensorkeep_bench.checkpoint.measure import (
    COLD,
    INTO_COLD,
    INTO_WARM,
    LOADS,
    SAVE,
    STORED,
    WARM,
    measure_tool,
    outcome_of,
)
from tensorkeep_bench.checkpoint.models import build, parse, spec_of_size
from tensorkeep_bench.checkpoint.states import COPIES_IN_MEMORY, StatePair
from tensorkeep_bench.checkpoint.tools import COMMON_TOOLS, Tool
from tensorkeep_bench.checkpoint.workload import MEASURES
from tensorkeep_bench.results import Results
from tensorkeep_bench.run.runner import Measurement, run_rounds
from tensorkeep_bench.statistics import describe
from tensorkeep_bench.workload import Outcome
from yardstick import DirectWriter

SCHEMA = 1
SEED = 20_240_601
DIRECT = "O_DIRECT write"
RAW, LOSSLESS = "tensorkeep", "tensorkeep-lossless"


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
    rounds, peaks, startups = results
    code = _print(spec, nbytes, rounds, lines)
    write_samples(
        options.out,
        f"ratios.py --size {options.size} --rounds {options.rounds}",
        folder=options.dir,
        lines=lines,
        schema=SCHEMA,
        threads=default_threads(),
        state={"spec": spec, "seed": SEED, "bytes": nbytes},
        rounds={"seed": SEED, "cells": msgspec.to_builtins(rounds.cells)},
        peak_memory=[asdict(peak) for peak in peaks],
        startup=[asdict(startup) for startup in startups],
    )
    return code


Measured = tuple[Results, list[PeakMemory], list[Startup]]


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=5, folder="a folder on the disk to measure")
    parser.add_argument("--size", type=parse_bytes, default="2GB", help="about this many bytes of bfloat16 weights")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds takes 1 or more")
    return options


def _measure(spec: str, rounds: int, folder: Path) -> Measured:
    note(f"building {spec}")
    states = StatePair(build(spec, seed=SEED))
    note("start-up and peak memory, in processes of their own")
    startups = [measure_startup(command) for command in COMMANDS]
    peaks = [
        measure_peak(compression, layout, budget=DEFAULT_BUDGET, state_bytes=4 * DEFAULT_BUDGET, directory=_new(folder))
        for compression in COMPRESSIONS
        for layout in LAYOUTS
    ]
    arms = {
        **{name: partial(_measure_tool, tool, name, states, folder) for name, tool in COMMON_TOOLS.items()},
        DIRECT: _direct_write(states, folder),
    }
    total = rounds * len(arms)
    measured = run_rounds(arms, rounds, seed=SEED, progress=lambda done, arm: note(f"{done + 1} of {total}: {arm}"))
    return measured, peaks, startups


def _measure_tool(tool: Tool, name: str, states: StatePair, folder: Path) -> Outcome:
    return outcome_of(name, lambda: measure_tool(tool, name, states, folder / f"state{tool.suffix}"))


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


def _lines(rounds: Results, peaks: list[PeakMemory], startups: list[Startup]) -> Iterator[Line]:
    def faster(what: str, bound: float, mine: tuple[str, str], theirs: tuple[str, str]) -> Line:
        return median_line(what, bound, rounds.ratios(theirs, mine))

    yield faster("durable save, raw, against torch.save", 2.0, (RAW, SAVE), ("torch", SAVE))
    yield faster("durable save, raw, against safetensors", 2.2, (RAW, SAVE), ("safetensors", SAVE))
    yield faster("durable save, raw, against plain O_DIRECT writes", 0.85, (RAW, SAVE), (DIRECT, SAVE))
    stored = rounds.ratios((LOSSLESS, STORED), (RAW, STORED))
    yield median_line("lossless: stored bytes over raw", 0.67, stored, at_most=True)
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


def _print(spec: str, nbytes: int, rounds: Results, lines: list[Line]) -> int:
    print(f"\n{spec}, {format_bytes(nbytes)}, medians of {rounds.blocks} interleaved rounds, seed {SEED}\n")
    names = [*COMMON_TOOLS, DIRECT]
    labels = {measure.name: measure.label for measure in MEASURES}
    rows = [
        (
            labels[measure],
            *(
                _cell(measure, rounds.figures(name, measure) if name not in rounds.failures else {}, nbytes)
                for name in names
            ),
        )
        for measure in (SAVE, *LOADS, STORED)
    ]
    Table(("", *(f">{name}" for name in names)), rows).show()
    for reason in rounds.failures.values():
        print(f"not run: {reason}")
    print()
    code = show(lines)
    missed = sum(not line.reached for line in lines)
    print(f"\n{len(lines) - missed} of {len(lines)} reached")
    return code


def _cell(measure: str, figures: Mapping[int, float], nbytes: int) -> str:
    if not figures:
        return "-"
    median = describe(list(figures.values())).median
    if measure == STORED:
        return format_bytes(median)
    return f"{format_seconds(median)}, {format_rate(nbytes, median)}"


if __name__ == "__main__":
    sys.exit(main())
