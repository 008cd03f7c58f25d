"""Interleaved rounds within one process: every arm once in each round, in random order.

Used where a fresh process for each measurement would take too long. Machines drift within minutes by more than the arms
differ, so two arms are compared round by round.
"""

import math
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from tensorkeep.bench.checkpoint.measure import measure_tool
from tensorkeep.bench.checkpoint.state_pair import StatePair
from tensorkeep.bench.checkpoint.tools.base import Tool
from tensorkeep.bench.experiment.workload import Outcome
from tensorkeep.bench.results import Cell
from tensorkeep.errors import TensorkeepError, first_line

Measurement = Callable[[], Outcome]
"""Measures one arm once. An arm whose outcome is not ``"ok"`` is left out from then on."""


class Rounds(msgspec.Struct):
    """The cells of some rounds, in the order in which they ran; `Cell.block` is the round, from 0."""

    seed: int
    cells: list[Cell] = []

    @property
    def count(self) -> int:
        """The number of rounds."""
        return len({cell.block for cell in self.cells})

    @property
    def not_run(self) -> dict[str, str]:
        """The arms that could not be measured, and why."""
        return {cell.arm: cell.reason or "" for cell in self.cells if cell.status != "ok"}

    def figures(self, arm: str, measure: str) -> dict[int, float]:
        """Return the figures of an arm in a measure, by round; none of an arm that failed in any round."""
        if arm in self.not_run:
            return {}
        found = {cell.block: cell.figures.get(measure) for cell in self.cells if cell.arm == arm}
        return {block: value for block, value in found.items() if value is not None}

    def ratios(self, above: tuple[str, str], below: tuple[str, str]) -> list[float]:
        """Return the ratio of two figures in each round that has both; each is given by arm and measure."""
        numerators, denominators = self.figures(*above), self.figures(*below)
        return [numerators[block] / denominators[block] for block in sorted(numerators.keys() & denominators.keys())]


def run_rounds(
    arms: Mapping[str, Measurement],
    rounds: int,
    *,
    seed: int = 0,
    seconds: float = math.inf,
    progress: Callable[[int, str], None] | None = None,
) -> Rounds:
    """Measure every arm once per round, each round in another random order.

    The first round always runs. A later one starts only if it would end within ``seconds``, were it as long as the one
    before. ``progress`` is called before each measurement with the number of those done, and the arm.
    """
    draw = random.Random(seed)
    result = Rounds(seed)
    begin = last = time.perf_counter()
    for block in range(rounds):
        now = time.perf_counter()
        if block and now + (now - last) > begin + seconds:
            break
        last = now
        for place, arm in enumerate(draw.sample(list(arms), len(arms))):
            order = block * len(arms) + place
            if progress is not None:
                progress(order, arm)
            if arm not in result.not_run:
                outcome = arms[arm]()
                result.cells.append(
                    Cell(arm, block, outcome.status, order, outcome.reason, figures=dict(outcome.figures))
                )
    return result


def tool_measurements(tools: Mapping[str, Tool], states: StatePair, folder: Path) -> dict[str, Measurement]:
    """Return a function per tool, by name, that measures it on a state in ``folder``."""
    return {name: partial(_measure, tool, name, states, folder) for name, tool in tools.items()}


def _measure(tool: Tool, name: str, states: StatePair, folder: Path) -> Outcome:
    return outcome_of(name, lambda: measure_tool(tool, name, states, folder / f"state{tool.suffix}"))


def outcome_of(arm: str, measure: Measurement) -> Outcome:
    """Measure an arm; it is not run if its tool cannot store the state, which each tool reports in its own way."""
    try:
        return measure()
    except (TensorkeepError, OSError, MemoryError):
        raise
    except Exception as error:
        return Outcome("not-run", f"{arm} cannot store this state: {first_line(error)}")
