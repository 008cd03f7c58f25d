"""The sentences of a report: subject, verdicts, noise, and missing results."""

from collections import Counter
from typing import get_args

from tensorkeep.ext import counted, format_bytes
from tensorkeep_bench.analysis.advice import too_noisy
from tensorkeep_bench.analysis.samples import TOO_SMALL, more_blocks, too_small, unreached
from tensorkeep_bench.experiment import BASELINE
from tensorkeep_bench.report.measures import compared_arms
from tensorkeep_bench.results import ArmStatistics, ClaimVerdict, Measure, Recommendation, Results, Verdict
from tensorkeep_bench.wording import capitalised, claim_words, difference, gain, interval, listed, verdict_words

# The verdicts that a headline counts in other words.
_COUNTED = {"helps": "better", "hurts": "worse", "too few runs": "with too few runs"}


def measured_by(results: Results) -> str:
    design = "" if results.experiment.design == "arms" else f", design: {results.experiment.design}"
    arms = f"{len(results.arms)} arms, {counted(results.blocks, 'block')}{design}"
    return "; ".join(filter(None, (arms, results.subject.description, results.started)))


def completeness(results: Results) -> str:
    if waiting := unreached(results):
        return f"This run is not complete: {waiting}."
    return "" if results.complete else "This run was not finished."


def headlines(results: Results) -> list[str]:
    """Return one sentence per primary measure: the best arm that helps, and how many arms have which verdict."""
    # Claims are judged one by one, and a claim that the state is too small for says so.
    if results.summary.claims:
        return [_claims(results)]
    if only := _only_arm(results):
        return [only]
    if too_small(results):
        # Verdicts on times are withheld; the bytes of a checkpoint are exact at any size.
        sizes = [one for one in results.primary() if one.unit != "s" and results.baseline]
        reason = capitalised(TOO_SMALL.format(format_bytes(results.subject.bytes or 0)))
        return [f"{reason}.", *(_headline(results, one, results.baseline or "") for one in sizes)]
    if results.baseline is None:
        return ["The experiment has no baseline, so no arm is called better or worse."]
    if not results.ran(results.baseline):
        return [f"The baseline, {results.baseline}, has no figures, so no arm is called better or worse."]
    return [_headline(results, measure, results.baseline) for measure in results.primary()]


def _only_arm(results: Results) -> str:
    arms = [arm for arm in results.arms if arm.role != "control"]
    if results.baseline is None or len(arms) != 1:
        return ""
    # The configurations of a suite are compared with the one of this name.
    named = arms[0].settings.get("tool") == "tensorstore" and arms[0].name != BASELINE
    other = f", such as {BASELINE}" if named else ""
    return f"One configuration, {_quoted(arms[0].name)}: nothing to compare; add another{other}."


def noise_lines(results: Results) -> list[str]:
    return [f"{measure.label}: {_noise(results, measure)}" for measure in results.primary()]


def purpose(recommendation: Recommendation) -> str:
    return "All round" if recommendation.purpose == "all" else capitalised(recommendation.purpose)


def _headline(results: Results, measure: Measure, baseline: str) -> str:
    label = capitalised(measure.label)
    arms = [arm.name for arm in compared_arms(results) if arm.name != baseline]
    found = {name: results.statistics(name, measure.name) for name in arms}
    counts = _counts(list(found.values()))
    if noisy := too_noisy(results, measure):
        return f"{label}: {noisy}{counts}."
    helping = [(name, one) for name, one in found.items() if one.verdict == "helps"]
    if not helping and (waiting := unreached(results)):
        return f"{label}: not decided, {waiting}{counts}."
    if not helping:
        return f"{label}: no arm is shown to be better than {baseline}{counts}."
    name, best = max(helping, key=lambda pair: pair[1].gain or 0)
    # More tokens per second are faster, more seconds are not.
    words = {"s": "faster", "B": "smaller"} if measure.better == "lower" else {"tokens/s": "faster"}
    better = f"{gain(best.gain)} {words.get(measure.unit, 'better')} than {baseline}"
    return f"{label}: {name} is {better} (95% {interval(best.gain_low, best.gain_high)}){counts}."


