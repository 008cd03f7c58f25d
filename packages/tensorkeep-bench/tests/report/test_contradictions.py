"""No sentence of a report contradicts an interval on the same page, whatever the samples were."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from documents import broken, document, summarise, truth
from tensorkeep_bench.report import sentences, tables
from tensorkeep_bench.results import Results


class Row(NamedTuple):
    """What a table of verdicts shows of an arm: texts, and the numbers behind them."""

    verdict: str
    low: float | None
    high: float | None
    gain: float | None
    median: float | None

    @property
    def better(self) -> bool:
        return self.low is not None and self.low > 1

    @property
    def worse(self) -> bool:
        return self.high is not None and self.high < 1


Shown = dict[str, dict[str, Row]]  # by the label of the measure, then by arm
_NUMBER = r"[<>]?[\d.,]+(?:e[+-]?\d+)?"
_INTERVAL = rf"\(95% {_NUMBER} to {_NUMBER}\)"
_ROUNDED = 1.006  # figures are shown with three digits


def number(text: str) -> float:
    # The far ends of a very wide interval are cut off.
    if text[0] in "<>":
        return 0.0 if text[0] == "<" else math.inf
    return float(text.strip("x").replace(",", ""))


def rows(results: Results) -> Shown:
    found: Shown = {}
    for measure in results.primary():
        table = tables.verdict_table(results, measure)
        names = [heading.lstrip("=>") for heading in table.headings]
        for entries in table.rows:
            cells = dict(zip(names, entries, strict=True))
            interval = [number(end) for end in re.findall(_NUMBER, cells["95% interval"].text)]
            low, high = interval or (None, None)
            median = next(cell.order for name, cell in cells.items() if name.startswith("median"))
            shown = cells["gain"].text
            gain = None if shown == "-" else number(shown)
            row = Row(cells["verdict"].text, low, high, gain, median)
            noise = results.summary.noise.get(measure.name)
            check_row(row, cells["change"].text, noise.floor if noise else 1.0)
            found.setdefault(measure.label, {})[entries[0].text] = row
    return found


def check_row(row: Row, change: str, floor: float) -> None:
    if row.gain is not None and row.low is not None and row.high is not None:
        assert row.low / _ROUNDED <= row.gain <= row.high * _ROUNDED
    if row.gain is not None and change not in ("-", "0.0%"):
        # Both have three digits.
        assert (number(change.lstrip("+-").rstrip("%")) == 0) or (change[0] == "+") == (row.gain >= 1), (row, change)
    assert (row.verdict == "helps") <= (row.low is not None and row.low >= 1)
    assert (row.verdict == "hurts") <= (row.high is not None and row.high <= 1)
    if row.verdict == "within noise":
        assert not row.better and not row.worse and row.low is not None and row.high is not None
        assert 1 / floor <= max(row.low, 0.01) * _ROUNDED and min(row.high, 100.0) <= floor * _ROUNDED
    if row.verdict == "about the same":
        assert row.low is not None and row.high is not None and row.low >= 0.95 and row.high <= 1.05
    if row.verdict.startswith("undecided"):
        assert re.fullmatch(r"undecided after \d+ blocks", row.verdict)
    assert (row.verdict == "not run") <= (row.median is None)


# Each kind of sentence, and what must hold of the rows: a sentence that none of them matches fails the test.
Check = Callable[[re.Match[str], dict[str, Row]], object]


def _reached(match: re.Match[str], arms: dict[str, Row]) -> bool:
    low, high = (number(end) for end in re.findall(_NUMBER, match["interval"].removeprefix("(95% "))[:2])
    row = arms[match["arm"]]
    # Size is stated as a fraction of the bytes, with the inverse interval.
    return row.verdict == "helps" and (low >= 1 / _ROUNDED or high <= _ROUNDED)


def _overlapping(match: re.Match[str], arms: dict[str, Row]) -> bool:
    best, others = arms[match["arm"]], [arms[name] for name in re.split(", | and ", match["others"])]
    return all((other.high or 0) * _ROUNDED >= (best.low or 0) for other in others)


def check(text: str, checks: Sequence[tuple[str, Check]], arms: dict[str, Row]) -> None:
    for pattern, holds in checks:
        if match := re.fullmatch(pattern, text):
            assert holds(match, arms), (text, arms)
            return
    raise AssertionError(f"a sentence that this test does not know: {text!r}")


_ARM = r"(?P<arm>[a-d]|control)"
_COUNTS = r"(?:; of (?P<n>\d+): (?P<counts>.*?))?"
_HEADLINES: list[tuple[str, Check]] = [
    (
        rf"{_ARM} is {_NUMBER}x (?:faster|smaller|better) than a (?P<interval>{_INTERVAL}){_COUNTS}\.",
        lambda match, arms: _reached(match, arms) and _counted(match, arms),
    ),
    (
        rf"no arm is shown to be better than a{_COUNTS}\.",
        lambda match, arms: "helps" not in {row.verdict for row in arms.values()} and _counted(match, arms),
    ),
    (
        rf"not decided, \d+ of \d+ cells were not reached{_COUNTS}\.",
        lambda match, arms: "helps" not in {row.verdict for row in arms.values()} and _counted(match, arms),
    ),
    (
        rf"after \d+ blocks no verdict is possible: the baseline against itself spans .*\(95%\){_COUNTS}\.",
        lambda match, arms: not {"helps", "hurts"} & {row.verdict for row in arms.values()} and _counted(match, arms),
    ),
]


def _counted(match: re.Match[str], arms: dict[str, Row]) -> bool:
    words = {"better": "helps", "worse": "hurts", "with too few runs": "too few runs"}
    verdicts = [row.verdict for name, row in arms.items() if name not in ("a", "control")]
    counted = [part.split(" ", 1) for part in (match["counts"] or "").split(", ") if part]
    expected = {verdict: verdicts.count(verdict) for verdict in verdicts}
    counts = {words.get(word, word): int(count) for count, word in counted}
    # The table shows the status of arms that did not run instead of the verdict.
    not_run = {"failed", "not reached", "not run", "not measured"}
    without = sum(expected.pop(verdict, 0) for verdict in not_run)
    return counts == expected | ({"not run": without} if without else {})


_RECOMMENDED: list[tuple[str, Check]] = [
    (rf"{_ARM}, {_NUMBER}x a (?P<interval>{_INTERVAL})", _reached),
    (
        rf"{_ARM}, {_NUMBER} of the bytes of a(?: (?P<interval>{_INTERVAL}))?",
        lambda match, arms: arms[match["arm"]].better,
    ),
    (rf"{_NUMBER} of the bytes", lambda match, arms: True),
    (r"no arm is shown to be better than a|not decided, \d+ of \d+ cells were not reached", lambda match, arms: True),
    (rf"{_ARM}\|\d+ blocks do not decide whether it is better than (?P<others>.*)", _overlapping),
    (rf"{_ARM}\|but worse in .*", lambda match, arms: True),
    (rf"{_ARM}\|but it failed in \d+ of \d+ blocks", lambda match, arms: True),
]


def is_slower(text: str, words: str, shown: Shown) -> bool:
    """Return whether a text says that an arm is much slower than another one, which their intervals must show."""
    match = re.fullmatch(rf"([a-d]){words}{_NUMBER} times slower than ([a-d]) \((.*)\)", text)
    if match is None:
        return False
    slow, best = shown[match[3]][match[1]], shown[match[3]][match[2]]
    # The baseline has no interval, and a gain of 1.
    assert (slow.high or 1.0) < (best.low or 1.0) * _ROUNDED, (text, slow, best)
    return True


def check_advice(text: str, shown: Shown) -> None:
    """Check what to try first, and what to avoid."""
    arm, _, rest = text.partition(": ")
    if is_slower(text, ": ", shown):
        return
    better, _, worse = rest.partition("; but worse in ")
    if rest.startswith("worse in "):
        better, worse = "", rest.removesuffix(", and better in nothing").removeprefix("worse in ")
        assert "helps" not in {arms[arm].verdict for arms in shown.values()}, text
    for named, verdict in ((better, "helps"), (worse, "hurts")):
        expected = {label for label, arms in shown.items() if arms[arm].verdict == verdict}
        assert {label for label in shown if f"{label} " in named} == expected, (text, verdict)


def check_recommendation(found: Results, purpose: str, text: str, shown: Shown) -> None:
    label = {"saving": "durable save", "size": "bytes on disk"}.get(purpose)
    head, _, rest = text.removeprefix("on this machine, ").partition(": ")
    if purpose == "loading":
        label = head.removeprefix("loading (").rstrip(")")
    if label is None:
        check_all_round(rest, shown)
        return
    first, *others = rest.split("; ")
    # The arm is named once, at the beginning.
    arm = first.split(",")[0] if "," in first else "a"
    pieces = [first.removesuffix(f", {first.rpartition(', ')[2]}") if first.endswith(" of the bytes") else first]
    for other in others:
        # An arm is left out by another measure than the one that is recommended for.
        if not is_slower(other, " is left out: ", shown):
            pieces.append(f"{arm}|{other}")
    for piece in pieces:
        check(piece, _RECOMMENDED, shown[label])


_ALL_ROUND: list[tuple[str, Check]] = [
    (rf"{_ARM}: {_NUMBER}x a (?P<interval>{_INTERVAL})", lambda match, arms: _decided(match, arms)),
    (rf"{_ARM}: {_NUMBER} of the bytes of a(?: {_INTERVAL})?", lambda match, arms: _decided(match, arms)),
    (rf"{_ARM}: about the same as a", lambda match, arms: arms[match["arm"]].verdict == "about the same"),
    (
        rf"{_ARM}: (?P<verdict>within noise|undecided after \d+ blocks) {_INTERVAL}",
        lambda match, arms: arms[match["arm"]].verdict == match["verdict"],
    ),
]


def _decided(match: re.Match[str], arms: dict[str, Row]) -> bool:
    return arms[match["arm"]].verdict in ("helps", "hurts")


def check_all_round(text: str, shown: Shown) -> None:
    arm, *parts = text.split("; ")
    if arm.startswith(("no arm is shown to", "not decided, ")):
        return
    for part in parts:
        if part.startswith(("the gains of ", "but it failed in ")):
            continue
        purpose, _, rest = part.partition(": ")
        label = {"saving": "durable save", "size": "bytes on disk"}.get(purpose, purpose[9:-1])
        check(f"{arm}: {rest}", _ALL_ROUND, shown[label])


# The sentence at the top of the page: what an arm does better, and worse, by measure.
_PHRASES = {
    r"saves \S+ (faster|slower)": "durable save",
    r"loads \S+ (faster|slower) from the disk": "cold load",
    r"loads \S+ (faster|slower) from the page cache": "warm load",
    r"writes (?:\S+|a factor of \S+) (fewer|more) bytes": "bytes on disk",
}


def check_verdict(text: str, shown: Shown) -> None:
    for arm in re.findall(r"(?:Use |machine: )([a-d]) ", text):
        for pattern, label in _PHRASES.items():
            for word in re.findall(pattern, text):
                row = shown[label][arm]
                assert row.verdict == ("helps" if word in ("faster", "fewer") else "hurts"), (text, row)


def check_medians(found: Results, shown: Shown) -> None:
    for label, arms in shown.items():
        base = arms["a"].median
        for name, row in arms.items():
            if not base or not row.median or row.low is None or row.high is None or not row.gain:
                continue
            by_median = base / row.median
            if not row.low / 1.02 <= by_median <= row.high * 1.02:
                named = [one for one in found.summary.warnings if one.text.startswith(f"{label}: the medians differ")]
                assert named and f"{name} (" in named[0].text, (label, name, row, by_median)


_CELL = st.sampled_from(["ok"] * 12 + ["gate", "failed", "planned"])


@st.composite
def made(draw: st.DrawFn) -> dict[str, Any]:
    """Return results of two to four arms: equal ones and different ones, quiet and noisy, whole and with failures."""
    names = "abcd"[: draw(st.integers(2, 4))]
    gains = [1.0, *draw(st.lists(st.sampled_from([1.0, 1.03, 0.97, 1.3, 0.7, 4.0, 15.0]), min_size=3, max_size=3))]
    arms = {
        name: truth(1 / gain, cold=gain**0.5, warm=0.5 / gain**0.5, stored=draw(st.sampled_from([1.0, 0.98, 0.66])))
        for name, gain in zip(names, gains, strict=False)
    }
    runs = draw(st.integers(1, 5))
    replaced = [
        broken(name, block, status) for name in names for block in range(runs) if (status := draw(_CELL)) != "ok"
    ]
    options = {
        "runs": runs,
        "noise": draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.5])),
        "drift": draw(st.sampled_from([0.0, 0.5])),
        "seed": draw(st.integers(0, 1000)),
        "control": draw(st.sampled_from([None, "control"])),
        "replaced": replaced,
    }
    found = document(arms, **options)
    turns = draw(st.sampled_from([None, 0.01, 0.1]))
    if turns is not None:
        # Turns that say something else than the whole runs do.
        for index, cell in enumerate(found["cells"]):
            if cell["arm"] != "a" and cell["status"] == "ok":
                factor = gains["abcd".find(cell["arm"])] if cell["arm"] in names else 1.0
                cell["turns"] = {
                    "save": [(1.0, factor * (1 + turns * ((index + place) % 5 - 2))) for place in range(4)]
                }
    return found


# Without shrinking: every example makes thousands of resamples.
@settings(deadline=None, phases=(Phase.explicit, Phase.generate))
@given(made())
def test_no_sentence_of_a_report_contradicts_an_interval_on_its_page(document: dict[str, Any]) -> None:
    check_report(document)


def check_report(document: dict[str, Any]) -> None:
    found = msgspec.convert({**document, "summary": summarise(document)}, Results)
    shown = rows(found)
    check_medians(found, shown)
    headlines = sentences.headlines(found)
    if found.ran("a"):
        for measure, headline in zip(found.primary(), headlines, strict=True):
            label, _, rest = headline.partition(": ")
            assert label.lower() == measure.label
            check(rest, _HEADLINES, shown[measure.label])
    verdict = sentences.verdict_sentence(found)
    check_verdict(verdict, shown)
    for one in found.summary.recommendations:
        check_recommendation(found, one.purpose, one.text, shown)
    for advice in (*found.summary.try_first, *found.summary.avoid):
        check_advice(advice.text, shown)
