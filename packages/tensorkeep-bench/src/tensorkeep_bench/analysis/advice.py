"""What a reader should do with the results: recommendations for this machine, and warnings with remedies."""

import math
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import get_args

from tensorkeep.ext import counted, format_bytes, format_seconds, number
from tensorkeep_bench.analysis.samples import Samples, more_blocks, threshold, too_small, unreached
from tensorkeep_bench.results import Advice, Arm, Caution, Judged, Measure, Recommendation, Results
from tensorkeep_bench.statistics import blocks_needed
from tensorkeep_bench.wording import difference, gain, gate_words, interval, interval_95, listed, verdict_words

_SYNCING = ("sync", "fsync", "durable")
_LOADS = ("load_cold", "load_warm")
_TRAINING_PURPOSES = (
    ("speed", "tokens_per_second"),
    ("memory", "peak_memory"),
    ("loss", "loss"),
    ("loss in equal time", "loss_in_time"),
)
_TIMES = ("s", "tokens/s")
_TEN_TIMES = 10.0
# How many times worse than the baseline an arm may be in one measure and still be recommended all round.
_TOLERATED = 1.10


def recommendations(samples: Samples) -> Iterator[Recommendation]:
    """Yield a recommendation per purpose, and one all round; ``arm`` is None where nothing is recommended."""
    # Opening files dominates the time of a small state, so no tool is recommended on it.
    if samples.baseline is None or too_small(samples.results):
        return
    measures = _judged(samples)
    # A restarted job waits for a cold load, so it comes first.
    load = next((name for name in _LOADS if name in measures), "")
    first = ("first load", "load_first")
    purposes = (("saving", "save"), first, ("loading", load), ("size", "stored"), *_TRAINING_PURPOSES)
    judged = {purpose: measures[name] for purpose, name in purposes if name in measures}
    for purpose, measure in judged.items():
        yield _single(samples, purpose, measure)
    if len(judged) > 1:
        yield _all_round(samples, judged)


def _judged(samples: Samples) -> dict[str, Measure]:
    return {
        measure.name: measure
        for measure in samples.measures
        if any(samples.statistics(arm, measure).verdict in get_args(Judged) for arm in samples.arms)
    }


def try_first(samples: Samples) -> Iterator[Advice]:
    """Yield the arms that gain more than they cost, the best first."""
    if samples.baseline is None or too_small(samples.results):
        return
    measures = list(_judged(samples).values())
    found: list[tuple[float, Advice]] = []
    for arm in candidates(samples):
        verdicts = {one.name: samples.statistics(arm, one).verdict for one in measures}
        better = [one for one in measures if verdicts[one.name] == "helps"]
        worse = [one for one in measures if verdicts[one.name] == "hurts"]
        # A gain that is not shown has no weight, and a worse loss is not weighed against speed or memory.
        score = _score(samples, arm, [*better, *worse])
        # Of an arm with one block, only the size is known.
        known = all(samples.statistics(arm, one).verdict != "too few runs" for one in samples.primary)
        if better and known and score > 0 and not any(one.unit == "nats" for one in worse):
            gains = listed([f"{one.label} {number(_gain(samples, arm, one))}x" for one in better])
            text = f"{_called(arm)}: {gains}{_worse(samples, arm)}"
            found.append((score, Advice(arm.name, text, arm.use)))
    yield from (advice for _, advice in sorted(found, key=lambda pair: -pair[0]))


def avoid(samples: Samples) -> Iterator[Advice]:
    """Yield the arms that are far slower than another one, or worse in something and better in nothing."""
    if samples.baseline is None or too_small(samples.results):
        return
    for arm in samples.arms:
        verdicts = [(measure, samples.statistics(arm, measure).verdict) for measure in samples.primary]
        hurts = [
            f"{one.label} ({number(_gain(samples, arm, one))}x)" for one, verdict in verdicts if verdict == "hurts"
        ]
        if arm.role == "control" or not _judged(samples):
            continue
        if slow := slowness(samples, arm):
            yield Advice(arm.name, f"{_called(arm)}: {slow}")
        elif hurts and not {"helps", "too few runs"} & {verdict for _, verdict in verdicts}:
            yield Advice(arm.name, f"{_called(arm)}: worse in {listed(hurts)}, and better in nothing")


