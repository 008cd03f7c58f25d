"""``tensorkeep tune training``: predicted memory, the cheapest choice that fits, and the largest batch."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tensorkeep.bench.experiment.workload import Outcome
from tensorkeep.bench.training.cell import MEMORY
from tensorkeep.bench.tune import memory_choices, training
from tensorkeep.bench.tune.memory_choices import choices
from tensorkeep.cli.main import main
from tensorkeep.errors import UsageError
from tensorkeep.train.config.arguments import given_settings
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.recipes import get_recipe
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.memory.filling import with_batch_size
from tensorkeep.train.memory.ledger import predict

MB = 1000**2


def config() -> Config:
    recipe = get_recipe("shakespeare-char-cpu").changed({"loop.device": "cpu"})
    return msgspec.structs.replace(recipe, model=msgspec.structs.replace(recipe.model, vocab_size=65))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 100)
    return prepare(folder / "text.txt", folder / "prepared", tokenizer="char").path


@pytest.fixture
def small_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate few tokens at once, so that the steps of the small model need more memory than an evaluation."""
    monkeypatch.setattr("tensorkeep.train.memory.evaluation.LARGEST_TOKENS", 64)


def chosen_for(memory: int) -> training.Tuned:
    return training.tune(config(), Path("nowhere"), memory, run_trials=False)


def test_nothing_changes_where_memory_suffices() -> None:
    tuned = chosen_for(4000 * MB)
    assert tuned.fits
    assert (tuned.chosen.cost, tuned.chosen.added, tuned.chosen.config) == (1.0, {}, config())


@pytest.mark.usefixtures("small_evaluations")
def test_cheapest_choice_that_fits_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = choices(config())
    monkeypatch.setattr(training, "choices", lambda config: candidates)  # predicted once, not for every limit
    previous = chosen_for(4000 * MB).chosen
    # What fits changes only where a candidate's peak is passed.
    peaks = {each.ledger.peak for each in candidates if each.ledger.peak <= previous.ledger.peak}
    for memory in sorted({*peaks, *(peak - 1 for peak in peaks)}, reverse=True):
        tuned = chosen_for(memory)
        chosen = tuned.chosen
        if not tuned.fits:
            assert all(each.ledger.peak >= chosen.ledger.peak > memory for each in candidates)
            break
        assert chosen.ledger.peak <= memory
        assert chosen.cost >= previous.cost
        cheaper = [each for each in candidates if each.cost < chosen.cost]
        assert all(each.ledger.peak > memory for each in cheaper)
        previous = chosen
    else:
        pytest.fail("a choice was found that needs no memory")
    assert previous.cost > 1.1


def test_step_keeps_its_number_of_sequences() -> None:
    for each in choices(config()):
        loop = each.config.loop
        assert loop.batch_size * loop.accumulate == 12
    with pytest.raises(UsageError, match="12 sequences do not divide into batches of 5"):
        with_batch_size(config(), 5)


def test_active_techniques_and_those_that_cannot_run_are_not_proposed() -> None:
    on = config().changed({"techniques.fused-optimizer": "on", "techniques.activation-checkpointing": "on"})
    for each in choices(on):
        assert not {"low-bit-optimizer", "activation-checkpointing", "activation-swapping"} & set(each.added)
    assert {option.name for group in memory_choices.OPTIONS for option in group} > {"activation-swapping"}


@pytest.mark.parametrize(("limit", "largest"), [(0, None), (1, 1), (3, 3), (5, 4), (11, 6), (12, 12), (99, 12)])
def test_largest_batch_is_found_among_the_divisors(limit: int, largest: int | None) -> None:
    def attempt(tried: Config) -> Outcome:
        assert tried.loop.batch_size * tried.loop.accumulate == 12
        if tried.loop.batch_size > 10:
            # A process that uses far too much memory is ended.
            return Outcome("memory" if limit < 12 else "ok", None, 1.0, {MEMORY: 12.0})
        return Outcome("ok", None, 1.0, {MEMORY: float(tried.loop.batch_size)})

    found, trials = training.largest_batch(config(), limit, attempt)
    assert (found[0].loop.batch_size if found else None) == largest
    assert (found[1] if found else None) == largest
    assert len(trials) <= 3


