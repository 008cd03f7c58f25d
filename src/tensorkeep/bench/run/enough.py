"""When an experiment has measured enough: an arm whose gain is known precisely is not measured again.

The number of blocks follows from what was seen (a sequential interval of fixed width; Chow and Robbins, 1965). Stopping
depends on the width of the interval only, never on where it lies, so it favours neither outcome.
"""

from tensorkeep.bench.analysis.samples import Samples
from tensorkeep.bench.results import Results, Status

FINAL: tuple[Status, ...] = ("gate", "failed", "timeout", "memory", "not-run")
"""Statuses that a second attempt would have again."""

_FEWEST = 3
"""Blocks before an arm counts as precise: two may agree by chance."""


def arms_left_out(results: Results, block: int) -> set[str]:
    """Return the arms that need no cell in a block, which has not begun.

    That is every arm if the block would exceed the budget, or no arm but baseline and control needs it.
    """
    every = {arm.name for arm in results.arms}
    if _exceeds_budget(results, block):
        return every
    if results.experiment.precision is None:
        return set()
    samples = Samples(results)
    enough = {arm.name for arm in results.arms if arm.role != "baseline" and _is_precise(samples, arm.name)}
    failed = {cell.arm for cell in results.cells if cell.status in FINAL}
    wanted = {arm.name for arm in results.arms if arm.role == "arm"} - enough - failed
    return enough if wanted else every


def _is_precise(samples: Samples, arm: str) -> bool:
    precision = samples.experiment.precision
    found = samples.compare(arm, samples.baseline, samples.primary[0])
    if precision is None or found is None or found.low is None or found.high is None or found.n < _FEWEST:
        return False
    return found.high <= precision * found.low


def _exceeds_budget(results: Results, block: int) -> bool:
    """Return whether a block would end after the budget, if its cells take as long as those of the one before."""
    budget = results.experiment.budget
    if budget is None or block == 0:
        return False
    planned = {cell.arm for cell in results.cells if cell.block == block}
    before = [cell for cell in results.cells if cell.block == block - 1 and cell.arm in planned]
    spent = sum(cell.seconds or 0.0 for cell in results.cells)
    return spent + sum(cell.seconds or 0.0 for cell in before) > budget
