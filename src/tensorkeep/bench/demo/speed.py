"""Part 1 of the demo: saves, and first loads in new processes, with each tool, in interleaved rounds."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tensorkeep.bench.analysis.statistics import Description, describe
from tensorkeep.bench.checkpoint.first_load import FreshProcess
from tensorkeep.bench.checkpoint.measure import FIRST, SAVE, STORED, save_durably
from tensorkeep.bench.checkpoint.probes import remove, stored_bytes, warm
from tensorkeep.bench.checkpoint.state_pair import StatePair
from tensorkeep.bench.checkpoint.tools.base import Tool
from tensorkeep.bench.checkpoint.tools.registry import COMMON_TOOLS, parse_tool
from tensorkeep.bench.experiment.workload import Outcome
from tensorkeep.bench.run.rounds import Rounds, outcome_of, run_rounds
from tensorkeep.units import format_bytes

SPEED_MEASURES = (SAVE, FIRST, STORED)
TOOLS: dict[str, Tool] = {
    **COMMON_TOOLS,
    "tensorstore": parse_tool(
        {
            "tool": "tensorstore",
            "zarr": 3,
            "chunk": "64MiB",
            "dtype": "keep",
            "in_flight": "all",
            "compressor": None,
            "checksum": "crc32c",
        }
    ),
}
"""The common tools, and TensorStore with the fastest of its settings that detect damage."""

T5X = parse_tool({"tool": "t5x"})
LONGEST_SECONDS = 40.0
"""Seconds after which no further round starts."""

_T5X_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class Figure:
    """A median in seconds or bytes, and the ratio to torch by round: its speedup, or the fraction of its bytes."""

    median: float
    against_torch: Description | None


@dataclass(frozen=True, slots=True)
class SmallRun:
    """One run of a slow tool on the first tensors of the state: their bytes, and the figures by measure."""

    state_bytes: int
    figures: dict[str, float]
    not_run: str = ""

    def scaled(self, measure: str, nbytes: int) -> float | None:
        """Return a figure for a state of ``nbytes``, as if it grew with the bytes."""
        value = self.figures.get(measure)
        return None if value is None else value * nbytes / self.state_bytes


def measure_rounds(
    states: StatePair,
    folder: Path,
    rounds: int,
    *,
    seconds: float = math.inf,
    seed: int,
    progress: Callable[[str], None],
) -> Rounds:
    """Save and load the state with each tool in every round."""
    arms = {name: partial(_save_and_load, tool, name, states, folder) for name, tool in TOOLS.items()}
    total = rounds * len(arms)

    def report(done: int, arm: str) -> None:
        progress(f"saving and loading with {arm} ({done + 1} of at most {total})")

    return run_rounds(arms, rounds, seed=seed, seconds=seconds, progress=report)


def measure_t5x(states: StatePair, folder: Path) -> SmallRun:
    """Save and load the first tensors of the state, about a tenth of it, once with T5X's settings."""
    if reason := T5X.missing():
        return SmallRun(0, {}, reason)
    part, nbytes = {}, 0
    for name, tensor in T5X.view(states.source).items():
        if nbytes < states.nbytes * _T5X_FRACTION:
            part[name] = tensor
            nbytes += tensor.nbytes
    outcome = _save_and_load(T5X, "t5x", StatePair(part), folder)
    return SmallRun(nbytes, outcome.figures, outcome.reason or "")


def figures(rounds: Rounds) -> dict[str, dict[str, Figure]]:
    """Return the figures by measure and arm, without measures that no arm has."""
    found: dict[str, dict[str, Figure]] = {}
    for measure in SPEED_MEASURES:
        for arm in TOOLS:
            values = list(rounds.figures(arm, measure).values())
            own, torch = (arm, measure), ("torch", measure)
            ratios = rounds.ratios(own, torch) if measure == STORED else rounds.ratios(torch, own)
            if values:
                figure = Figure(describe(values).median, describe(ratios) if ratios else None)
                found.setdefault(measure, {})[arm] = figure
    return found


def notes(rounds: Rounds, t5x: SmallRun) -> list[str]:
    """Return the sentences on tools that did not run, and on T5X's smaller state."""
    found = [f"{arm} was not run: {reason}." for arm, reason in rounds.not_run.items()]
    if t5x.figures:
        part = format_bytes(t5x.state_bytes)
        scaled = f"one run on {part}, scaled to the full state; its longest bars are cut off"
        found.append(f"* T5X's settings (gzip) take too long: {scaled}.")
    return found


def _save_and_load(tool: Tool, name: str, states: StatePair, folder: Path) -> Outcome:
    """Save until the checkpoint is durable, load it in a new process while it is cached, and remove it."""
    if reason := tool.missing():
        return Outcome("not-run", reason)
    path = folder / f"state{tool.suffix}"

    def measure() -> Outcome:
        _, saving = save_durably(tool, tool.view(states.source), path)
        warm(path)
        [loading] = FreshProcess(tool, path, states.of(tool)).load(name)
        return Outcome(figures={SAVE: saving, FIRST: loading, STORED: stored_bytes(path)})

    try:
        return outcome_of(name, measure)
    finally:
        remove(path)
