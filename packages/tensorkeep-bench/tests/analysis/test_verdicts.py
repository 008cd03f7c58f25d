"""Verdicts: a difference counts only if the test, the interval and the A/A control agree."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.simulations import SIMULATIONS, most
from tensorkeep.testing.cases import case
from tensorkeep_bench.analysis.samples import PRACTICAL, SMALLEST, judge, noise_of, threshold
from tensorkeep_bench.results import Measure, Noise
from tensorkeep_bench.statistics import Comparison, compare, holm


def comparison(gain: float, low: float | None, high: float | None, *, p: float = 0.01, n: int = 5) -> Comparison:
    return Comparison(n, gain, low, high, p, 0.1)


QUIET = Noise(0.99, 1.01, 1.0101, 5)
LOUD = Noise(0.8, 1.1, 1.25, 5)


def test_verdicts() -> None:
    for found, p_holm, noise, word in (
        (comparison(1.5, 1.3, 1.7), 0.01, QUIET, "helps"),
        (comparison(0.6, 0.5, 0.7), 0.01, QUIET, "hurts"),
        (comparison(1.5, 1.3, 1.7), 0.05, QUIET, "undecided"),  # the test disagrees
        (comparison(1.5, 0.99, 1.7), 0.01, QUIET, "undecided"),  # the interval disagrees
        (comparison(1.2, 1.1, 1.3), 0.01, LOUD, "undecided"),  # the control disagrees
        (comparison(0.81, 0.8, 0.82), 0.01, LOUD, "undecided"),
        (comparison(7.96, 1.86, 34.1), 0.06, LOUD, "undecided"),  # an interval that excludes 1 is never noise
        (comparison(1.04, 1.01, 1.3), 0.01, QUIET, "undecided"),  # perhaps too small to matter, perhaps not
        (comparison(1.0, 0.9, 1.2), 0.9, LOUD, "within noise"),
        (comparison(1.0, 0.9, 1.3), 0.9, LOUD, "undecided"),  # it may be larger than the control's difference
        (comparison(1.0, 0.9, 1.2), 0.9, None, "undecided"),  # without a control, the noise is not known
        (comparison(1.3, 1.26, 1.4), 0.01, LOUD, "helps"),
        (comparison(0.79, 0.75, 0.82), 0.01, LOUD, "hurts"),
        (comparison(1.0005, 1.0004, 1.0006), 0.0, None, "about the same"),  # certain, and negligible
        (comparison(1.04, 1.03, 1.049), 0.0, QUIET, "about the same"),
        (comparison(0.96, 0.953, 0.97), 0.0, QUIET, "about the same"),
        (comparison(1.06, 1.05, 1.07), 0.0, QUIET, "helps"),
        (comparison(0.94, 0.93, 0.95), 0.0, QUIET, "hurts"),
        (Comparison(1, 3.0, None, None, None, None), None, QUIET, "too few runs"),
    ):
        with case((found, p_holm, noise)):
            assert judge(found, p_holm, noise)[0] == word
    # Small differences of losses count.
    loss, speed = Measure("loss", "loss", "nats"), Measure("speed", "speed", "tokens/s", better="higher")
    assert judge(comparison(1.01, 1.009, 1.011), 0.0, None, threshold(loss))[0] == "helps"
    assert judge(comparison(1.01, 1.009, 1.011), 0.0, None, threshold(speed))[0] == "about the same"


def test_reasons_carry_the_figures() -> None:
    better = "1.50 times better (95% 1.30 to 1.70, adjusted p 0.01), more than the A/A control's: 25%"
    assert judge(comparison(1.5, 1.3, 1.7), 0.01, LOUD)[1] == better
    worse = "2.00 times worse (95% 1.25 to 2.50, adjusted p below 0.0001)"
    assert judge(comparison(0.5, 0.4, 0.8), 0.00001, None)[1] == worse
    noise = "excludes 1, but the gain, {}, does not exceed the A/A control's: {}"
    assert judge(comparison(1.2, 1.1, 1.3), 0.01, LOUD)[1] == f"95% 1.10 to 1.30 {noise.format('20%', '25%')}"
    wild = judge(comparison(3.0, 2.0, 4.0), 0.01, Noise(0.1, 2.0, 10.0, 3))
    assert wild[1].endswith(noise.format("a factor of 3.00", "a factor of 10.0"))
    assert judge(comparison(1.5, 0.99, 1.7), 0.3, None)[1] == "95% 0.990 to 1.70 includes 1 and a difference of 70%"
    chance = judge(comparison(7.96, 1.86, 34.1), 0.06, None)[1]
    assert chance.startswith("95% 1.86 to 34.1 excludes 1, but adjusted p 0.06 is not below 0.05")
    vague = "95% 1.01 to 1.30 excludes 1, but not that the difference is below 5%"
    assert judge(comparison(1.04, 1.01, 1.3), 0.0, None)[1] == vague
    within = "95% 0.900 to 1.20 includes 1, and any difference is below the A/A control's: 25%"
    assert judge(comparison(1.0, 0.9, 1.2), 0.9, LOUD)[1] == within
    assert judge(Comparison(1, 3.0, None, None, None, None), None, None)[1].startswith("1 block cannot")


def test_the_noise_floor_is_the_farther_end_of_the_control() -> None:
    assert noise_of([comparison(0.95, 0.8, 1.1)]) == Noise(0.8, 1.1, 1.25, 5)
    assert noise_of([comparison(1.0, 0.99, 1.2)]).floor == 1.2
    assert noise_of([comparison(1.0, 0.99, 1.2), comparison(1.0, 0.5, 1.1, n=4)]) == Noise(0.5, 1.2, 2.0, 4)
    assert noise_of([]) is None
    assert noise_of([Comparison(1, 1.1, None, None, None, None)]) is None


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8), st.floats(1, 1.5))
def test_the_inverse_ratio_has_the_opposite_verdict(values: list[float], floor: float) -> None:
    noise = Noise(1 / floor, floor, floor, 5)
    opposite = {"helps": "hurts", "hurts": "helps"}
    one, other = compare(values), compare([-value for value in values])
    # At the very edge the last digit decides.
    if abs(abs(math.log(one.gain)) - math.log(max(floor, PRACTICAL))) > 1e-9 and abs(one.p - 0.05) > 1e-9:
        word = judge(one, one.p, noise)[0]
        assert judge(other, other.p, noise)[0] == opposite.get(word, word)


@given(
    st.lists(st.floats(-1, 1), min_size=2, max_size=8),
    st.floats(0, 1),
    st.none() | st.floats(1, 3),
    st.sampled_from((PRACTICAL, SMALLEST)),
)
def test_no_verdict_contradicts_its_interval(
    values: list[float], p_holm: float, floor: float | None, least: float
) -> None:
    found = compare(values)
    noise = None if floor is None else Noise(1 / floor, floor, floor, 5)
    word, reason = judge(found, p_holm, noise, least)
    low, high = found.low, found.high
    assert {
        "helps": low > 1,
        "hurts": high < 1,
        "about the same": 1 / least < low and high < least,
        "within noise": low <= 1 <= high and floor is not None and 1 / floor <= low and high <= floor,
        "undecided": not (1 / least < low and high < least) or (floor is not None and floor > least),
    }[word]
    assert ("excludes 1" in reason) <= (low > 1 or high < 1) and ("includes 1" in reason) <= (low <= 1 <= high)


def test_arms_are_about_the_same_if_the_whole_interval_is_close_to_1() -> None:
    for low, high, floor, expected in (
        (0.96, 1.04, 1.0, "about the same"),
        (0.96, 1.04, 1.04, "about the same"),
        (0.96, 1.04, 1.06, "within noise"),  # the baseline against itself differs by more
        (0.94, 1.04, 1.0, "undecided"),
        (0.96, 1.06, 1.0, "undecided"),
    ):
        word, reason = judge(Comparison(5, 1.0, low, high, 0.9, 0.01), 0.9, Noise(1 / floor, floor, floor, 5))
        with case(f"{low} to {high}, beside a noise of {floor}"):
            assert word == expected
            assert word != "about the same" or reason.startswith("any difference is below 4%: 95% 0.96")


@pytest.mark.parametrize("experiments", SIMULATIONS)
@pytest.mark.parametrize(("blocks", "arms", "control"), [(3, 6, True), (5, 6, False), (5, 1, False)])
def test_equal_arms_rarely_get_a_verdict(blocks: int, arms: int, control: bool, experiments: int) -> None:
    """All arms are equal: "helps" or "hurts" is an error, which is allowed 1 in 20 times."""
    draw = random.Random(2)
    wrong = 0
    for _ in range(experiments):
        base = [draw.gauss(0, 0.05) for _ in range(blocks)]
        found = [compare([value - draw.gauss(0, 0.05) for value in base]) for _ in range(arms + 1)]
        noise = noise_of([found.pop()]) if control else None
        adjusted = holm([comparison.p for comparison in found[:arms]])
        judged = [judge(c, p, noise)[0] for c, p in zip(found[:arms], adjusted, strict=True)]
        wrong += any(word in ("helps", "hurts") for word in judged)
    # 20,000 experiments gave 4.8%; beyond a control as well, it is rarer still.
    assert wrong <= (experiments / 20 if control else most(experiments, 1 / 20))
