"""What a reader of the results has to know before believing them, each with what to do about it.

Every function looks for one thing and yields warnings, pairs of text and remedy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from tensorkeep.bench.analysis.phrases import counted, difference, gate_words, listed, number
from tensorkeep.bench.analysis.samples import OK, Measure, Samples
from tensorkeep.bench.analysis.statistics import blocks_needed
from tensorkeep.bench.analysis.verdicts import SMALLEST, Noise
from tensorkeep.units import format_bytes, format_seconds

Caution = tuple[str, str]
Statistics = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Arm -> measure -> statistics, as the summary has them."""

_NOISY = 0.10
_WIDE = 1.05
_HOPELESS = 10.0
_NEAR, _FAR = 0.01, 100.0
_OUTLYING = math.log(1.2)
_SLOW_START = math.log(1.1)
_TOO_SHORT = 0.05
_MORE_RUNS = 10
_MOST_SHOWN = 6

_FAILED = {
    "failed": "failed",
    "timeout": "took longer than a cell may",
    "memory": "needed more memory than a cell may have",
    "disk": "the disk was full",
    "not-run": "not run",
}
_REMEDIES = {
    "gate": "do not use it for this state; the reason of its cells says what differed",
    "failed": "run the command of its cell by itself to see the whole error",
    "timeout": "allow a cell more seconds, or take a smaller model",
    "memory": "allow a cell more memory, or take a smaller model",
    "disk": "free some space, or measure on another disk",
    "not-run": "give what is missing, or leave these arms out",
}


def cautions(samples: Samples, statistics: Statistics, noise: Mapping[str, Noise | None]) -> list[dict[str, str]]:
    """Return all warnings, the gravest first, as the results file has them."""
    found = [
        *_unreached(samples),
        *_failures(samples),
        *_missing_measures(samples),
        *_no_placebo(samples),
        *_wide_placebo(samples, statistics, noise),
        *_noisy_runs(samples, statistics),
        *_odd_blocks(samples),
        *_too_few(samples, statistics, noise),
        *_smaller_subjects(samples),
        *_too_short(samples, statistics),
    ]
    return [{"text": text, "remedy": remedy} for text, remedy in found]


def _unreached(samples: Samples) -> Iterator[Caution]:
    waiting = sum(cell.status == "planned" for cell in samples.cells)
    if waiting:
        yield f"{waiting} of {counted(len(samples.cells), 'cell')} were not reached", "go on with --resume"


def _failures(samples: Samples) -> Iterator[Caution]:
    workload = samples.experiment.get("workload")
    absent = _absent(samples)
    for names, reason in absent.items():
        because = f": {reason}" if reason else ""
        yield f"not run: {listed(names)}{because}", _REMEDIES["not-run"]
    nowhere = {name for names in absent for name in names}
    for arm in samples.arms:
        if arm.name in nowhere:
            continue
        by_status: dict[str, list[str | None]] = defaultdict(list)
        for cell in samples.failures(arm.name):
            by_status[cell.status].append(cell.reason)
        for status, reasons in by_status.items():
            blocks = counted(len(samples.cells_of(arm.name)), "block")
            because = f": {reasons[0]}" if reasons[0] else ""
            words = gate_words(workload) if status == "gate" else _FAILED.get(status, status)
            text = f"{arm.name}: {words} in {len(reasons)} of {blocks}{because}"
            yield text, _REMEDIES.get(status, _REMEDIES["failed"])


def _absent(samples: Samples) -> dict[tuple[str, ...], str | None]:
    """Return the arms that were run in no block, those with one reason together."""
    by_reason: dict[str | None, list[str]] = defaultdict(list)
    for arm in samples.arms:
        cells = samples.cells_of(arm.name)
        if cells and all(cell.status == "not-run" for cell in cells):
            # Later blocks say only that it was not tried again.
            by_reason[min(cells, key=lambda cell: cell.block).reason].append(arm.name)
    return {tuple(names): reason for reason, names in by_reason.items()}