def _called(arm: Arm) -> str:
    # A letter does not say what a combination is.
    members = next((place.changes for place in arm.places if place.kind == "combination"), ())
    joined = " + ".join(members)
    return f"{arm.name} ({joined})" if members and joined != arm.name else arm.name


def candidates(samples: Samples) -> list[Arm]:
    # Not a control, durable, correct in every block, and not far too slow.
    return [arm for arm in _sound(samples) if not slowness(samples, arm)]


def slowness(samples: Samples, arm: Arm) -> str:
    """Return a sentence if an arm is ten times slower than another one in a primary measure, else ""."""
    for measure in samples.primary:
        compared = arm.role == "baseline" or samples.statistics(arm, measure).gain is not None
        if measure.unit not in _TIMES or not compared:
            continue
        # An arm that does not sync, or is wrong, is not a standard for others.
        others = [other for other in samples.arms if other.role == "baseline" or other in _sound(samples)]
        best = max(others, key=lambda other: _gain(samples, other, measure), default=arm)
        factor = _gain(samples, best, measure) / _gain(samples, arm, measure)
        high = 1.0 if arm.role == "baseline" else samples.statistics(arm, measure).gain_high
        low = samples.statistics(best, measure).gain_low
        # Where the intervals overlap, or one block has none, the factor may be chance.
        if factor >= _TEN_TIMES and high is not None and high < (low or 1.0):
            return f"{number(factor)} times slower than {best.name} ({measure.label})"
    return ""


def _sound(samples: Samples) -> list[Arm]:
    return [
        arm
        for arm in samples.arms
        if arm.role == "arm"
        # A save that does not sync is fast because its files are not on the disk yet.
        and all(arm.settings.get(key) is not False for key in _SYNCING)
        and not samples.failed_gate(arm.name)
    ]


def _gain(samples: Samples, arm: Arm, measure: Measure) -> float:
    # 1 for the baseline, and for an arm that was not compared.
    return samples.statistics(arm, measure).gain or 1.0


def _single(samples: Samples, purpose: str, measure: Measure) -> Recommendation:
    # Only a verdict counts: the largest gain alone may be noise.
    helping = [arm for arm in _sound(samples) if samples.statistics(arm, measure).verdict == "helps"]
    ranked = sorted(helping, key=lambda arm: -_gain(samples, arm, measure))
    excluded = {arm.name: reason for arm in ranked if (reason := slowness(samples, arm))}
    ranked = [arm for arm in ranked if arm.name not in excluded]
    what = f"on this machine, {_what(purpose, measure)}"
    left_out = "".join(f"; {name} is left out: {reason}" for name, reason in excluded.items())
    if not ranked:
        return Recommendation(purpose, f"{what}: {_none_better(samples)}{left_out}")
    best = ranked[0]
    text = f"{what}: {_called(best)}, {_gain_text(samples, best, measure)}"
    if purpose != "size":
        stored = samples.compare(best.name, samples.baseline, samples.results.measure("stored"))
        text += f", {number(1 / stored.gain)} of the bytes" if stored else ""
    text += _peers(samples, ranked, measure) + _worse(samples, best) + _failures(samples, best) + left_out
    return Recommendation(purpose, text, best.name, best.settings, best.use)


def _none_better(samples: Samples) -> str:
    # What an interrupted run has not measured yet may be better.
    waiting = unreached(samples.results)
    return f"not decided, {waiting}" if waiting else f"no arm is shown to be better than {samples.baseline}"


def _gain_text(samples: Samples, arm: Arm, measure: Measure) -> str:
    found = samples.statistics(arm, measure)
    gain = found.gain or 1.0
    if measure.unit == "B" and found.gain_low and found.gain_high:
        # A fraction of the bytes reads better than how many times fewer they are.
        low, high = 1 / found.gain_high, 1 / found.gain_low
        spread = "" if high / low < 1.0005 else f" ({interval_95(low, high)})"
        return f"{number(1 / gain)} of the bytes of {samples.baseline}{spread}"
    return f"{number(gain)}x {samples.baseline} ({interval_95(found.gain_low, found.gain_high)})"


