"""Warnings about the results, each with a remedy.

Every function looks for one problem and yields a `Caution` for each time it finds it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from tensorkeep.bench.analysis.samples import Samples
from tensorkeep.bench.analysis.statistics import blocks_needed
from tensorkeep.bench.analysis.verdicts import threshold, too_small
from tensorkeep.bench.analysis.wording import difference, gain, gate_words, interval, listed, number
from tensorkeep.bench.results import Caution, Measure, Results
from tensorkeep.units import counted, format_bytes, format_seconds

_NOISY = 0.10
_WIDE = 1.05
_HOPELESS = 10.0
_OUTLYING = math.log(1.2)
_SLOW_START = math.log(1.1)
_TOO_SHORT = 0.05
_MORE_RUNS = 10

_FAILED = {
    "failed": "failed",
    "timeout": "exceeded the time limit of a cell",
    "memory": "exceeded the memory limit of a cell",
    "disk": "the disk was full",
    "not-run": "not run",
}
_REMEDIES = {
    "gate": "do not use it for this state; the field `reason` of its cells names the difference",
    "failed": "run the command of its cell by itself to see the full error",
    "timeout": "raise --time-limit, or use a smaller model",
    "memory": "raise --memory-limit, or use a smaller model",
    "disk": "free some space, or measure on another disk",
    "not-run": "install or provide what is missing, or leave these arms out",
}


def cautions(samples: Samples) -> Iterator[Caution]:
    """Yield all warnings, the gravest first; of a state that is too small to time, only what failed."""
    searches: tuple[Callable[[Samples], Iterator[Caution]], ...] = (
        *(_unreached, _failures, _missing_measures, _no_control, _wide_control),
        *(_noisy_runs, _odd_blocks, _too_few, _smaller_subjects, _too_short),
    )
    if too_small(samples.results):
        searches = (_unreached, _failures)
    for search in searches:
        yield from search(samples)


def too_noisy(results: Results, measure: Measure) -> str:
    """Return a sentence if a measure is too noisy for any verdict, else nothing."""
    noise = results.summary.noise.get(measure.name)
    settled = any(results.statistics(arm.name, measure.name).verdict in ("helps", "hurts") for arm in results.arms)
    if noise is None or noise.floor <= _HOPELESS or settled:
        return ""
    spans = interval(noise.low, noise.high)
    return f"after {counted(noise.n, 'block')} no verdict is possible: the baseline against itself spans {spans} (95%)"


def _unreached(samples: Samples) -> Iterator[Caution]:
    cells = samples.results.cells
    waiting = sum(cell.status == "planned" for cell in cells)
    if waiting:
        yield Caution(f"{waiting} of {counted(len(cells), 'cell')} were not reached", "continue with --resume")


def _failures(samples: Samples) -> Iterator[Caution]:
    absent: dict[str | None, list[str]] = defaultdict(list)
    present = []
    for arm in samples.arms:
        cells = samples.cells_of(arm.name)
        if cells and all(cell.status == "not-run" for cell in cells):
            # Later blocks record only that the cell was not tried again.
            absent[cells[0].reason].append(arm.name)
        else:
            present.append(arm)
    for reason, names in absent.items():
        because = f": {reason}" if reason else ""
        yield Caution(f"not run: {listed(names)}{because}", _REMEDIES["not-run"])
    for arm in present:
        by_status: dict[str, list[str | None]] = defaultdict(list)
        for cell in samples.failures(arm.name):
            by_status[cell.status].append(cell.reason)
        for status, reasons in by_status.items():
            blocks = counted(len(samples.cells_of(arm.name)), "block")
            because = f": {reasons[0]}" if reasons[0] else ""
            words = gate_words(samples.experiment.workload) if status == "gate" else _FAILED[status]
            yield Caution(f"{arm.name}: {words} in {len(reasons)} of {blocks}{because}", _REMEDIES[status])


def _missing_measures(samples: Samples) -> Iterator[Caution]:
    ran = [arm.name for arm in samples.arms if samples.results.ran(arm.name)]
    for measure in samples.primary:
        without = [name for name in ran if not samples.raw(name, measure)]
        if not without:
            continue
        everywhere = len(without) == len(ran)
        text = f"{measure.label}: not measured for {'any arm' if everywhere else listed(without)}"
        if measure.name != "load_cold":
            yield Caution(text, "run the commands of the cells by themselves to see why")
            continue
        why = "this file system keeps its files in memory" if everywhere else "the page cache could not be emptied"
        remedy = "measure in a folder on a disk; a memory file system (tmpfs, overlay in memory) has no cold loads"
        yield Caution(f"{text}: {why}", remedy)


def _no_control(samples: Samples) -> Iterator[Caution]:
    if samples.baseline is not None and not any(arm.role == "control" for arm in samples.arms):
        text = f"without an A/A control of {samples.baseline}, the noise between equal runs is unknown"
        yield Caution(text, 'set "control": true in the experiment')


def _wide_control(samples: Samples) -> Iterator[Caution]:
    for measure in samples.primary:
        floor = samples.results.summary.noise.get(measure.name)
        if not floor or floor.floor <= _WIDE:
            continue
        text = too_noisy(samples.results, measure) or (
            f"after {counted(floor.n, 'block')}, differences below {difference(floor.floor)} are noise: "
            "two runs of the same arm differ by as much"
        )
        yield Caution(f"{measure.label}: {text}", f"close other programs, or --runs {_more_runs(samples)}")


def _noisy_runs(samples: Samples) -> Iterator[Caution]:
    for measure in samples.primary:
        noisy = []
        for arm in samples.arms:
            found = samples.statistics(arm, measure)
            if found.std and found.mean and found.std / found.mean > _NOISY:
                noisy.append((found.std / found.mean, arm.name))
        if noisy:
            named = [f"{name} ({spread:.0%})" for spread, name in sorted(noisy, reverse=True)]
            text = f"{measure.label}: varies by more than 10% from run to run: {listed(named)}"
            yield Caution(text, f"close other programs, or --runs {_more_runs(samples)}")


def _odd_blocks(samples: Samples) -> Iterator[Caution]:
    """Look for blocks in which most arms were slower than in the others."""
    for measure in samples.primary:
        slowness = _slowness(samples, measure) if measure.unit == "s" else {}
        for block, value in slowness.items():
            others = [other for at, other in slowness.items() if at != block]
            first = block == min(slowness)
            least = _SLOW_START if first else _OUTLYING
            if len(others) < 2 or value - median(others) <= max(least, 2 * (max(others) - min(others))):
                continue
            slower = f"{number(math.exp(value - median(others)))} times slower than the rest"
            if first:
                yield Caution(
                    f"{measure.label}: the first block was {slower}",
                    "wait until programs that were just started, and copies, have finished, and run again",
                )
            else:
                yield Caution(
                    f"{measure.label}: block {block + 1} was {slower}, for most arms",
                    f"close other programs and run again, or --runs {_more_runs(samples)}: one block then counts less",
                )


def _slowness(samples: Samples, measure: Measure) -> dict[int, float]:
    """Return, by block, the log of how much slower the median arm was than in its own median block."""
    found: dict[int, list[float]] = defaultdict(list)
    for arm in samples.arms:
        logs = samples.logs(arm.name, measure)
        if len(logs) > 1:
            middle = median(logs.values())
            for block, log in logs.items():
                found[block].append(middle - log)
    return {block: median(values) for block, values in sorted(found.items())}


def _too_few(samples: Samples) -> Iterator[Caution]:
    for measure in samples.primary:
        verdicts = {arm.name: samples.statistics(arm, measure).verdict for arm in samples.arms}
        single = [name for name, verdict in verdicts.items() if verdict == "too few runs"]
        if single:
            yield Caution(f"{measure.label}: one block gives no verdict on {listed(single)}", "--runs 5")
        tests = sum(verdict in ("helps", "hurts", "within noise") for verdict in verdicts.values())
        unsure = [name for name, verdict in verdicts.items() if verdict == "within noise"]
        yield from _undecided(samples, measure, unsure, tests)


def _undecided(samples: Samples, measure: Measure, unsure: Sequence[str], tests: int) -> Iterator[Caution]:
    """Warn of differences that are large enough to matter, but that so few blocks cannot show."""
    noise = samples.results.summary.noise.get(measure.name)
    floor = max(_WIDE, threshold(measure), noise.floor if noise else 1.0)
    wanted = []
    for name in unsure:
        found = samples.compare(name, samples.baseline or "", measure)
        if found is None or not found.std or max(found.gain, 1 / found.gain) <= floor:
            continue
        needed = blocks_needed(found.std, found.gain, tests, found.lent)
        if needed is not None and needed > found.n:
            wanted.append((needed, f"{name} ({gain(found.gain)})"))
    if wanted:
        least, most = min(wanted)[0], max(wanted)[0]
        names = listed([text for _, text in sorted(wanted)])
        blocks = counted(samples.results.blocks, "block")
        text = f"{measure.label}: {blocks} cannot show whether these differences are real: {names}"
        both = f", --runs {most} to show all of them" if most > least else ""
        yield Caution(text, f"--runs {least} would be enough to show the first{both}")


def _smaller_subjects(samples: Samples) -> Iterator[Caution]:
    amounts = {arm.name: _amount(samples, arm.name) for arm in samples.arms}
    full = amounts.get(samples.baseline or "")
    smaller: dict[float, list[str]] = defaultdict(list)
    for name, amount in amounts.items():
        if amount is not None and full is not None and amount != full:
            smaller[amount].append(name)
    for amount, names in smaller.items():
        yield Caution(
            f"{listed(names, 12)} worked on {format_bytes(amount)}, {samples.baseline} on {format_bytes(full or 0)}: "
            "they are compared per byte, as if their time grew with the bytes",
            "measure all arms on the same model, without a smaller one for slow arms",
        )


def _amount(samples: Samples, arm: str) -> float | None:
    amounts = [cell.amount for cell in samples.cells_of(arm) if cell.status == "ok" and cell.amount]
    return median(amounts) if amounts else None


def _too_short(samples: Samples) -> Iterator[Caution]:
    for measure in samples.primary:
        medians = {arm.name: samples.statistics(arm, measure).median for arm in samples.arms}
        short = [name for name, middle in medians.items() if middle is not None and middle < _TOO_SHORT]
        if short and measure.unit == "s":
            yield Caution(
                f"{measure.label}: takes less than {format_seconds(_TOO_SHORT)} with {listed(short)}: opening files, "
                "caches and the disk's own memory dominate so short a time; large checkpoints may behave differently",
                "use a larger --model",
            )


def _more_runs(samples: Samples) -> int:
    return max(_MORE_RUNS, 2 * samples.results.blocks)