def _missing_measures(samples: Samples) -> Iterator[Caution]:
    ran = [arm.name for arm in samples.arms if any(cell.status == OK for cell in samples.cells_of(arm.name))]
    for measure in samples.measures:
        without = [name for name in ran if not samples.raw(name, measure)]
        if not without or not measure.primary:
            continue
        whose = "no arm" if len(without) == len(ran) else listed(without)
        if measure.name == "load_cold":
            yield (
                f"{measure.label}: not measured for {whose}: the files could not be put out of the page cache"
                if whose != "no arm"
                else f"{measure.label}: measured for no arm: this file system keeps its files in memory",
                "measure in a folder on a disk; a memory file system (tmpfs, overlay in memory) has no cold loads",
            )
        else:
            text = "measured for no arm" if whose == "no arm" else f"not measured for {whose}"
            yield f"{measure.label}: {text}", "the commands of the cells say more when they are run by themselves"


def _no_placebo(samples: Samples) -> Iterator[Caution]:
    if samples.baseline is not None and not any(arm.role == "placebo" for arm in samples.arms):
        yield (
            f"{samples.baseline} was measured under one name only: how far two runs of one thing differ is not known",
            "let the experiment have its placebo",
        )


def _wide_placebo(samples: Samples, statistics: Statistics, noise: Mapping[str, Noise | None]) -> Iterator[Caution]:
    for measure in samples.measures:
        floor = noise.get(measure.name)
        if not measure.primary or not floor or floor.floor <= _WIDE:
            continue
        settled = any(statistics[arm.name][measure.name]["verdict"] in ("helps", "hurts") for arm in samples.arms)
        after = f"{measure.label}: after {counted(floor.n, 'block')}"
        if floor.floor > _HOPELESS and not settled:
            text = f"{after} nothing can be told: the baseline against itself spans {_span(floor)} (95%)"
        else:
            text = (
                f"{after}, this machine is too noisy for differences below {difference(floor.floor)}, "
                "which is what two runs of the same thing differ by"
            )
        yield text, f"close what else runs, or --runs {_more_runs(samples)}"


def _span(noise: Noise) -> str:
    """Return the placebo's interval; the ends of a wide one mean little beyond a hundredth and a hundred times."""
    wide = noise.high > noise.low * _FAR
    low = f"<{_NEAR:g}" if wide and noise.low < _NEAR else number(noise.low)
    high = f">{_FAR:g}" if wide and noise.high > _FAR else number(noise.high)
    return f"{low} to {high}"


def _noisy_runs(samples: Samples, statistics: Statistics) -> Iterator[Caution]:
    for measure in samples.measures:
        noisy = []
        for arm in samples.arms:
            found = statistics[arm.name][measure.name]
            if found["std"] and found["mean"] and found["std"] / found["mean"] > _NOISY:
                noisy.append((found["std"] / found["mean"], arm.name))
        if noisy and measure.primary:
            named = [f"{name} ({spread:.0%})" for spread, name in sorted(noisy, reverse=True)]
            yield (
                f"{measure.label}: varies by more than 10% from run to run: {listed(named, _MOST_SHOWN)}",
                f"close what else runs, or --runs {_more_runs(samples)}",
            )


def _odd_blocks(samples: Samples) -> Iterator[Caution]:
    """Look for blocks in which most arms were slower than in the others."""
    for measure in samples.measures:
        if not measure.primary or measure.unit != "s":
            continue
        slowness = _slowness(samples, measure)
        for block, value in slowness.items():
            others = [other for at, other in slowness.items() if at != block]
            if len(others) < 2:
                continue
            least = _SLOW_START if block == min(slowness) else _OUTLYING
            spread = max(others) - min(others)
            if value - median(others) > max(least, 2 * spread):
                slower = number(math.exp(value - median(others)))
                yield _odd_block(measure, block, slower, first=block == min(slowness), runs=_more_runs(samples))


def _odd_block(measure: Measure, block: int, slower: str, *, first: bool, runs: int) -> Caution:
    if first:
        return (
            f"{measure.label}: the first block was {slower} times slower than the rest",
            "let the machine come to rest before a run (what was started or copied just now), and run again",
        )
    return (
        f"{measure.label}: block {block + 1} was {slower} times slower than the rest, for most arms",
        f"close what else runs, and run again, or --runs {runs} so that one block counts for less",
    )