def _peers(samples: Samples, ranked: Sequence[Arm], measure: Measure) -> str:
    level, best = [], samples.statistics(ranked[0], measure)
    for other in ranked[1:]:
        against, found = samples.compare(ranked[0].name, other.name, measure), samples.statistics(other, measure)
        # The interval against the best reaches 1, and the two intervals against the baseline, which the report shows,
        # overlap: where they do not, a reader sees which one is better.
        overlapping = (found.gain_high or 0.0) >= (best.gain_low or 0.0)
        if against is not None and (against.low is None or against.low <= 1) and overlapping:
            level.append(other.name)
    after = counted(samples.results.blocks, "block")
    verb = "does" if samples.results.blocks == 1 else "do"
    return f"; {after} {verb} not decide whether it is better than {listed(level)}" if level else ""


def _worse(samples: Samples, arm: Arm) -> str:
    worse = [
        f"{measure.label} ({number(_gain(samples, arm, measure))}x)"
        for measure in samples.measures
        if samples.statistics(arm, measure).verdict == "hurts"
    ]
    return f"; but worse in {listed(worse)}" if worse else ""


def _failures(samples: Samples, arm: Arm) -> str:
    failed, blocks = len(samples.failures(arm.name)), len(samples.cells_of(arm.name))
    return f"; but it failed in {failed} of {counted(blocks, 'block')}" if failed else ""


def _what(purpose: str, measure: Measure) -> str:
    return f"{purpose} ({measure.label})" if purpose == "loading" else purpose


def _all_round(samples: Samples, judged: Mapping[str, Measure]) -> Recommendation:
    measures = list(judged.values())
    # Arms that help somewhere and are nowhere much worse: a few percent of bytes do not outweigh many times the speed.
    sound = [arm for arm in candidates(samples) if _is_better_all_round(samples, arm, measures)]
    if not sound:
        helping = any(samples.statistics(arm, one).verdict == "helps" for arm in _sound(samples) for one in measures)
        text = _none_better(samples)
        if helping and not unreached(samples.results):
            text = f"no arm is shown to improve one of {listed(list(judged))} without making another worse"
        return Recommendation("all", f"on this machine, all round: {text}")
    front = list(_front(samples, sound, measures))
    # The front alone does not choose: its arms are each better in something.
    best = max(front, key=lambda arm: _score(samples, arm, measures))
    parts = [f"{_what(*pair)}: {_part(samples, best, pair[1])}" for pair in judged.items()]
    text = f"on this machine, all round: {_called(best)}; {'; '.join(parts)}{_failures(samples, best)}"
    others = [arm.name for arm in front if arm is not best]
    if others:
        text += f"; the gains of {listed(others)} are larger in some and smaller in others"
    return Recommendation("all", text, best.name, best.settings, best.use)


def _is_better_all_round(samples: Samples, arm: Arm, measures: Sequence[Measure]) -> bool:
    verdicts = [samples.statistics(arm, measure).verdict for measure in measures]
    # No worse loss is tolerated: 10% of a loss is much more than 10% of a time.
    tolerated = all(
        verdict != "hurts" or (measure.unit != "nats" and _gain(samples, arm, measure) >= 1 / _TOLERATED)
        for verdict, measure in zip(verdicts, measures, strict=True)
    )
    return tolerated and "helps" in verdicts and set(verdicts) <= set(get_args(Judged))


def _score(samples: Samples, arm: Arm, measures: Sequence[Measure]) -> float:
    times = [math.log(_gain(samples, arm, one)) for one in measures if one.unit in _TIMES]
    others = [math.log(_gain(samples, arm, one)) for one in measures if one.unit not in _TIMES]
    # The times are averaged, so that all together count as much as the bytes.
    return sum(times) / max(1, len(times)) + sum(others)


def _part(samples: Samples, arm: Arm, measure: Measure) -> str:
    verdict = samples.statistics(arm, measure).verdict
    if verdict == "about the same":
        return f"about the same as {samples.baseline}"
    if verdict in ("within noise", "undecided"):
        found = samples.statistics(arm, measure)
        return f"{verdict_words(found)} ({interval_95(found.gain_low, found.gain_high)})"
    return _gain_text(samples, arm, measure)


