"""``tensorkeep tune training``: predicted memory, the cheapest choice that fits, and the largest batch."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from chatgot import memory as ledger
from chatgot.config.config import Config, given_settings
from chatgot.config.recipes import get_recipe
from chatgot.data.prepare import prepare
from chatgot.memory import predict
from chatgot.run.auto_batch_size import with_batch_size
from command_line import Call, RunJson
from tensorkeep.errors import UsageError
from tensorkeep_bench.training.cell import MEMORY
from tensorkeep_bench.tune import training
from tensorkeep_bench.tune.training import MemoryPlan, memory_plans
from tensorkeep_bench.workload import Outcome

MB = 1000**2


def config() -> Config:
    recipe = get_recipe("shakespeare-char-cpu").changed({"loop.device": "cpu"})
    return msgspec.structs.replace(recipe, model=msgspec.structs.replace(recipe.model, vocab_size=65))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 100)
    return prepare(folder / "text.txt", folder / "prepared", tokenizer="char").path


@pytest.fixture(autouse=True, scope="module")
def predicted_once() -> Iterator[None]:
    """Predict the choices for a configuration once for all tests, unless evaluations differ."""
    known: dict[object, list[MemoryPlan]] = {}

    def remembered(given: Config) -> list[MemoryPlan]:
        key = msgspec.json.encode(given), ledger.LARGEST_TOKENS
        if key not in known:
            known[key] = memory_plans(given)
        return known[key]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(training, "memory_plans", remembered)
        yield


@pytest.fixture
def small_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate few tokens at once, so that the steps of the small model need more memory than an evaluation."""
    monkeypatch.setattr(ledger, "LARGEST_TOKENS", 64)


def chosen_for(memory: int) -> training.TunedTraining:
    return training.tune(config(), Path("nowhere"), memory, run_trials=False)


@pytest.mark.usefixtures("small_evaluations")
def test_cheapest_choice_that_fits_is_chosen() -> None:
    candidates = training.memory_plans(config())
    previous = chosen_for(4000 * MB).chosen
    assert (previous.cost, previous.added, previous.config) == (1.0, {}, config()), "it fits without a change"
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


def test_choices_keep_the_number_of_sequences_and_propose_only_what_can_be_turned_on() -> None:
    for each in training.memory_plans(config()):
        loop = each.config.loop
        assert loop.batch_size * loop.gradient_accumulation_steps == 12
    with pytest.raises(UsageError, match="12 sequences do not divide into batches of 5"):
        with_batch_size(config(), 5)
    # Active techniques, and those that cannot run, are not proposed.
    on = config().changed({"techniques.fused-optimizer": "on", "techniques.activation-checkpointing": "on"})
    for each in memory_plans(on):
        assert not {"low-bit-optimizer", "activation-checkpointing", "activation-swapping"} & set(each.added)
    assert {option.name for group in training.OPTIONS for option in group} > {"activation-swapping"}


@pytest.mark.parametrize(("limit", "largest"), [(0, None), (1, 1), (3, 3), (5, 4), (11, 6), (12, 12), (99, 12)])
def test_largest_batch_is_found_among_the_divisors(limit: int, largest: int | None) -> None:
    def attempt(tried: Config) -> Outcome:
        assert tried.loop.batch_size * tried.loop.gradient_accumulation_steps == 12
        if tried.loop.batch_size > 10:
            # A process that uses far too much memory is ended.
            return Outcome("memory" if limit < 12 else "ok", None, 1.0, {MEMORY: 12.0})
        return Outcome("ok", None, 1.0, {MEMORY: float(tried.loop.batch_size)})

    found, trials = training.largest_batch(config(), limit, attempt)
    assert (found[0].loop.batch_size if found else None) == largest
    assert (found[1] if found else None) == largest
    assert len(trials) <= 3
    with pytest.raises(UsageError, match="a trial failed: no compiler"):
        training.largest_batch(config(), 10, lambda tried: Outcome("failed", "no compiler", 1.0))


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
    least = min(each.ledger.peak for each in training.memory_plans(config()))
    assert not training.tune(config(), Path("nowhere"), least).fits


def test_evaluation_that_does_not_fit_is_reported_without_a_trial() -> None:
    """No technique reduces the memory of an evaluation."""
    tuned = training.tune(config(), Path("nowhere"), 60 * MB)
    assert tuned.before.ledger.peak_of_steps < 60 * MB < tuned.before.ledger.evaluation
    assert not (tuned.fits or tuned.tried)


def test_ledger_is_only_shown(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tune", "training", "shakespeare-char-cpu", "--data", str(data), "--predict-only"]
    output = call(*words, "--memory", "4GB").out
    found = json.loads(call(*words, "--memory", "4GB", "--json").out)
    assert found["before"] == found["chosen"]["predicted"]
    for text in ("parameters", "activations kept", "peak", "It is predicted to fit without a change."):
        assert text in output
    assert (
        f"tensorkeep train shakespeare-char-cpu --data {data} --loop.batch_size 12 --loop.gradient_accumulation_steps 1"
        in output
    )
    assert "No choice is predicted to fit." in call(*words, "--memory", "1MB", code=1).out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_evaluations")
def test_written_settings_are_read_by_train(data: Path, tmp_path: Path, run_json: RunJson) -> None:
    words = ["tune", "training", "shakespeare-char-cpu", "--data", data, "--predict-only", "--memory", "17MB"]
    found = run_json(*words, "--out", tmp_path / "small.toml")
    assert found["chosen"]["predicted"]["peak"] <= 17 * MB < found["before"]["peak"]
    assert found["chosen"]["expected_cost"] > 1
    given = given_settings(file=tmp_path / "small.toml", environment={})
    changed = get_recipe("shakespeare-char-cpu").changed(given)
    assert changed.loop.batch_size == found["chosen"]["settings"]["loop.batch_size"]
    names = {name.split(".")[1] for name in found["chosen"]["settings"] if name.startswith("techniques.")}
    assert set(changed.techniques) == names
    assert tomllib.loads((tmp_path / "small.toml").read_text())["train"]["loop"]
    _ = run_json(*words, "--out", tmp_path / "small.toml", code=6)


@pytest.mark.exhaustive
def test_trial_trains_and_evaluates_and_reports_its_peak(data: Path) -> None:
    tuned = training.tune(config().changed({"loop.threads": 1}), data, 2000 * MB)
    assert tuned.fits
    # The process uses more memory than its tensors: buffers of kernels, a heap that does not shrink.
    assert 0.3 * tuned.chosen.ledger.peak < tuned.measured < 2000 * MB