def _slowness(samples: Samples, measure: Measure) -> dict[int, float]:
    """Return, by block, the log of how much slower the middle arm was than in its own middle block."""
    found: dict[int, list[float]] = defaultdict(list)
    for arm in samples.arms:
        logs = samples.logs(arm.name, measure)
        if len(logs) > 1:
            middle = median(logs.values())
            for block, log in logs.items():
                found[block].append(middle - log)
    return {block: median(values) for block, values in sorted(found.items())}


def _too_few(samples: Samples, statistics: Statistics, noise: Mapping[str, Noise | None]) -> Iterator[Caution]:
    for measure in samples.measures:
        if not measure.primary:
            continue
        words = {arm.name: statistics[arm.name][measure.name]["verdict"] for arm in samples.arms}
        single = [name for name, word in words.items() if word == "too few runs"]
        if single:
            yield f"{measure.label}: one block gives no verdict on {listed(single, _MOST_SHOWN)}", "--runs 5"
        tests = sum(word in ("helps", "hurts", "within noise") for word in words.values())
        unsure = [name for name, word in words.items() if word == "within noise"]
        yield from _undecided(samples, measure, unsure, noise.get(measure.name), tests)


def _undecided(
    samples: Samples, measure: Measure, unsure: Iterable[str], noise: Noise | None, tests: int
) -> Iterator[Caution]:
    """Warn of differences that look large enough to matter, but that so few blocks cannot show."""
    floor = max(_WIDE, noise.floor if noise else SMALLEST)
    wanted = []
    for name in unsure:
        found = samples.compare(name, samples.baseline or "", measure)
        if found is None or not found.std or max(found.gain, 1 / found.gain) <= floor:
            continue
        needed = blocks_needed(found.std, found.gain, tests)
        if needed is not None and needed > found.n:
            wanted.append((needed, f"{name} ({number(found.gain)}x)"))
    if wanted:
        yield (
            f"{measure.label}: {counted(samples.blocks, 'block')} cannot tell whether these differences are real: "
            f"{listed([text for _, text in sorted(wanted)], _MOST_SHOWN)}",
            f"--runs {min(wanted)[0]} would be enough to show the first"
            + (f", --runs {max(wanted)[0]} all of them" if max(wanted)[0] > min(wanted)[0] else ""),
        )


def _smaller_subjects(samples: Samples) -> Iterator[Caution]:
    amounts = {arm.name: _amount(samples, arm.name) for arm in samples.arms}
    whole = amounts.get(samples.baseline or "")
    smaller: dict[float, list[str]] = defaultdict(list)
    for name, amount in amounts.items():
        if amount is not None and whole is not None and amount != whole:
            smaller[amount].append(name)
    for amount, names in smaller.items():
        yield (
            f"{listed(names, 12)} worked on {format_bytes(amount)}, {samples.baseline} on {format_bytes(whole or 0)}: "
            "they are compared per byte, as if their time grew with the bytes",
            "measure all on the same model, without a smaller one for slow arms",
        )


def _amount(samples: Samples, arm: str) -> float | None:
    amounts = [cell.amount for cell in samples.cells_of(arm) if cell.status == OK and cell.amount]
    return median(amounts) if amounts else None


def _too_short(samples: Samples, statistics: Statistics) -> Iterator[Caution]:
    for measure in samples.measures:
        if measure.unit != "s" or not measure.primary:
            continue
        middles = {arm.name: statistics[arm.name][measure.name]["median"] for arm in samples.arms}
        short = [name for name, middle in middles.items() if middle is not None and middle < _TOO_SHORT]
        if short:
            yield (
                f"{measure.label}: takes less than {format_seconds(_TOO_SHORT)} with "
                f"{listed(short, _MOST_SHOWN)}: so short a time is made of opening files, of caches and of the "
                "disk's own memory, and says little about large checkpoints",
                "take a larger --model",
            )


def _more_runs(samples: Samples) -> int:
    return max(_MORE_RUNS, 2 * samples.blocks)