def _front(samples: Samples, arms: Sequence[Arm], measures: Sequence[Measure]) -> Iterator[Arm]:
    """Yield the Pareto front: arms that no other arm matches everywhere and beats somewhere."""
    gains = {arm.name: [_gain(samples, arm, measure) for measure in measures] for arm in arms}
    for arm in arms:
        own = gains[arm.name]
        beaten = any(other != own and all(a >= b for a, b in zip(other, own, strict=True)) for other in gains.values())
        if not beaten:
            yield arm


# Warnings

_NOISY = 0.10
_WIDE = 1.05
_HOPELESS = 10.0
_OUTLYING = math.log(1.2)
_SLOW_START = math.log(1.1)
_TOO_SHORT = 0.05
_ROUNDED = 1.005  # equal figures show no other factor by their rounding
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


def warnings(samples: Samples) -> Iterator[Caution]:
    """Yield all warnings, the gravest first."""
    searches: tuple[Callable[[Samples], Iterator[Caution]], ...] = (
        *(_unreached, _failed_cells, _missing_measures, _no_control, _wide_control),
        *(_noisy_runs, _odd_blocks, _other_medians, _too_few, _smaller_subjects, _too_short),
    )
    if too_small(samples.results):
        # Spread and intervals say nothing about a state that is too small to time; failures do.
        searches = (_unreached, _failed_cells)
    for search in searches:
        yield from search(samples)


def too_noisy(results: Results, measure: Measure) -> str:
    """Return a sentence if a measure is too noisy for any verdict, else ""."""
    noise = results.summary.noise.get(measure.name)
    settled = any(results.statistics(arm.name, measure.name).verdict in ("helps", "hurts") for arm in results.arms)
    # A verdict beyond the noise disproves that none is possible.
    if noise is None or noise.floor <= _HOPELESS or settled:
        return ""
    spans = interval(noise.low, noise.high)
    return f"after {counted(noise.n, 'block')} no verdict is possible: the baseline against itself spans {spans} (95%)"


def _unreached(samples: Samples) -> Iterator[Caution]:
    if waiting := unreached(samples.results):
        yield Caution(waiting, "continue with --resume")


def _failed_cells(samples: Samples) -> Iterator[Caution]:
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
        # A missing cold load is usually no fault of the arm: some file systems keep their files in memory.
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
        yield Caution(f"{measure.label}: {text}", f"close other programs, or {_more(samples)}")


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
            yield Caution(text, f"close other programs, or {_more(samples)}")


def _odd_blocks(samples: Samples) -> Iterator[Caution]:
    for measure in samples.primary:
        slower_by = _slower_by(samples, measure) if measure.unit == "s" else {}
        for block, value in slower_by.items():
            # Compared with the other blocks only: its own value would widen their range.
            others = [other for at, other in slower_by.items() if at != block]
            first = block == min(slower_by)
            # The first block is often slow: caches are empty, and programs that were just started still run.
            least = _SLOW_START if first else _OUTLYING
            if len(others) < 2 or value - median(others) <= max(least, 2 * (max(others) - min(others))):
                continue
            slower = f"{number(math.exp(value - median(others)))} times slower than the rest"
            if first:
                text = f"{measure.label}: the first block was {slower}"
                yield Caution(
                    text, "wait until programs that were just started, and copies, have finished, and run again"
                )
            else:
                text = f"{measure.label}: block {block + 1} was {slower}, for most arms"
                more = f"{_more(samples)}: one block then counts less"
                yield Caution(text, f"close other programs and run again, or {more}")


def _slower_by(samples: Samples, measure: Measure) -> dict[int, float]:
    """Return, by block, the log of how much slower the median arm was than in its own median block."""
    found: dict[int, list[float]] = defaultdict(list)
    for arm in samples.arms:
        logs = samples.logs(arm.name, measure)
        if len(logs) > 1:
            # Each arm against itself, because arms differ by orders of magnitude.
            middle = median(logs.values())
            for block, log in logs.items():
                found[block].append(middle - log)
    return {block: median(values) for block, values in sorted(found.items())}


