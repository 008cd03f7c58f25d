"""The verdict of a report: one sentence with the arm to use, and what it gains and costs."""

from collections import Counter

from tensorkeep.bench.analysis.verdicts import too_small
from tensorkeep.bench.analysis.wording import difference, gain, listed
from tensorkeep.bench.results import Measure, Results
from tensorkeep.report.headlines import headlines
from tensorkeep.units import counted

_WORDS = {
    "save": ("saves {} faster", "saves {} slower"),
    "load_first": ("loads {} faster in a new process", "loads {} slower in a new process"),
    "load_cold": ("loads {} faster from the disk", "loads {} slower from the disk"),
    "load_warm": ("loads {} faster from the page cache", "loads {} slower from the page cache"),
    "stored": ("writes {} fewer bytes", "writes {} more bytes"),
    "tokens_per_second": ("trains {} faster", "trains {} slower"),
    "peak_memory": ("needs {} less memory", "needs {} more memory"),
    "loss": ("reaches a validation loss {} lower", "reaches a validation loss {} higher"),
    "loss_in_time": ("reaches a loss {} lower in equal time", "reaches a loss {} higher in equal time"),
}
"""What an arm does that is better or worse than the baseline, by measure."""


def verdict_sentence(results: Results) -> str:
    """Return the sentence; it recommends an arm only if `tensorkeep.bench.analysis.recommendations` does."""
    if results.summary.claims:
        return _claims(results)
    baseline, found = results.baseline, results.summary.recommendations
    if too_small(results) or baseline is None or not results.ran(baseline):
        return " ".join(headlines(results))
    for one in found:
        # A single purpose has no recommendation for all of them.
        if one.arm is not None and (one.purpose == "all" or len(found) == 1):
            return f"Use {_quoted(one.arm)} on this machine: it {_effects(results, one.arm, baseline)}."
    if partly := [one.arm for one in found if one.arm is not None]:
        effects = _effects(results, partly[0], baseline)
        return f"No arm is better than {baseline} in everything on this machine: {_quoted(partly[0])} {effects}."
    if results.blocks < 2:
        return f"One run of each arm cannot show a difference from {baseline}: measure again with --runs 5."
    return f"No arm is shown to be better than {baseline} on this machine."


def _quoted(arm: str) -> str:
    return f'"{arm}"' if " " in arm else arm


def _effects(results: Results, arm: str, baseline: str) -> str:
    """Return what the arm does better than the baseline, and what it does worse."""
    better, worse = [], []
    for measure in results.primary():
        found = results.statistics(arm, measure.name)
        if found.gain and found.verdict == "helps":
            better.append(_effect(measure, found.gain))
        elif found.gain and found.verdict == "hurts":
            worse.append(_effect(measure, found.gain))
    text = f"{listed(better)} than {baseline}" if better else f"is not worse than {baseline}"
    return f"{text}, but {listed(worse)}" if worse else text


def _effect(measure: Measure, value: float) -> str:
    helps, hurts = _WORDS.get(measure.name, (f"is {{}} better in {measure.label}", f"is {{}} worse in {measure.label}"))
    # A fraction of the bytes reads better than how many times fewer they are.
    size = difference(1 / value) if measure.unit in ("B", "nats") else gain(max(value, 1 / value))
    return (helps if value > 1 else hurts).format(size)


def _claims(results: Results) -> str:
    counts = Counter(claim.verdict for claim in results.summary.claims)
    parts = [f"{count} {'is' if count == 1 else 'are'} {words}" for words, count in counts.items()]
    return f"Of {counted(len(results.summary.claims), 'published claim')}, {listed(parts)} on this machine."
