"""The sentence at the top of a report, and the names of subject and machine."""

from pathlib import Path
from typing import Any

from report import documents
from report.documents import read
from tensorkeep_bench.report.measures import machine_name, subject_name
from tensorkeep_bench.report.sentences import headlines, verdict_sentence


def sentence(document: dict[str, Any], folder: Path) -> str:
    return verdict_sentence(read(document, folder))


def peers(**recommended: str | None) -> dict[str, Any]:
    """Return a document whose gains are set by hand, and its recommended arm by purpose."""
    document = documents.document({"pytorch": (3.0, 2.0, 1.0), "fast": (1.0, 1.0, 1.0)}, runs=3)
    found = document["summary"]
    found["recommendations"] = [{"for": purpose, "text": "x", "arm": arm} for purpose, arm in recommended.items()]
    figures = {"save": (2.1, "helps"), "load_cold": (1.3, "within noise"), "load_warm": (1.0, "about the same")}
    for measure, (gain, verdict) in {**figures, "stored": (1 / 0.66, "helps")}.items():
        found["arms"]["fast"][measure].update(gain=gain, verdict=verdict)
    return document


def test_the_arm_that_is_better_all_round_is_recommended(tmp_path: Path) -> None:
    expected = "Use fast on this machine: it saves 2.10x faster and writes 34% fewer bytes than pytorch."
    assert sentence(peers(saving="fast", size="fast", all="fast"), tmp_path) == expected
    # One purpose alone has no recommendation for all of them.
    assert sentence(peers(saving="fast"), tmp_path) == expected
    # A name with blanks is quoted.
    assert sentence(peers(saving="only fast"), tmp_path).startswith('Use "only fast" on this machine')


def test_what_is_worse_is_in_the_sentence(tmp_path: Path) -> None:
    document = peers(saving="fast", size=None, all=None)
    document["summary"]["arms"]["fast"]["stored"].update(gain=0.5, verdict="hurts")
    document["summary"]["arms"]["fast"]["load_warm"].update(gain=0.8, verdict="hurts")
    assert sentence(document, tmp_path) == (
        "No arm is better than pytorch in everything on this machine: fast saves 2.10x faster than pytorch, "
        "but loads 1.25x slower from the page cache and writes a factor of 2.00 more bytes."
    )


def test_without_a_recommendation_the_sentence_says_so(tmp_path: Path) -> None:
    none = peers(saving=None, size=None, all=None)
    assert sentence(none, tmp_path) == "No arm is shown to be better than pytorch on this machine."
    # What was not reached may be better.
    none["cells"][-1].update(status="planned", figures={})
    waiting = f"1 of {len(none['cells'])} cells were not reached"
    assert sentence(none, tmp_path) == f"Not decided: {waiting}."
    none["summary"]["recommendations"][0]["arm"] = "fast"
    assert sentence(none, tmp_path).startswith(f"Not decided all round: {waiting}. So far, fast saves 2.10x faster")
    once = documents.document({"pytorch": (3.0, 2.0, 1.0), "fast": (1.0, 1.0, 1.0)}, runs=1)
    once["summary"]["recommendations"] = []
    assert sentence(once, tmp_path).endswith("measure again with --runs 5.")
    # More runs do not help where the budget ended the run.
    once["experiment"].update(budget=60.0, runs=5)
    for cell in once["cells"]:
        cell["seconds"] = 50.0
    assert sentence(once, tmp_path).endswith("measure again with a --budget of more than 60 s.")
    # Sizes are the same in every run.
    sized = documents.document({"pytorch": (3.0, 2.0, 1.0), "fast": (1.0, 1.0, 0.66)}, runs=1)
    assert sentence(sized, tmp_path) == (
        "One run per arm cannot show a difference in speed from pytorch: measure again with --runs 5. "
        "Sizes need no more runs: fast writes 34% fewer bytes than pytorch."
    )
    once["subject"]["bytes"] = 1000
    assert "too small to time" in sentence(once, tmp_path)


def test_a_single_configuration_is_not_called_worse_than_itself(tmp_path: Path) -> None:
    alone = documents.document({"my_custom_test": (3.0, 2.0, 1.0)}, runs=3)
    expected = "One configuration, my_custom_test: nothing to compare; add another, such as baseline."
    assert sentence(alone, tmp_path) == expected
    assert headlines(read(alone, tmp_path)) == [expected]
    # A size that is too small to time does not hide it.
    alone["subject"]["bytes"] = 1000
    assert sentence(alone, tmp_path) == expected
    baseline = documents.document({"baseline": (3.0, 2.0, 1.0)}, runs=3)
    assert sentence(baseline, tmp_path) == "One configuration, baseline: nothing to compare; add another."


def test_a_loss_is_compared_in_percent_and_claims_are_counted(tmp_path: Path) -> None:
    document = peers(loss="fast")
    document["measures"][0].update(name="loss", unit="nats", label="validation loss")
    document["summary"]["arms"]["fast"] = {"loss": {"gain": 1 / 0.988, "verdict": "helps"}}
    for cell in document["cells"]:
        cell["figures"] = {"loss": 2.0}
    expected = "Use fast on this machine: it reaches a validation loss 1.2% lower than pytorch."
    assert sentence(document, tmp_path) == expected
    expected = "Of 2 published claims, 1 is reproduced and 1 is confounded on this machine."
    assert sentence(documents.with_claims(), tmp_path) == expected


def test_the_machine_and_the_model_or_the_recipe_in_a_few_words(tmp_path: Path) -> None:
    h100 = {"name": "H100", "total_bytes": 1}
    epyc = {"model": "AMD EPYC", "cores": 8, "usable_cores": 2}
    for environment, expected in (
        ({"processor": epyc, "devices": []}, "AMD EPYC, 2 cores"),
        ({"processor": {"model": "X", "usable_cores": 1}, "devices": [h100, h100]}, "2 x H100, X, 1 core"),
        ({"devices": [h100]}, "H100"),
        ({}, ""),
        ({"processor": "not an object"}, ""),
    ):
        assert machine_name(environment) == expected
    document = documents.document(runs=1)
    described = "openllama-3b:first-5:float16: 5 tensors, 287 MB"
    for description, expected in ((described, "openllama-3b:first-5:float16"), ("", "made-up")):
        document["subject"]["description"] = description
        assert subject_name(read(document, tmp_path)) == expected