def _other_medians(samples: Samples) -> Iterator[Caution]:
    for measure in samples.primary:
        base, named = samples.results.statistics(samples.baseline or "", measure.name).per_byte, []
        for arm in samples.arms:
            found = samples.statistics(arm, measure)
            if not base or not found.per_byte or not found.gain_low or not found.gain_high or not found.gain:
                continue
            by_median = found.per_byte / base if measure.better == "higher" else base / found.per_byte
            if not found.gain_low / _ROUNDED <= by_median <= found.gain_high * _ROUNDED:
                named.append(f"{arm.name} ({gain(by_median)}, gain {gain(found.gain)})")
        if named:
            text = f"{measure.label}: the medians differ by another factor than the gain, which compares within blocks"
            yield Caution(f"{text}: {listed(named)}", f"trust the gain; {_more(samples)} brings them together")


def _too_few(samples: Samples) -> Iterator[Caution]:
    for measure in samples.primary:
        verdicts = {arm.name: samples.statistics(arm, measure).verdict for arm in samples.arms}
        single = [name for name, verdict in verdicts.items() if verdict == "too few runs"]
        if single:
            yield Caution(
                f"{measure.label}: one block gives no verdict on {listed(single)}", more_blocks(samples.results)
            )
        # The number of tests, which the adjustment for many tests depends on.
        tests = sum(verdict in get_args(Judged) for verdict in verdicts.values())
        unsure = [name for name, verdict in verdicts.items() if verdict in ("within noise", "undecided")]
        yield from _undecided(samples, measure, unsure, tests)


def _undecided(samples: Samples, measure: Measure, unsure: Sequence[str], tests: int) -> Iterator[Caution]:
    noise = samples.results.summary.noise.get(measure.name)
    floor = max(_WIDE, threshold(measure), noise.floor if noise else 1.0)
    wanted = []
    for name in unsure:
        found = samples.compare(name, samples.baseline or "", measure)
        # A difference below the noise floor, or too small to matter, is not worth more runs.
        if found is None or not found.std or max(found.gain, 1 / found.gain) <= floor:
            continue
        needed = blocks_needed(found.std, found.gain, tests, found.borrowed)
        if needed is not None and needed > found.n:
            wanted.append((needed, f"{name} ({gain(found.gain)})"))
    if wanted:
        least, most = min(wanted)[0], max(wanted)[0]
        names = listed([text for _, text in sorted(wanted)])
        blocks = counted(samples.results.blocks, "block")
        text = f"{measure.label}: {blocks} cannot show whether these differences are real: {names}"
        more = more_blocks(samples.results)
        budget = "" if more.startswith("--runs") else f"; with {more}"
        both = f", --runs {most} to show them all" if most > least else ""
        yield Caution(text, f"--runs {least} would be enough to show the first{both}{budget}")


def _smaller_subjects(samples: Samples) -> Iterator[Caution]:
    amounts = {arm.name: _amount(samples, arm.name) for arm in samples.arms}
    full = amounts.get(samples.baseline or "")
    smaller: dict[float, list[str]] = defaultdict(list)
    for name, amount in amounts.items():
        # Time per byte assumes that time grows with the bytes, which a fixed cost per file breaks.
        if amount is not None and full is not None and amount != full:
            smaller[amount].append(name)
    for amount, names in smaller.items():
        yield Caution(
            f"{listed(names, 12)} worked on {format_bytes(amount)}, {samples.baseline} on {format_bytes(full or 0)}: "
            "they are compared per byte, as if their time grew with the bytes",
            f"measure all arms on the same model: {_same_model(samples)}, without --slow-model",
        )


def _same_model(samples: Samples) -> str:
    given = samples.experiment.settings
    # A state that is given replaces both states of an experiment.
    if given.get("from"):
        return f"--from {shlex.quote(str(given['from']))}"
    return f"--model {shlex.quote(str(given.get('model') or 'SPEC'))}"


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


def _more(samples: Samples) -> str:
    return more_blocks(samples.results, max(_MORE_RUNS, 2 * samples.results.blocks))
