"""Published claims checked against this machine's results, with arms isolating the causes.

The rules, for each figure of a claim:

* A comparison *supports* the claim if its 95% interval overlaps the claimed gain within 25%, lies on the claimed side
  of 1, and spans at most a factor of 4. A claimed time within 6% of no change is a claim of no change: a comparison
  supports it if its whole interval lies within 25% of 1.
* **reproduced**: all isolating comparisons support it, and their arms differ only in what the claim names.
* **confounded**: the documented comparison supports it, but an isolating one does not; or the supporting arms also
  differ in something else.
* **not reproduced**: no comparison supports it.
* **not run**: an arm is missing or has no figures, one block gives no interval, or arms that should differ in one
  setting differ in others.

Seconds are never compared: they depend on the hardware.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources

import msgspec

from tensorkeep.ext import number, prepared
from tensorkeep_bench.analysis.samples import SMALLEST, Samples
from tensorkeep_bench.results import Claim, ClaimVerdict
from tensorkeep_bench.statistics import Comparison
from tensorkeep_bench.wording import difference, interval_95, listed

_TOLERANCE = 1.25
_NO_CHANGE = 1.06
_WIDEST = 4.0
_EXPERIMENTS = ("claims", "training-claims", "training-claims-gpt2")
_SAME = "what is claimed"
_NOTHING = "no clear difference"
_VAGUE = "an interval too wide to judge"


class ArmPair(msgspec.Struct, frozen=True):
    """One arm against another; if ``changed`` is given, they may differ only in these settings."""

    measure: str
    baseline: str
    arm: str
    changed: frozenset[str] | None = None


class PublishedClaim(msgspec.Struct, frozen=True):
    """One published figure, and the arms that check it."""

    id: str
    claim: str
    theirs: str
    before: float
    after: tuple[float, float]  # lowest and highest, in the unit of `before`
    documented: ArmPair  # the comparison as it was published
    isolating: tuple[ArmPair, ...]  # arms that differ only in what the claim names
    also: tuple[ArmPair, ...] = ()  # shown as well, without influence on the verdict
    confounders: str = ""  # what else differs, even between the isolating arms
    error: str = ""  # the error in the claim, or in how it was measured
    recipe: str | None = None  # the model of a claim about training

    @property
    def gain(self) -> tuple[float, float]:
        # The lowest and the highest claimed gain, most often the same.
        return self.before / self.after[1], self.before / self.after[0]


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
    """Yield a result per claim if the experiment is named after the claims, or has all arms they need."""
    published, workload = published_claims(), samples.experiment.workload
    # An experiment with that name may lack an arm, for example after ``only``; its claims are then "not run".
    if samples.experiment.name in _EXPERIMENTS or published.arms(workload) <= {arm.name for arm in samples.arms}:
        for claim in published.of(workload):
            yield _check(samples, claim)
        if workload != "training":
            yield from published.elsewhere


def _check(samples: Samples, claim: PublishedClaim) -> Claim:
    needed = (claim.documented, *claim.isolating)
    found = {
        pair: samples.compare(pair.arm, pair.baseline, samples.results.measure(pair.measure))
        for pair in (*needed, *claim.also)
    }
    ours = "; ".join(_described(samples, pair, comparison) for pair, comparison in found.items() if comparison)
    recipe = samples.experiment.settings.get("recipe")
    # A technique may help one model and hurt another.
    if claim.recipe is not None and recipe != claim.recipe:
        return Claim(claim.id, claim.claim, claim.theirs, "", "not run", f"it is about {claim.recipe}, not {recipe}")
    obstacles = [obstacle for pair in needed if (obstacle := _obstacle(samples, pair, found[pair]))]
    documented = found[claim.documented]
    verdict: ClaimVerdict
    if obstacles:
        # Two comparisons often have the same obstacle; a dict keeps each once, in order.
        verdict, reason = "not run", "; ".join(dict.fromkeys(obstacles))
    else:
        isolated = [_reading(found[pair], claim) for pair in claim.isolating]
        verdict, reason = _verdict(claim, _reading(documented, claim), isolated)
    gain = (documented.gain, documented.low, documented.high) if documented else ()
    return Claim(claim.id, claim.claim, claim.theirs, ours, verdict, reason, *gain)


def _obstacle(samples: Samples, pair: ArmPair, found: Comparison | None) -> str | None:
    """Return why a comparison cannot be judged; None if it can."""
    arms = {arm.name: arm for arm in samples.arms}
    missing = [name for name in (pair.baseline, pair.arm) if name not in arms]
    if missing:
        return f"the experiment has no {listed(missing)}"
    if found is None:
        if failures := [*samples.failures(pair.baseline), *samples.failures(pair.arm)]:
            return f"{failures[0].arm}: {failures[0].reason or failures[0].status}"
        return f"{pair.baseline} and {pair.arm} have no block in common with {pair.measure}"
    one, other = arms[pair.baseline].settings, arms[pair.arm].settings
    # Settings that differ beyond the claim would be an explanation of their own.
    differing = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
    if others := sorted(differing - (differing if pair.changed is None else pair.changed)):
        return f"{pair.baseline} and {pair.arm} also differ in {listed(others)}: the cause is not isolated"
    return None if found.low is not None else "one block gives no interval: use --runs 5"


def _reading(found: Comparison | None, claim: PublishedClaim) -> str:
    """Compare the measured gain with a claim: `_SAME`, or the difference in words."""
    if found is None or found.low is None or found.high is None:
        raise ValueError("a comparison without an interval cannot be judged")
    if _claims_no_change(claim):
        # The whole interval, because a wide interval around 1 shows nothing.
        if found.low >= 1 / _TOLERANCE and found.high <= _TOLERANCE:
            return _SAME
        return "a change" if found.low > 1 or found.high < 1 else _NOTHING
    # Invert the claim of a slow-down: a slow-down by 2 is a gain of 2 in the opposite direction.
    better = claim.gain[0] > 1
    least, most = claim.gain if better else (1 / claim.gain[1], 1 / claim.gain[0])
    low, high = (found.low, found.high) if better else (1 / found.high, 1 / found.low)
    if low <= SMALLEST:
        return "the opposite" if high < 1 / SMALLEST else _NOTHING
    if high < least / _TOLERANCE:
        return "less than claimed"
    if low > most * _TOLERANCE:
        return "more than claimed"
    # Nearly every claim overlaps an interval that spans everything.
    return _SAME if high / low <= _WIDEST else _VAGUE


def _claims_no_change(claim: PublishedClaim) -> bool:
    # Sizes have no noise: 2% fewer bytes are a claim that they are fewer.
    return claim.documented.measure != "stored" and 1 / _NO_CHANGE < claim.gain[0] < _NO_CHANGE


def _verdict(claim: PublishedClaim, documented: str, isolated: Sequence[str]) -> tuple[ClaimVerdict, str]:
    # The isolating arms decide; without any, the documented comparison does.
    agree = all(reading == _SAME for reading in (isolated or [documented]))
    shown = f"the documented arms show {documented}"
    if isolated:
        shown += f"; those that isolate the cause show {listed(list(dict.fromkeys(isolated)))}"
    if _claims_no_change(claim):
        claimed = difference(claim.gain[0])
        shown = f"one run each cannot show {claimed}, so this is read as no change of 25% or more: {shown}"
    if agree and not claim.confounders:
        return "reproduced", shown
    reason = "; ".join(text for text in (shown, claim.confounders, claim.error) if text)
    # Supporting arms that also differ in something else do not isolate the cause.
    return ("confounded" if agree or documented == _SAME else "not reproduced"), reason


def _described(samples: Samples, pair: ArmPair, found: Comparison) -> str:
    measure = samples.results.measure(pair.measure)
    label = measure.label if measure else pair.measure
    head = f"{pair.arm} against {pair.baseline}, {label}: "
    if measure is not None and measure.unit == "B":
        return f"{head}{number(1 / found.gain)} of the bytes"
    if found.gain >= 1:
        return f"{head}{number(found.gain)} times as fast ({interval_95(found.low, found.high)})"
    low, high = (None, None) if found.low is None or found.high is None else (1 / found.high, 1 / found.low)
    return f"{head}{number(1 / found.gain)} times as long ({interval_95(low, high)})"
