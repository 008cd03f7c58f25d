"""The summary of documents that were made from known true gains."""

import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from documents import GIB, MEASURES, broken, document, results, summarise, truth
from tensorkeep.testing.cases import case
from tensorkeep_bench.analysis.advice import candidates
from tensorkeep_bench.analysis.samples import Samples
from tensorkeep_bench.report.sentences import headlines, verdict_sentence
from tensorkeep_bench.results import read_results

ARMS = {"torch": truth(), "fast": truth(0.4, cold=0.5), "small": truth(1.0, stored=0.66), "slow": truth(3.0)}
EXPECTED = {"torch": "baseline", "control": "control", "fast": "helps", "small": "about the same", "slow": "hurts"}


def words(summary: dict[str, Any], measure: str = "save") -> dict[str, str]:
    return {arm: found[measure]["verdict"] for arm, found in summary["arms"].items()}


def texts(summary: dict[str, Any]) -> list[str]:
    return [warning["text"] for warning in summary["warnings"]]


def warning(summary: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the first warning that contains a text."""
    return next(each for each in summary["warnings"] if text in each["text"])


def test_verdicts_match_the_true_gains_and_p_values_are_adjusted_for_the_arms_of_a_measure() -> None:
    made = document(ARMS)
    summary = summarise(made)
    assert words(summary) == EXPECTED
    same = {"fast": "about the same", "small": "helps", "slow": "about the same"}
    assert words(summary, "stored") == {**EXPECTED, **same}
    found = summary["arms"]["fast"]["returned"]
    assert found["gain"] == pytest.approx(2.5, rel=0.1)
    assert (found["verdict"], found["reason"]) == (None, None), "a measure that is not primary has no verdict"
    tests = [summary["arms"][arm]["save"] for arm in ("fast", "small", "slow")]
    first, second, _ = sorted(tests, key=lambda test: test["p"])
    # Three tests: the control is none.
    assert (first["p_holm"], second["p_holm"]) == pytest.approx((3 * first["p"], 2 * second["p"]))
    control = summary["arms"]["control"]["save"]
    assert control["p"] is not None and control["p_holm"] is None
    assert json.dumps(summarise({**made, "summary": summary})) == json.dumps(summary), "not deterministic"
    json.dumps(summary, allow_nan=False)
    assert made == document(ARMS), "the document was changed"


def test_the_figures_of_a_suite_have_its_names() -> None:
    made = document(ARMS)
    summary = summarise(made)
    assert summary["tests"].keys() == summary["arms"].keys()
    for arm, found in summary["arms"].items():
        named = {"save": (found["save"], 1), "load": (found["load_cold"], 1), "size": (found["stored"], GIB)}
        expected = {
            f"{name}_{kind}": one[kind] / unit for name, (one, unit) in named.items() for kind in ("mean", "std")
        }
        assert summary["tests"][arm] == pytest.approx(expected)
    # An arm that saved a tenth of the state has the figures of the whole state.
    whole = {"subject": {"bytes": 10 * GIB}}
    tenth = summarise({**document(ARMS, noise=0.0, amounts={"torch": 10 * GIB, "fast": GIB}), **whole})["tests"]
    assert (tenth["torch"]["save_mean"], tenth["fast"]["save_mean"]) == pytest.approx((10.0, 4.0))
    assert tenth["fast"]["size_mean"] == pytest.approx(10.0)
    # Without a cold load, the warm one.
    for each in made["cells"]:
        del each["figures"]["load_cold"]
    warm = summarise(made)
    assert warm["tests"]["fast"]["load_mean"] == warm["arms"]["fast"]["load_warm"]["mean"]
    assert summarise({**made, "measures": [MEASURES[2]]})["tests"] == {}


def test_statistics_by_hand() -> None:
    made = document({"a": truth(), "b": truth()}, runs=2, control=None)
    figures = {"a": [4.0, 9.0], "b": [1.0, 4.0]}
    for cell in made["cells"]:
        cell["figures"] = {"save": figures[cell["arm"]][cell["block"]]}
        cell["amount"] = 100 if cell["arm"] == "a" else 50
    found = summarise(made)["arms"]["b"]["save"]
    # Per byte, a takes 0.04 and 0.09 and b 0.02 and 0.08: 2 and 9/8 times better.
    assert found["gain"] == pytest.approx(math.sqrt(2 * 9 / 8))
    assert found["change_percent"] == pytest.approx((1 - 1 / 1.5) * 100)
    assert (found["n"], found["mean"], found["median"], found["low"], found["high"]) == (2, 2.5, 2.5, 1.0, 4.0)
    assert (found["std"], found["per_byte"]) == pytest.approx((math.sqrt(4.5), 0.05))
    assert found["p"] == found["p_holm"]
    assert summarise(made)["arms"]["a"]["save"]["gain"] is None


def test_intervals_contain_the_true_gains_also_where_the_machine_drifts() -> None:
    held = 0
    for seed in range(10):
        found = summarise(document(ARMS, seed=seed, drift=0.5, noise=0.05))["arms"]["fast"]["save"]
        held += found["gain_low"] <= 2.5 <= found["gain_high"]
    assert held >= 8
    found = summarise(document(ARMS, drift=2.0, noise=0.01, runs=6))["arms"]["fast"]["save"]
    assert found["std"] / found["mean"] > 0.5
    assert (found["gain_low"], found["gain_high"]) == pytest.approx((2.5, 2.5), rel=0.05)


@given(st.randoms(), st.floats(0.01, 100), st.floats(0.01, 100))
@settings(max_examples=4)
def test_order_of_cells_unit_and_size_do_not_change_gains(draw: Random, seconds: float, amount: float) -> None:
    made = document(ARMS, runs=3)
    found = summarise(made)["arms"]
    assert summarise({**made, "cells": draw.sample(made["cells"], len(made["cells"]))})["arms"] == found
    for cell in made["cells"]:
        cell["amount"] *= amount
        cell["figures"] = {name: value * seconds for name, value in cell["figures"].items()}
    for arm, measures in summarise(made)["arms"].items():
        scaled, plain = measures["save"], found[arm]["save"]
        assert (scaled["gain"] or 1) == pytest.approx(plain["gain"] or 1, rel=1e-9)
        assert scaled["verdict"] == plain["verdict"]


def test_swapping_baseline_and_arm_inverts_the_gain() -> None:
    arms = {"a": truth(), "b": truth(0.4)}
    made = document(arms, control=None)
    swapped = {**made, "arms": document(arms, control=None, baseline="b")["arms"]}
    one, other = summarise(made)["arms"]["b"]["save"], summarise(swapped)["arms"]["a"]["save"]
    assert other["gain"] == pytest.approx(1 / one["gain"])
    assert (other["gain_low"], other["gain_high"]) == pytest.approx((1 / one["gain_high"], 1 / one["gain_low"]))
    assert (one["verdict"], other["verdict"]) == ("helps", "hurts")


def test_one_block_has_no_verdict_and_blocks_without_variance_have() -> None:
    summary = summarise(document(ARMS, runs=1))
    found = summary["arms"]["fast"]["save"]
    assert found["gain"] == pytest.approx(2.5, rel=0.1)
    assert [found[key] for key in ("gain_low", "p", "p_holm", "detectable", "std")] == [None] * 5
    assert (found["verdict"], summary["noise"]["save"]) == ("too few runs", None)
    # Files have the same size in every run, so that one block is enough for a verdict on it, and on it alone.
    assert words(summary, "stored") == words(summarise(document(ARMS)), "stored")
    found = summary["arms"]["small"]["stored"]
    assert (found["blocks"], found["gain_low"], found["gain_high"]) == (1, found["gain"], found["gain"])
    assert not [text for text in texts(summary) if text.startswith("bytes on disk")]
    assert recommended(summary) == {"size": "small"}
    assert (summary["try_first"], summary["avoid"]) == ([], [])
    assert "durable save: one block gives no verdict on fast, small and slow" in texts(summary)
    summary = summarise(document(ARMS, noise=0.0))
    assert words(summary) == EXPECTED
    assert (summary["noise"]["save"]["floor"], summary["warnings"]) == (1.0, [])
    json.dumps(summary, allow_nan=False)


def test_blocks_without_the_baseline_do_not_count() -> None:
    summary = summarise(document(ARMS, replaced=[broken("torch", 2)]))
    assert summary["arms"]["fast"]["save"]["n"] == 5
    whole = document(ARMS)
    without = {**whole, "cells": [cell for cell in whole["cells"] if cell["block"] != 2]}
    assert summary["arms"]["fast"]["save"]["gain"] == summarise(without)["arms"]["fast"]["save"]["gain"]
    assert "torch: failed in 1 of 5 blocks: it broke" in texts(summary)
    # Without any, nothing is compared.
    made = document(ARMS, replaced=[broken("torch", block, "memory", "128 GB needed") for block in range(5)])
    found = [summarise(made)["arms"]["fast"]["save"][key] for key in ("verdict", "n", "gain", "reason")]
    assert found == ["not compared", 5, None, "the baseline torch was not run: 128 GB needed"]
    for arm in made["arms"]:
        arm["role"] = "arm"
    assert summarise(made)["arms"]["fast"]["save"]["reason"] == "the experiment has no baseline to compare with"
    assert summarise(made)["recommendations"] == []


def test_arms_that_did_not_run_or_failed_a_gate_have_the_reason_and_are_grouped_by_it() -> None:
    replaced = [broken("fast", block, "not-run", "zipnn is not installed") for block in range(5)]
    save = summarise(document(ARMS, replaced=replaced))["arms"]["fast"]["save"]
    assert (save["n"], save["gain"], save["verdict"], save["reason"]) == (0, None, "not run", "zipnn is not installed")
    planned = [broken("fast", block, "planned", None) for block in range(5)]
    summary = summarise(document(ARMS, replaced=planned))
    assert summary["arms"]["fast"]["save"]["reason"] == "not reached yet"
    assert {"text": "5 of 25 cells were not reached", "remedy": "continue with --resume"} in summary["warnings"]
    assert {entry["text"].partition(": ")[2] for entry in summary["recommendations"] if not entry["arm"]} <= {
        "not decided, 5 of 25 cells were not reached"
    }
    # One failed gate invalidates all figures of an arm.
    summary = summarise(document(ARMS, replaced=[broken("fast", 3, "gate", "tensor 'w' differs")]))
    reason = "the loaded state differs from the saved one, in 1 of 5 blocks: tensor 'w' differs"
    found = [summary["arms"]["fast"]["save"][key] for key in ("verdict", "gain", "reason")]
    assert found == ["wrong result", None, reason]
    assert "fast" not in {entry["arm"] for entry in summary["recommendations"]}
    assert texts(summary)[0] == "fast: the loaded state differs from the saved one in 1 of 5 blocks: tensor 'w' differs"
    reasons = {"small": "no GPU", "slow": "no GPU", "fast": "no compiler"}
    absent = [broken(arm, 0, "not-run", why) for arm, why in reasons.items()]
    absent += [broken(arm, block, "not-run", "not repeated") for arm in reasons for block in (1, 2)]
    found = [text for text in texts(summarise(document(ARMS, runs=3, replaced=absent))) if "not run" in text]
    assert found == ["not run: fast: no compiler", "not run: small and slow: no GPU"]


def test_figures_that_are_nan_or_negative_or_of_a_failed_cell_do_not_count_and_zero_has_no_ratio() -> None:
    wrong = {**broken("fast", 1), "figures": {"save": 1e9}}
    found = summarise(document(ARMS, replaced=[wrong]))["arms"]["fast"]["save"]
    assert (found["n"], found["high"] < 1, found["gain"]) == (4, True, pytest.approx(2.5, rel=0.1))
    made = document(ARMS)
    for cell in made["cells"]:
        cell["figures"]["stored"] = 0.0
        if cell["arm"] == "fast" and cell["block"] < 2:
            cell["figures"]["save"] = [math.nan, -1.0][cell["block"]]
    found = summarise(made)["arms"]["fast"]
    assert found["save"]["n"] == 3
    assert [found["stored"][key] for key in ("n", "mean", "gain", "verdict")] == [5, 0.0, None, "not compared"]


# Warnings


def test_noisy_arms_and_slow_blocks_are_named() -> None:
    noisy = warning(summarise(document(ARMS, noise=0.3)), "varies by more than 10%")
    assert "fast (" in noisy["text"]
    assert noisy["remedy"] == "close other programs, or --runs 10"
    assert not [text for text in texts(summarise(document(ARMS, noise=0.01))) if "varies" in text]
    for block, factor, expected in ((0, 1, None), (0, 1.15, "the first block was"), (2, 1.6, "block 3 was 1.5")):
        made = document(ARMS, noise=0.01)
        for cell in made["cells"]:
            if cell["block"] == block:
                cell["figures"]["save"] *= factor
        found = [text for text in texts(summarise(made)) if "slower than the rest" in text]
        with case(f"block {block} is {factor} times slower"):
            assert len(found) == (expected is not None)
            assert all(str(expected) in text for text in found)


def with_control(factors: Sequence[float], gain: float = 0.9) -> dict[str, Any]:
    """Return the summary of an arm whose control saves this many times slower, block by block, without other noise."""
    made = document({"a": truth(), "b": truth(gain)}, runs=len(factors), noise=0.0)
    for cell in made["cells"]:
        if cell["arm"] == "control":
            cell["figures"]["save"] *= factors[cell["block"]]
    return summarise(made)


def test_the_control_sets_the_noise_floor_and_may_allow_no_verdict() -> None:
    # The same thing once more, and 15% slower on the average: nothing below may be called a difference.
    summary = with_control([1.15 + 0.001 * block for block in range(5)])
    found = summary["arms"]["b"]["save"]
    assert summary["noise"]["save"]["floor"] == found["detectable"] == pytest.approx(1.155, abs=0.01)
    assert (found["verdict"], found["p_holm"]) == ("undecided", 0)
    assert any("differences below 15% are noise" in text for text in texts(summary))
    summary = with_control([1, 5])
    assert min(summary["noise"]["save"]["floor"], summary["noise"]["save"]["high"]) > 100
    wide = warning(summary, "no verdict is possible")
    spread = "the baseline against itself spans <0.01 to >100 (95%)"
    assert wide["text"] == f"durable save: after 2 blocks no verdict is possible: {spread}"
    assert wide["remedy"] == "close other programs, or --runs 10"
    assert not [text for text in texts(summary) if "are noise" in text]
    # A gain beyond a large floor is still found.
    summary = with_control([1, 20, 1, 20, 20], gain=0.005)
    assert 10 < summary["noise"]["save"]["floor"] < 200
    assert words(summary)["b"] == "helps"
    assert any("differences below a factor of" in text for text in texts(summary))
    assert not [text for text in texts(summary) if "no verdict is possible" in text]


def test_the_number_of_runs_that_would_suffice_is_computed() -> None:
    made = document({"a": truth(), "b": truth(0.85)}, runs=3, noise=0.08, control=None, seed=3)
    summary = summarise(made)
    assert words(summary)["b"] == "undecided"
    assert 4 <= int(warning(summary, "durable save: 3 blocks cannot show")["remedy"].split()[1]) <= 60
    made = document({"a": truth(), "b": truth(0.85)}, runs=40, noise=0.08, seed=1)
    assert words(summarise(made))["b"] == "helps"


def test_missing_cold_loads_smaller_subjects_and_very_short_times_are_reported() -> None:
    made = document(ARMS)
    for cell in made["cells"]:
        cell["figures"].pop("load_cold")
    summary = summarise(made)
    assert words(summary, "load_cold") == dict.fromkeys([*ARMS, "control"], "not run")
    assert any("cold load: not measured for any arm" in text for text in texts(summary))
    assert "warm load" in next(entry["text"] for entry in summary["recommendations"] if entry["for"] == "loading")
    for cell in (made := document(ARMS))["cells"]:
        if cell["arm"] == "small":
            cell["figures"].pop("load_cold")
    assert any(text.startswith("cold load: not measured for small: ") for text in texts(summarise(made)))
    # Arms on smaller subjects, and very short times.
    summary = summarise(document(ARMS, amounts={"slow": GIB / 64}))
    assert summary["arms"]["slow"]["save"]["gain"] == pytest.approx(1 / 3, rel=0.1)
    [smaller] = [one for one in summary["warnings"] if one["text"].startswith("slow worked on 16.8 MB, torch on 1.07")]
    assert smaller["remedy"] == "measure all arms on the same model: --model test, without --slow-model"
    made = document(ARMS, amounts=dict.fromkeys([*ARMS, "control"], GIB / 100))
    assert any("durable save: takes less than 50.0 ms with" in text for text in texts(summarise(made)))


def test_where_a_budget_ended_the_run_a_larger_one_is_the_remedy() -> None:
    made = document(ARMS, runs=1)
    for cell in made["cells"]:
        cell["seconds"] = 10.0
    for budget, runs, expected in (
        (None, 1, "--runs 5"),
        (1000.0, 1, "--runs 5"),
        (60.0, None, "--runs 5"),
        (60.0, 5, "a --budget of more than 60 s"),
        # The arms were precise enough before.
        (1000.0, 5, "--runs 5"),
    ):
        made["experiment"].update(budget=budget, runs=runs)
        with case(f"{budget} {runs}"):
            few = next(one for one in summarise(made)["warnings"] if "one block gives no verdict" in one["text"])
            assert few["remedy"] == expected


def test_every_warning_has_a_remedy_and_the_written_summary_can_be_read(tmp_path: Path) -> None:
    replaced = [broken("slow", 1, "timeout", None), broken("fast", 0, "disk"), broken("fast", 1, "gate")]
    made = document(ARMS, noise=0.3, runs=3, control=None, replaced=replaced)
    warnings = summarise(made)["warnings"]
    assert any("without an A/A control" in warning["text"] for warning in warnings)
    assert len(warnings) > 4 and all(warning["text"] and warning["remedy"] for warning in warnings)
    (tmp_path / "results.json").write_text(json.dumps({**made, "summary": summarise(made)}))
    found = read_results(tmp_path)
    assert (found.statistics("small", "save").verdict, len(found.summary.warnings)) == ("undecided", len(warnings))


# The change that matters most


def sweep(**gains: float) -> dict[str, Any]:
    """Return the summary of single changes of one writer, with these gains in saving, beside a tool of another kind."""
    base = {"chunk": "64", "concurrency": 1, "compressor": None}
    changed = {"chunks": {"chunk": 262144}, "parallel": {"concurrency": 128}, "gzip": {"compressor": "gzip"}}
    settings = {"base": base, "torch": {}, **{name: {**base, **change} for name, change in changed.items()}}
    arms = {"base": truth(), "torch": truth(0.01), **{name: truth(1 / gains.get(name, 1.0)) for name in changed}}
    return summarise(document(arms, noise=0.02, settings=settings))


def test_the_kind_of_change_that_gains_clearly_more_than_all_others_is_the_key() -> None:
    key = sweep(chunks=9.0, parallel=1.2, gzip=0.9)["key"]
    assert re.fullmatch(
        r"Chunking is the key: chunks saves \S+ times as fast as base \(95% .*\); "
        r"alone, concurrency 1.\d+x \(95% .*\) and compression 0.\d+x \(95% .*\)\.",
        key,
    )
    assert sweep(chunks=1.5, parallel=9.0)["key"].startswith("Concurrency is the key: parallel saves ")
    # Neither gains more than the other, or nothing gains.
    assert sweep(chunks=2.0, parallel=2.0)["key"] == sweep(chunks=0.5, gzip=0.9)["key"] == ""


# Recommendations


def recommended(summary: dict[str, Any]) -> dict[str, str | None]:
    return {entry["for"]: entry["arm"] for entry in summary["recommendations"]}


def test_arms_that_help_are_recommended() -> None:
    # An arm that another beats everywhere is not named.
    made = document({**ARMS, "beaten": truth(0.8, cold=0.8)}, noise=0.001, settings={"fast": {"tool": "tensorkeep"}})
    summary = summarise(made)
    assert recommended(summary) == {"saving": "fast", "loading": "fast", "size": "small", "all": "fast"}
    saving = summary["recommendations"][0]
    found = summary["arms"]["fast"]["save"]
    gain = f"{found['gain']:.2f}x torch (95% {found['gain_low']:.2f} to {found['gain_high']:.2f})"
    assert saving["text"] == f"on this machine, saving: fast, {gain}, 1.00 of the bytes"
    assert saving["settings"] == {"tool": "tensorkeep"}
    assert summary["recommendations"][2]["text"] == "on this machine, size: small, 0.660 of the bytes of torch"
    all_round = r"on this machine, all round: fast; .*; the gains of small are larger in some and smaller in others"
    assert re.fullmatch(all_round, summary["recommendations"][3]["text"])


def test_advice_says_what_to_try_in_order_by_which_call_and_what_to_avoid() -> None:
    arms = {**ARMS, "fastest": truth(0.1, cold=0.4), "costly": truth(0.5, stored=4.0), "far": truth(40.0, stored=0.5)}
    places = {"fastest": [{"kind": "combination", "changes": ["one", "two"]}]}
    made = document(arms, noise=0.001, places=places)
    for arm in made["arms"]:
        arm["use"] = f"use {arm['name']}"
    summary = summarise(made)
    found = {entry["arm"]: entry["text"] for entry in summary["try_first"]}
    assert list(found) == ["fastest", "fast", "small"]
    assert found["fastest"].startswith("fastest (one + two): durable save 10.0x and cold load 2.50x")
    assert found["small"] == "small: bytes on disk 1.52x"
    for entry in [*summary["try_first"], *summary["recommendations"]]:
        assert entry["use"] == f"use {entry['arm']}"
    assert "saving: fastest (one + two), " in summary["recommendations"][0]["text"]
    avoided = {entry["arm"]: entry["text"] for entry in summary["avoid"]}
    assert avoided == {
        "torch": "torch: 10.0 times slower than fastest (durable save)",
        "slow": "slow: 30.0 times slower than fastest (durable save)",
        "far": "far: 400 times slower than fastest (durable save)",
    }
    summary = summarise(document({"torch": truth(), "slow": truth(3.0), "same": truth()}, noise=0.001))
    avoided = {entry["arm"]: entry["text"] for entry in summary["avoid"]}
    assert avoided == {"slow": "slow: worse in durable save (0.333x), and better in nothing"}
    assert summary["try_first"] == []
    # One block, and intervals that overlap, show nothing.
    for options in ({"runs": 1}, {"noise": 3.0}):
        summary = summarise(document({"torch": truth(20.0), "fast": truth()}, **options))
        assert (summary["try_first"], summary["avoid"]) == ([], [])


def test_neither_the_control_nor_arms_without_sync_or_with_wrong_values_are_recommended() -> None:
    arms = {name: truth(0.1) for name in ("loose", "loose too", "wrong")}
    arms = {"torch": truth(), **arms, "fast": truth(0.5)}
    unsafe = {"loose": {"sync": False}, "loose too": {"fsync": False}}
    made = document(arms, settings=unsafe, replaced=[broken("wrong", 0, "gate")])
    assert [arm.name for arm in candidates(Samples(results(made)))] == ["fast"]
    for cell in made["cells"]:
        if cell["arm"] == "control":
            cell["figures"]["load_cold"] *= 0.1
    assert recommended(summarise(made)) == {"saving": "fast", "loading": None, "size": None, "all": "fast"}


def test_a_recommendation_names_what_becomes_worse_failures_and_arms_that_are_close() -> None:
    summary = summarise(document({"torch": truth(), "b": truth(0.3, cold=4.0)}))
    assert recommended(summary) == {"saving": "b", "loading": None, "size": None, "all": None}
    assert "; but worse in cold load (0.2" in summary["recommendations"][0]["text"]
    made = document({"torch": truth(), "fast": truth(0.5, cold=0.5)}, replaced=[broken("fast", 2)])
    texts = [entry["text"] for entry in summarise(made)["recommendations"] if entry["arm"] == "fast"]
    assert ["; but it failed in 1 of 5 blocks" in text for text in texts] == [True] * 3
    # Arms that are not clearly behind the best one.
    summary = summarise(document({"torch": truth(), "b": truth(0.300), "c": truth(0.301), "d": truth(0.5)}))
    text = summary["recommendations"][0]["text"]
    assert "5 blocks do not decide whether it is better than c" in text and " d " not in text
    # First loads count all round, too.
    made = document({"torch": truth(load_first=1.0), "fast": truth(0.5, load_first=2.0)})
    made["measures"] = [*MEASURES, {**MEASURES[0], "name": "load_first", "label": "first load"}]
    expected = {"saving": "fast", **dict.fromkeys(("first load", "loading", "size", "all"))}
    assert recommended(summarise(made)) == expected


# 36 times faster than the baseline at 6% more bytes, beside one that is 9 times faster and 6% smaller.
SIX_WAY = {"tensorstore": truth(36.0, cold=20.0), "torch": truth(stored=1.06), "t5x": truth(4.0, cold=3.0, stored=0.94)}


def test_neither_a_few_percent_nor_half_of_the_bytes_outweigh_ten_times_the_speed() -> None:
    summary = summarise(document(SIX_WAY))
    assert words(summary, "stored")["torch"] == "hurts"
    assert recommended(summary) == {"saving": "torch", "loading": "torch", "size": "t5x", "all": "torch"}
    assert "size: 1.06 of the bytes of tensorstore" in summary["recommendations"][3]["text"]
    # An arm that is ten times slower than another is never recommended.
    summary = summarise(document({**SIX_WAY, "t5x": truth(12.0, cold=3.0, stored=0.5)}, noise=0.0))
    assert recommended(summary) == {"saving": "torch", "loading": "torch", "size": None, "all": "torch"}
    assert summary["recommendations"][2]["text"] == (
        "on this machine, size: no arm is shown to be better than tensorstore; "
        "t5x is left out: 12.0 times slower than torch (durable save)"
    )
    slower_than_the_baseline = summarise(document({"torch": truth(), "small": truth(11.0, stored=0.5)}))
    assert recommended(slower_than_the_baseline)["size"] is None


def test_5_percent_better_is_about_the_same_and_more_than_a_tenth_worse_is_not_better_all_round() -> None:
    for fraction, arm in ((1.09, "b"), (1.2, None)):
        made = document({"torch": truth(), "b": truth(0.5, cold=fraction)}, noise=0.005)
        with case(f"cold loads take {fraction} times as long"):
            assert recommended(summarise(made))["all"] == arm
    summary = summarise(document({"torch": truth(), "b": truth(0.97), "c": truth(0.9)}, noise=0.001))
    assert (words(summary)["b"], words(summary)["c"]) == ("about the same", "helps")
    assert recommended(summary)["saving"] == "c"
    # Nothing is recommended where no arm helps.
    summary = summarise(document({"torch": truth(), "same": truth(), "slow": truth(2.0)}))
    assert recommended(summary) == dict.fromkeys(("saving", "loading", "size", "all"))
    for entry, kind in ((0, "saving"), (-1, "all round")):
        text = f"on this machine, {kind}: no arm is shown to be better than torch"
        assert summary["recommendations"][entry]["text"] == text


def test_a_small_state_has_no_verdict_and_no_recommendation() -> None:
    made = document(ARMS, noise=0.3)
    made["subject"]["bytes"] = 525_000
    summary = summarise(made)
    assert words(summary) == {**EXPECTED, **dict.fromkeys(ARMS.keys() - {"torch"}, "too small")}
    assert (summary["recommendations"], summary["warnings"]) == ([], [])
    found = results({**made, "summary": summary})
    [only, size] = headlines(found)
    # A sentence of its own, which the verdict repeats and nothing runs into.
    assert only.startswith("A state of 525 kB is too small to time") and only.endswith(".")
    assert verdict_sentence(found) == only
    # Bytes are exact at any size.
    assert words(summary, "stored")["small"] == "helps"
    assert size.startswith("Bytes on disk: small is 1.52x smaller than torch")


def test_a_technique_within_noise_is_not_recommended() -> None:
    speed = {"name": "tokens_per_second", "label": "speed", "unit": "tokens/s", "better": "higher", "primary": True}
    loss = {"name": "loss", "label": "loss", "unit": "nats", "better": "lower", "primary": True}
    rates = {"plain": 1000.0, "equal": 1001.0, "little": 1030.0, "faster": 1500.0, "worse": 1600.0}
    arms = {name: {"tokens_per_second": rate, "loss": 2.1 if name == "worse" else 2.0} for name, rate in rates.items()}
    made = {**document(arms, noise=0.004, workload="training"), "measures": [speed, loss]}
    summary = summarise(made)
    found = words(summary, "tokens_per_second")
    assert [found[name] for name in rates] == ["baseline", "about the same", "about the same", "helps", "helps"]
    # A rate is better when it is higher, and is not divided by bytes.
    for cell in made["cells"]:
        cell["amount"] = 10.0 if cell["arm"] == "faster" else GIB
    faster = summarise(made)["arms"]["faster"]["tokens_per_second"]
    assert (faster["gain"], faster["change_percent"]) == pytest.approx((1.5, 50), rel=0.02)
    assert recommended(summary) == {"speed": "worse", "loss": None, "all": "faster"}


# Designs


def test_steps_lead_from_the_base_to_the_full_stack() -> None:
    arms = {"base": truth(8.0), "+x": truth(4.0), "+y": truth(1.0), "only y": truth(3.0)}
    places = {
        "base": [{"kind": "base"}],
        "+x": [{"kind": "step", "change": "x", "index": 1}, {"kind": "alone", "change": "x"}],
        "+y": [{"kind": "step", "change": "y", "index": 2}, {"kind": "full"}],
        "only y": [{"kind": "alone", "change": "y"}, {"kind": "without", "change": "x"}],
    }
    omitted = [{"place": {"kind": "without", "change": "y"}, "reason": "z needs it"}]
    made = document(arms, noise=0.0, places=places, design="steps", omitted=omitted)
    steps = summarise(made)["steps"]
    x, y = (step for step in steps if step["measure"] == "save")
    assert (x["change"], x["arm"], x["gain_from_previous"], x["gain_from_base"]) == ("x", "+x", *[pytest.approx(2)] * 2)
    assert (x["fraction"], x["alone"], x["without"]) == pytest.approx((1 / 3, 2, 3))
    assert [y[f"gain_from_{key}"] for key in ("previous", "previous_low", "previous_high")] == pytest.approx([4] * 3)
    assert (y["gain_from_base"], y["fraction"], y["alone"]) == pytest.approx((8, 2 / 3, 8 / 3))
    assert (x["notes"], y["without"], y["notes"]) == ([], None, ["without: z needs it"])
    noisy = summarise(document({**arms, "+y": truth(7.0)}, noise=0.5, places=places, seed=4))
    assert noisy["arms"]["+y"]["save"]["gain"] > 1
    assert noisy["steps"][0]["fraction"] is None
    cold = [step for step in steps if step["measure"] == "load_cold"]
    assert all(step["fraction"] is None for step in cold)
    assert "fraction: the full stack is not shown to be better than the base" in cold[0]["notes"]


def points(factors: dict[str, list[str]]) -> dict[str, Any]:
    """Return places of a design's points, by name, the first being the base."""
    levels = [dict(zip(factors, point, strict=True)) for point in itertools.product(*factors.values())]
    return {"/".join(each.values()): [{"kind": "point", "levels": each}] for each in levels}


def effects(made: dict[str, Any]) -> dict[tuple[str, ...], Any]:
    return {tuple(each["factors"]): each for each in summarise(made)["effects"] if each["measure"] == "save"}


def test_effects_of_a_full_factorial() -> None:
    factors = {"chunk": ["64", "1k", "1M"], "codec": ["raw", "gzip"], "dtype": ["32", "16"]}
    times = {"64": 8.0, "1k": 4.0, "1M": 1.0, "raw": 1.0, "gzip": 3.0, "32": 2.0, "16": 1.0}
    places = points(factors)
    # gzip hurts only half as much with chunks of 1M: what both give together is twice the product.
    arms = {
        name: truth(math.prod(times[level] for level in name.split("/")) * (0.5 if "1M/gzip" in name else 1))
        for name in places
    }
    replaced = [broken("1k/raw/32", 0)]
    made = document(arms, noise=0.0, drift=0.5, places=places, factors=factors, design="factorial", replaced=replaced)
    found = effects(made)
    expected = {("chunk",): 8 * math.sqrt(2), ("dtype",): 2, ("chunk", "codec"): 2, ("chunk", "dtype"): 1}
    assert {factors: found[factors]["gain"] for factors in expected} == pytest.approx(expected)
    assert found["codec",]["gain"] == pytest.approx(1 / 3 * 2 ** (1 / 3), rel=0.1)
    assert (found["dtype",]["low"], len(found)) == (pytest.approx(2), 6)


def test_effects_of_a_fractional_factorial() -> None:
    factors = {name: ["-", "+"] for name in "ABCD"}
    places = {name: place for name, place in points(factors).items() if name.count("+") % 2 == 0}  # I = ABCD
    gains = {"A": 2.0, "B": 3.0, "C": 1.0, "D": 0.5}
    arms = {}
    for name, [place] in places.items():
        levels = place["levels"]
        gain = math.prod(gains[factor] for factor, level in levels.items() if level == "+")
        arms[name] = truth(1 / (gain * (1.5 if levels["A"] == levels["B"] == "+" else 1)))
    aliases = [[["A", "B"], ["C", "D"]], [["A", "C"], ["B", "D"]], [["A", "D"], ["B", "C"]]]
    made = document(arms, noise=0.0, places=places, factors=factors, aliases=aliases, design="fractional")
    found = effects(made)
    # The interaction is spread over A and B, half of it (on a log scale) each, as in the full factorial.
    expected = {("A",): 2 * math.sqrt(1.5), ("C",): 1, ("D",): 0.5, ("A", "B"): 1.5}
    assert {factors: found[factors]["gain"] for factors in expected} == pytest.approx(expected)
    assert (found["A", "B"]["aliases"], found["A",]["aliases"]) == ([["C", "D"]], [])
    assert found["C", "D"]["gain"] == found["A", "B"]["gain"]
    first = next(iter(places))
    made["cells"] = [broken(first, 0) if (cell["arm"], cell["block"]) == (first, 0) else cell for cell in made["cells"]]
    assert effects(made)["A",]["gain"] == pytest.approx(2 * math.sqrt(1.5))


def test_interactions_of_combinations() -> None:
    arms = {"base": truth(8.0), "only a": truth(4.0), "only b": truth(2.0), "both": truth(2.0)}
    places = {
        "base": [{"kind": "base"}],
        "only a": [{"kind": "alone", "change": "a"}],
        "only b": [{"kind": "alone", "change": "b"}],
        "both": [{"kind": "combination", "changes": ["a", "b"]}],
    }
    found = summarise(document(arms, noise=0.02, runs=8, places=places, design="combinations"))["interactions"]
    save = next(entry for entry in found if entry["measure"] == "save")
    assert (save["changes"], save["arm"]) == (["a", "b"], "both")
    assert (save["gain"], save["product"], save["ratio"]) == pytest.approx((4, 8, 0.5), rel=0.05)
    assert save["low"] < save["ratio"] < save["high"] < 1
    assert len(found) == sum(measure["primary"] for measure in MEASURES)
