"""Published claims checked against this machine's results, with arms isolating the causes.

How a comparison, by its 95% interval, relates to a claimed gain:

* *What is claimed*: it lies on the claimed side of 1, spans at most a factor of 4, and overlaps the claimed gain within
  25% (bytes: 2%), or within half of a smaller effect. A claimed time within 6% (bytes: 1%) of no change is a claim of
  no change: its whole interval lies within 25% (bytes: 2%) of 1.
* *More*, *less*, or *as to its side*: it lies on the claimed side of 1 and above the claimed gain, below it, or it is
  too wide to decide.
* *The opposite*, or *no such difference*: it lies on the other side of 1, or includes 1 and excludes the claim.
* *Not decided*: it includes both.

The verdicts on a claim, from the comparisons that isolate its cause, or from the documented one without any:

* **reproduced**: all show what is claimed, and their arms differ only in what the claim names. **confounded**: they
  differ in something else as well; or only the documented arms show it.
* **same direction**, **same direction, larger** or **smaller**: all lie on the claimed side of 1.
* **not reproduced**: one shows the opposite or no such difference. **undecided**: one shows neither.
* **not run**: an arm is missing or has no figures, one block gives no interval, a time is too short for a small state,
  or arms that should differ in one setting differ in others.

Seconds are never compared: they depend on the hardware.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources

import msgspec

from tensorkeep.ext import format_bytes, number, prepared
from tensorkeep_bench.analysis.samples import SMALLEST, SMALLEST_STATE, Samples, more_blocks, too_short
from tensorkeep_bench.results import Claim, ClaimVerdict
from tensorkeep_bench.statistics import Comparison
from tensorkeep_bench.wording import TOO_SHORT, difference, interval_95, listed
from tensorkeep_formats.tensorstore.specs import chunk_shape

_WIDEST = 4.0
_ROUNDED = 1.0005
_EXPERIMENTS = ("claims", "training-claims", "training-claims-gpt2")
_SAME = "what is claimed"
_MORE = "more than claimed"
_LESS = "less than claimed"
_SIDE = "the claimed direction, in an interval too wide for the size"
_NONE = "no such difference"
_OPPOSITE = "the opposite"
_OPEN = "neither the claim nor its absence"
_SAME_SIDE: dict[str, ClaimVerdict] = {
    _MORE: "same direction, larger",
    _LESS: "same direction, smaller",
    _SIDE: "same direction",
}


class ArmPair(msgspec.Struct, frozen=True):
    """One arm against another; if ``changed`` is given, they may differ only in these settings."""

    measure: str
    baseline: str
    arm: str
    changed: frozenset[str] | None = None


class PublishedFigure(msgspec.Struct, frozen=True):
    """One published figure."""

    id: str
    claim: str
    theirs: str
    before: float
    after: tuple[float, float]  # lowest and highest, in the unit of `before`

    @property
    def gain(self) -> tuple[float, float]:
        # The lowest and the highest claimed gain, most often the same.
        return self.before / self.after[1], self.before / self.after[0]


class PublishedClaim(msgspec.Struct, frozen=True):
    """The published figures of one comparison, and the arms that check them."""

    figures: tuple[PublishedFigure, ...]
    documented: ArmPair  # the comparison as it was published
    isolating: tuple[ArmPair, ...]  # arms that differ only in what the claim names
    also: tuple[ArmPair, ...] = ()  # shown as well, without influence on the verdict
    confounders: str = ""  # what else differs, even between the isolating arms
    error: str = ""  # the error in the claim, or in how it was measured
    recipe: str | None = None  # the model of a claim about training


class PublishedClaims(msgspec.Struct, frozen=True):
    claims: tuple[PublishedClaim, ...]
    training: tuple[PublishedClaim, ...]
    elsewhere: tuple[Claim, ...]

    def of(self, workload: str) -> tuple[PublishedClaim, ...]:
        return self.training if workload == "training" else self.claims

    def arms(self, workload: str) -> set[str]:
        pairs = [pair for claim in self.of(workload) for pair in (claim.documented, *claim.isolating, *claim.also)]
        return {name for pair in pairs for name in (pair.baseline, pair.arm)}


@cache
def published_claims() -> PublishedClaims:
    file = resources.files("tensorkeep_bench.analysis") / "published_claims.json"
    return msgspec.json.decode(file.read_bytes(), type=prepared(PublishedClaims))


def check_claims(samples: Samples) -> Iterator[Claim]:
    """Yield a result per figure if the experiment is named after the claims, or has all arms they need."""
    published, workload = published_claims(), samples.experiment.workload
    # An experiment with that name may lack an arm, for example after ``only``; its claims are then "not run".
    if samples.experiment.name in _EXPERIMENTS or published.arms(workload) <= {arm.name for arm in samples.arms}:
        for claim in published.of(workload):
            yield from _check(samples, claim)
        if workload != "training":
            yield from _chunk_claims()
            yield from published.elsewhere


def _chunk_claims() -> Iterator[Claim]:
    # These need no run: the published algorithm is a function.
    for id, elements in (("9a", 16_777_216), ("9b", 262_144)):
        found = chunk_shape((32000, 3200), 4, elements, "halving")
        verdict: ClaimVerdict = "reproduced" if found == (4000, 3200) else "not reproduced"
        claim = f"chunks of (32000, 3200) at {elements:,} elements are (4000, 3200)"
        ours = f"halving the largest dimension gives {found}: {math.prod(found):,} elements"
        yield Claim(id, claim, "(4000, 3200): 12,800,000 elements", ours, verdict, "")


def _check(samples: Samples, claim: PublishedClaim) -> Iterator[Claim]:
    needed = (claim.documented, *claim.isolating)
    found = {
        pair: samples.compare(pair.arm, pair.baseline, samples.results.measure(pair.measure))
        for pair in (*needed, *claim.also)
    }
    ours = "; ".join(_described(samples, pair, comparison) for pair, comparison in found.items() if comparison)
    recipe = samples.experiment.settings.get("recipe")
    obstacles = [obstacle for pair in needed if (obstacle := _obstacle(samples, pair, found[pair]))]
    documented = found[claim.documented]
    gain = (documented.gain, documented.low, documented.high) if documented else ()
    for figure in claim.figures:
        verdict: ClaimVerdict
        # A technique may help one model and hurt another.
        if claim.recipe is not None and recipe != claim.recipe:
            reason = f"it is about {claim.recipe}, not {recipe}"
            yield Claim(figure.id, figure.claim, figure.theirs, "", "not run", reason)
            continue
        if obstacles:
            # Two comparisons often have the same obstacle; a dict keeps each once, in order.
            verdict, reason = "not run", "; ".join(dict.fromkeys(obstacles))
        else:
            exact = claim.documented.measure == "stored"
            read = [_reading(found[pair], figure, exact=exact) for pair in needed]
            verdict, reason = _verdict(claim, figure, read[0], read[1:], exact=exact)
        yield Claim(figure.id, figure.claim, figure.theirs, ours, verdict, reason, *gain)


def _obstacle(samples: Samples, pair: ArmPair, found: Comparison | None) -> str | None:
    """Return why a comparison cannot be judged; None if it can."""
    arms = {arm.name: arm for arm in samples.arms}
    missing = [name for name in (pair.baseline, pair.arm) if name not in arms]
    if missing:
        return f"the experiment has no {listed(missing)}"
    measure = samples.results.measure(pair.measure)
    if found is None:
        if failures := [*samples.failures(pair.baseline), *samples.failures(pair.arm)]:
            return f"{failures[0].arm}: {failures[0].reason or failures[0].status}"
        blocks = (
            {cell.block for cell in samples.cells_of(name) if cell.status == "ok"} for name in (pair.baseline, pair.arm)
        )
        if set.intersection(*blocks):
            return f"{measure.label if measure else pair.measure}: not measured for {pair.baseline} and {pair.arm} here"
        return f"{pair.baseline} and {pair.arm} did not run in the same block"
    for name in (pair.baseline, pair.arm):
        if measure is not None and too_short(samples.results, name, measure):
            nbytes = format_bytes(samples.results.subject.bytes or 0)
            return f"{name}{TOO_SHORT}{nbytes}: {format_bytes(SMALLEST_STATE)} are enough"
    one, other = arms[pair.baseline].settings, arms[pair.arm].settings
    # Settings that differ beyond the claim would be an explanation of their own.
    differing = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
    if others := sorted(differing - (differing if pair.changed is None else pair.changed)):
        return f"{pair.baseline} and {pair.arm} also differ in {listed(others)}: the cause is not isolated"
    return None if found.low is not None else f"one block gives no interval: use {more_blocks(samples.results)}"


def _tolerance(exact: bool) -> tuple[float, float]:
    """Return how far a supporting gain may lie from a claim, and up to where a claim is one of no change."""
    # Sizes have no noise: 2% fewer bytes are a claim that they are fewer.
    return (1.02, 1.01) if exact else (1.25, 1.06)


def _reading(found: Comparison | None, figure: PublishedFigure, *, exact: bool) -> str:
    """Compare the measured gain with a claimed one, and return the result in words."""
    if found is None or found.low is None or found.high is None:
        raise ValueError("a comparison without an interval cannot be judged")
    tolerance, _ = _tolerance(exact)
    if _claims_no_change(figure, exact=exact):
        # The whole interval, because a wide interval around 1 shows nothing.
        if found.low >= 1 / tolerance and found.high <= tolerance:
            return _SAME
        return _OPPOSITE if found.low > tolerance or found.high < 1 / tolerance else _OPEN
    # Invert the claim of a slow-down: a slow-down by 2 is a gain of 2 in the opposite direction.
    better = figure.gain[0] > 1
    least, most = figure.gain if better else (1 / figure.gain[1], 1 / figure.gain[0])
    low, high = (found.low, found.high) if better else (1 / found.high, 1 / found.low)
    # Half of a claimed effect, on a log scale, is its square root.
    too_little = least / min(tolerance, math.sqrt(least))
    if high < 1 / SMALLEST:
        return _OPPOSITE
    if low <= SMALLEST:
        return _NONE if high < too_little or exact else _OPEN
    if high < too_little:
        return _LESS
    if low > most * min(tolerance, math.sqrt(most)):
        return _MORE
    # Nearly every claim overlaps an interval that spans everything.
    return _SAME if high / low <= _WIDEST else _SIDE


def _claims_no_change(figure: PublishedFigure, *, exact: bool) -> bool:
    _, unchanged = _tolerance(exact)
    return 1 / unchanged < figure.gain[0] and figure.gain[1] < unchanged


def _verdict(
    claim: PublishedClaim, figure: PublishedFigure, documented: str, isolated: Sequence[str], *, exact: bool
) -> tuple[ClaimVerdict, str]:
    # The isolating arms decide; without any, the documented comparison does.
    deciding = set(isolated or [documented])
    shown = f"the documented arms show {documented}"
    if isolated:
        shown += f"; those that isolate the cause show {listed(list(dict.fromkeys(isolated)))}"
    if _claims_no_change(figure, exact=exact) and figure.gain[0] != 1:
        claimed, (tolerance, _) = difference(figure.gain[0]), _tolerance(exact)
        shown = f"one run each cannot show {claimed}, so this is read as no change of {difference(tolerance)}: {shown}"
    if deciding == {_SAME} and not claim.confounders:
        return "reproduced", shown
    reason = "; ".join(text for text in (shown, claim.confounders, claim.error) if text)
    # Supporting arms that also differ in something else do not isolate the cause.
    if deciding == {_SAME} or documented == _SAME:
        return "confounded", reason
    if deciding <= {_SAME, *_SAME_SIDE}:
        others = deciding - {_SAME}
        return (_SAME_SIDE[others.pop()] if len(others) == 1 else "same direction"), reason
    return ("not reproduced" if deciding & {_NONE, _OPPOSITE} else "undecided"), reason


def _described(samples: Samples, pair: ArmPair, found: Comparison) -> str:
    measure = samples.results.measure(pair.measure)
    label = measure.label if measure else pair.measure
    head = f"{pair.arm} against {pair.baseline}, {label}: "
    low, high = (None, None) if found.low is None or found.high is None else (1 / found.high, 1 / found.low)
    if measure is not None and measure.unit == "B":
        spread = f" ({interval_95(low, high)})" if low and high and high / low > _ROUNDED else ""
        return f"{head}{number(1 / found.gain)} of the bytes{spread}"
    # A rate is a speed already; of a time, "1.54 times as long" reads better than "0.65 times as fast".
    if found.gain >= 1 or (measure is not None and measure.better == "higher"):
        return f"{head}{number(found.gain)} times as fast ({interval_95(found.low, found.high)})"
    return f"{head}{number(1 / found.gain)} times as long ({interval_95(low, high)})"
