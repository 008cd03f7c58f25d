"""Check the speed that the README states, as ratios to other tools in the same run: ``make bench``.

Prints one line per figure with PASS or MISS, and writes every raw sample with its environment to a JSON file. The exit
code is 1 if a figure misses its bound.
"""

import errno
import mmap
import os
import queue
import re
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from figures import Line, median_line, note, parser_of, show, write_samples
from peak_memory import COMPRESSIONS, INTERPRETER_ALLOWANCE, LAYOUTS, PeakMemory, measure_peak
from tensorkeep.cli.text import Table
from tensorkeep.errors import TensorkeepError
from tensorkeep.storage.buffers import DEFAULT_BUDGET
from tensorkeep.storage.parallel import default_threads
from tensorkeep.units import format_bytes, format_rate, format_seconds
from tensorkeep_bench.checkpoint import measure as measures
from tensorkeep_bench.checkpoint.files import check_capacity, remove, sync_tree
from tensorkeep_bench.checkpoint.measure import COLD, INTO_COLD, INTO_WARM, LOADS, SAVE, STORED, WARM
from tensorkeep_bench.checkpoint.models import build, parse, spec_of_size
from tensorkeep_bench.checkpoint.states import COPIES_IN_MEMORY, StatePair
from tensorkeep_bench.checkpoint.tools import COMMON_TOOLS, Tool
from tensorkeep_bench.checkpoint.workload import MEASURES
from tensorkeep_bench.results import Results
from tensorkeep_bench.run.runner import Measurement, run_rounds
from tensorkeep_bench.statistics import describe
from tensorkeep_bench.workload import Outcome

SCHEMA = 1
SEED = 20_240_601
DIRECT = "O_DIRECT write"
RAW, LOSSLESS = "tensorkeep", "tensorkeep-lossless"
WRITE_BYTES = 16 * 1024**2
STARTS = 9
COMMANDS = {
    "tensorkeep --help": ("import sys; from tensorkeep.cli.main import main; sys.exit(main(['--help']))", 0.2),
    "import tensorkeep": ("import tensorkeep", 0.15),
}
"""Programs, and the most seconds that each may take."""


def main() -> int:
    options = parser_of(__doc__, rounds=5, folder="a folder on the disk to measure", size="2GB").parse_args()
    spec = spec_of_size(options.size)
    nbytes = parse(spec).nbytes
    options.dir.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="tensorkeep-bench-", dir=options.dir) as folder:
            check_capacity(Path(folder), disk=2 * nbytes, memory=COPIES_IN_MEMORY * nbytes + 2 * DEFAULT_BUDGET)
            rounds, peaks, startups = _measure(spec, options.rounds, Path(folder))
    except TensorkeepError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    lines = list(_lines(rounds, peaks, startups))
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
        startup=startups,
    )
    return code


def _measure(spec: str, rounds: int, folder: Path) -> tuple[Results, list[PeakMemory], list[dict[str, Any]]]:
    note(f"building {spec}")
    states = StatePair(build(spec, seed=SEED))
    note("start-up and peak memory, in processes of their own")
    startups = [_measure_startup(command) for command in COMMANDS]
    peaks = [
        measure_peak(compression, layout, DEFAULT_BUDGET, 4 * DEFAULT_BUDGET, Path(tempfile.mkdtemp(dir=folder)))
        for compression in COMPRESSIONS
        for layout in LAYOUTS
    ]
    arms: dict[str, Measurement] = {
        **{name: partial(_measure_tool, tool, name, states, folder) for name, tool in COMMON_TOOLS.items()},
        DIRECT: _direct_write(states, folder),
    }
    total = rounds * len(arms)
    measured = run_rounds(arms, rounds, seed=SEED, progress=lambda done, arm: note(f"{done + 1} of {total}: {arm}"))
    return measured, peaks, startups


def _measure_tool(tool: Tool, name: str, states: StatePair, folder: Path) -> Outcome:
    path = folder / f"state{tool.suffix}"
    return measures.outcome_of(name, lambda: measures.measure_tool(tool, name, states, path))


def _measure_startup(command: str) -> dict[str, Any]:
    """Return the seconds of some new interpreters, after one that is not counted, and whether they import torch."""
    line = [sys.executable, "-c", COMMANDS[command][0]]
    start = partial(subprocess.run, line, check=True, stdout=subprocess.DEVNULL)
    start()
    samples = [timeit.timeit(start, number=1) for _ in range(STARTS)]
    traced = subprocess.run([line[0], "-X", "importtime", *line[1:]], check=True, capture_output=True, text=True)
    imports_torch = re.search(r"\|\s+torch$", traced.stderr, re.MULTILINE) is not None
    return {"command": command, "samples": samples, "imports_torch": imports_torch}


def _direct_write(states: StatePair, folder: Path) -> Measurement:
    """Measure a plain O_DIRECT write, the upper bound of what a format can reach on a disk.

    It shares no code with the library's writer, so that both cannot have the same defect.
    """
    largest = max(states.flat.leaves.values(), key=lambda leaf: leaf.nbytes)
    sample = np.empty(largest.nbytes, np.uint8)
    largest.read(0, largest.nbytes, sample)
    # Bytes of the state, because some devices compress; one buffer for each thread.
    buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    for place in range(default_threads()):
        buffers.put(_filled(sample, place))
    size = -(-states.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    path = folder / "direct"

    def write() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o666)

        def write_part(start: int) -> None:
            buffer = buffers.get()
            try:
                with memoryview(buffer) as view:
                    done, length = 0, min(WRITE_BYTES, size - start)
                    while done < length:
                        done += os.pwrite(fd, view[done:length], start + done)
            finally:
                # Also after an error, or the other threads would wait for a buffer forever.
                buffers.put(buffer)

        try:
            os.posix_fallocate(fd, 0, size)
            with ThreadPoolExecutor(default_threads()) as threads:
                list(threads.map(write_part, range(0, size, WRITE_BYTES)))
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_tree(path)

    def measure() -> Outcome:
        os.sync()
        try:
            return Outcome(figures={SAVE: timeit.timeit(write, number=1)})
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return Outcome("not-run", "the file system refuses O_DIRECT")
        finally:
            remove(path)

    return measure


def _filled(sample: Any, place: int) -> mmap.mmap:
    buffer = mmap.mmap(-1, WRITE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The kernel pins each page of a direct write; huge pages are fewer.
    buffer.madvise(mmap.MADV_HUGEPAGE)
    start = place * WRITE_BYTES % max(1, sample.size - WRITE_BYTES)
    piece = sample[start : start + WRITE_BYTES].tobytes()
    buffer.write((piece * -(-WRITE_BYTES // len(piece)))[:WRITE_BYTES])
    return buffer


def _lines(rounds: Results, peaks: list[PeakMemory], startups: list[dict[str, Any]]) -> Iterator[Line]:
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
    for startup in startups:
        samples = [] if startup["imports_torch"] else startup["samples"]
        what, bound = f"{startup['command']}, without torch", COMMANDS[startup["command"]][1]
        yield median_line(what, bound, samples, unit="s", at_most=True)


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