@pytest.mark.usefixtures("small_evaluations")
def test_choice_whose_trial_fits_replaces_one_that_only_the_prediction_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def uses_twice_the_prediction(tried: Config) -> Outcome:
        seen.append(predict(tried, device="cpu").peak)
        return Outcome("ok", None, 1.0, {MEMORY: 2.0 * seen[-1]})

    monkeypatch.setattr(training, "trial_runner", lambda *limits: uses_twice_the_prediction)
    tuned = training.tune(config(), Path("nowhere"), 25 * MB)
    assert tuned.fits
    assert tuned.measured == 2 * seen[-1] <= 25 * MB
    assert len(seen) > 1 and seen == sorted(seen, reverse=True)
    least = min(each.ledger.peak for each in choices(config()))
    assert not training.tune(config(), Path("nowhere"), least).fits


def test_evaluation_that_does_not_fit_is_reported_without_a_trial() -> None:
    """No technique reduces the memory of an evaluation."""
    tuned = training.tune(config(), Path("nowhere"), 60 * MB)
    assert tuned.before.ledger.peak_of_steps < 60 * MB < tuned.before.ledger.evaluation
    assert not (tuned.fits or tuned.tried)


def test_trial_that_fails_for_another_reason_is_an_error() -> None:
    with pytest.raises(UsageError, match="a trial failed: no compiler"):
        training.largest_batch(config(), 10, lambda tried: Outcome("failed", "no compiler", 1.0))


def test_ledger_is_shown_and_nothing_is_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tune", "training", "shakespeare-char-cpu", "--data", str(data), "--predict-only"]
    assert main([*words, "--memory", "4GB"]) == 0
    output = capsys.readouterr().out
    for text in ("parameters", "activations kept", "peak", "It is predicted to fit without a change."):
        assert text in output
    assert f"tensorkeep train shakespeare-char-cpu --data {data} --loop.batch_size 12 --loop.accumulate 1" in output
    assert main([*words, "--memory", "1MB"]) == 1
    assert "No choice is predicted to fit." in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_evaluations")
def test_written_settings_are_read_by_train(
    data: Path, tmp_path: Path, run_json: Callable[..., tuple[int, Any]]
) -> None:
    words = ["tune", "training", "shakespeare-char-cpu", "--data", data, "--predict-only", "--memory", "17MB"]
    code, found = run_json(*words, "--out", tmp_path / "small.toml")
    assert code == 0
    assert found["chosen"]["predicted"]["peak"] <= 17 * MB < found["before"]["peak"]
    assert found["chosen"]["expected_cost"] > 1
    given = given_settings(file=tmp_path / "small.toml", environment={})
    changed = get_recipe("shakespeare-char-cpu").changed(given)
    assert changed.loop.batch_size == found["chosen"]["settings"]["loop.batch_size"]
    names = {name.split(".")[1] for name in found["chosen"]["settings"] if name.startswith("techniques.")}
    assert set(changed.techniques) == names
    assert tomllib.loads((tmp_path / "small.toml").read_text())["train"]["loop"]
    code, _ = run_json(*words, "--out", tmp_path / "small.toml")
    assert code == 6


@pytest.mark.slow
def test_trial_trains_and_evaluates_and_reports_its_peak(data: Path) -> None:
    tuned = training.tune(config().changed({"loop.threads": 1}), data, 2000 * MB)
    assert tuned.fits
    assert tuned.measured is not None
    # The process uses more memory than its tensors: buffers of kernels, a heap that does not shrink.
    assert 0.3 * tuned.chosen.ledger.peak < tuned.measured < 2000 * MB


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "1GB"], "neither a recipe nor a run is given"),
        (["shakespeare-char-cpu", "--memory", "much"], "is not a size"),
        (["shakespeare", "--memory", "1GB"], "there is no recipe"),
        (["shakespeare-char-cpu", "--memory", "1GB", "--technique", "compil"], "there is no technique"),
        (["shakespeare-char-cpu", "--memory", "1GB", "--technique", ""], "--technique '' names no technique"),
    ],
)
def test_invalid_arguments_are_refused(
    words: list[str], message: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "training", *words, "--data", str(data)]) in (2, 7)
    assert message in capsys.readouterr().err


def test_json_is_complete(data: Path, run_json: Callable[..., tuple[int, Any]]) -> None:
    code, found = run_json(
        "tune", "training", "shakespeare-char-cpu", "--data", data, "--predict-only", "--memory", "4GB"
    )
    assert code == 0
    assert json.loads(json.dumps(found)) == found
    assert found["before"] == found["chosen"]["predicted"]