def _counts(found: list[ArmStatistics]) -> str:
    words = [_COUNTED.get(one.verdict, verdict_words(one)) for one in found if one.verdict is not None]
    # In the order of the rules, which is the order in which a reader looks for them.
    order = [_COUNTED.get(verdict, verdict) for verdict in get_args(Verdict)]
    counts = sorted(Counter(words).items(), key=lambda pair: order.index(pair[0].partition(" after ")[0]))
    return f"; of {len(words)}: {', '.join(f'{count} {each}' for each, count in counts)}" if counts else ""


def _noise(results: Results, measure: Measure) -> str:
    noise = results.summary.noise.get(measure.name)
    if noise is None:
        # A control that ran once has no interval.
        few = any(arm.role == "control" for arm in results.arms)
        return f"no noise floor, because no A/A control ran{' in two blocks' if few else ''}"
    # Bytes are often the same in every run; a floor of 0.0% would look like an error.
    if noise.floor < 1.0005:
        return "the same in every run, so that every difference counts"
    if noisy := too_noisy(results, measure):
        return noisy
    band = f"the baseline against itself: {interval(noise.low, noise.high)} (95%)"
    return f"differences below {difference(noise.floor)} are noise; {band}"


# The verdict: one sentence with the arm to use, and what it gains and costs

# What an arm does that is better or worse than the baseline, by measure.
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


def verdict_sentence(results: Results) -> str:
    """Return the sentence; it recommends an arm only if `tensorkeep_bench.analysis.advice` does."""
    return " ".join(filter(None, (results.summary.key, _verdict_sentence(results))))


def _verdict_sentence(results: Results) -> str:
    if results.summary.claims:
        return _claims(results)
    baseline, found = results.baseline, results.summary.recommendations
    if _only_arm(results) or too_small(results) or baseline is None or not results.ran(baseline):
        return headlines(results)[0]
    for one in found:
        # A single purpose has no recommendation all round; one run shows the size only.
        if one.arm is not None and (one.purpose == "all" or (len(found) == 1 and results.blocks > 1)):
            return f"Use {_quoted(one.arm)} on this machine: it {_effects(results, one.arm, baseline)}."
    # No arm is best all round, but one is better for a purpose.
    if partly := [one.arm for one in found if one.arm is not None]:
        effects = _effects(results, partly[0], baseline)
        if waiting := unreached(results):
            return f"Not decided all round: {waiting}. So far, {_quoted(partly[0])} {effects}."
        if results.blocks < 2:
            return f"{_one_run(results, 'speed')} Sizes need no more runs: {_quoted(partly[0])} {effects}."
        return f"No arm is better than {baseline} in everything on this machine: {_quoted(partly[0])} {effects}."
    if waiting := unreached(results):
        return f"Not decided: {waiting}."
    if results.blocks < 2:
        return _one_run(results)
    return f"No arm is shown to be better than {baseline} on this machine."


def _one_run(results: Results, of: str = "") -> str:
    what = f"a difference in {of}" if of else "a difference"
    return f"One run per arm cannot show {what} from {results.baseline}: measure again with {more_blocks(results)}."


def _quoted(arm: str) -> str:
    # Names with blanks would run into the sentence.
    return f'"{arm}"' if " " in arm else arm


def _effects(results: Results, arm: str, baseline: str) -> str:
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


_CLAIM_WORDS = {
    "same direction": "true in direction",
    "same direction, larger": "true in direction and larger than claimed",
    "same direction, smaller": "true in direction and smaller than claimed",
    "too small to decide": "left open because the state is too small",
}


def _claims(results: Results) -> str:
    counts = Counter(map(claim_words, results.summary.claims))
    words = (*get_args(ClaimVerdict), "too small to decide")
    found = [(_CLAIM_WORDS.get(verdict, verdict), counts[verdict]) for verdict in words]
    parts = [f"{count} {'is' if count == 1 else 'are'} {words}" for words, count in found if count]
    return f"Of {counted(len(results.summary.claims), 'published claim')}, {listed(parts, len(parts))} on this machine."
