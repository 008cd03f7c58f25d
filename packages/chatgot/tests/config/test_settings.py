"""Configurations, recipes, schedules, optimizers, averages and clocks."""

import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatgot.config.config import RENAMED, Config, differences, flat, given_settings, read_words, setting_names
from chatgot.config.recipes import RECIPES, get_recipe
from chatgot.model.gpt import GPT
from chatgot.optim.optimizers import (
    OptimConfig,
    WeightAverage,
    build_optimizers,
    check_optimizers,
    set_learning_rate,
)
from chatgot.optim.schedules import Plateau, ScheduleConfig, learning_rate_factor
from chatgot.run.notes import ineffective_settings
from chatgot.run.state import ActivityTimer, Speedometer
from chatgot.step.device import measured_peak
from tensorkeep.errors import UsageError

BASE = get_recipe("shakespeare-char-cpu")
EVERY = ("checkpoint", "eval", "log", "sample")


def test_recipes_are_complete_an_unknown_one_suggests_the_nearest_and_one_setting_changes_one_thing() -> None:
    for name in RECIPES:
        config = get_recipe(name)
        assert config.recipe == name
        assert Config.from_dict(config.as_dict()) == config, name
        assert RECIPES[name].__doc__, name
    with pytest.raises(UsageError, match=r"did you mean 'shakespeare-char-cpu'\?"):
        get_recipe("shakespeare-char-cpuu")
    given = {"optim.lr": "3e-4", "loop.steps": "7", "sample.top_k": "5", "checkpoint.incremental": "false"}
    changed = BASE.changed(given)
    assert differences(BASE, changed) == {
        "optim.lr": (1e-3, 3e-4),
        "loop.steps": (2000, 7),
        "sample.top_k": (None, 5),
        "checkpoint.incremental": (True, False),
    }
    assert changed.changed({"sample.top_k": "none"}).sample.top_k is None
    # Those that depend on each other may be given in any order.
    heads, width = {"model.n_heads": 6}, {"model.d_model": 384}
    assert BASE.changed(heads | width).model.head_size == BASE.changed(width | heads).model.head_size == 64


def test_settings_have_names_also_those_of_a_section_within_a_section() -> None:
    rotary = BASE.changed({"model.positions": "rotary", "model.rope_scaling.kind": "linear"})
    changed = rotary.changed({"model.rope_scaling.factor": "2"})
    assert (changed.setting("model.rope_scaling.factor"), changed.model.rope_scaling.kind) == (2.0, "linear")
    assert changed.changed({"model.rope_scaling.kind": "none"}).model.rope_scaling.kind is None
    assert "model.rope_scaling.factor" in setting_names()
    names = flat(BASE.as_dict())
    assert (names["optim.lr"], names["recipe"]) == (1e-3, "shakespeare-char-cpu")
    # Techniques that are off have no settings.
    assert list(names) == [each for each in setting_names() if not each.endswith("techniques")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim.rl": 1}, r"no setting 'optim\.rl'.*did you mean optim\.lr"),
        ({"lr": 1}, r"no setting 'lr'.*did you mean optim\.lr"),
        ({"optim.lr": "fast"}, r"optim\.lr is 'fast'\ngive a finite number above 0"),
        ({"optim.lr": -1}, r"optim\.lr is -1"),
        ({"optim.beta1": 1.0}, r"optim\.beta1 is 1\.0.*below 1"),
        ({"optim.muon_steps": 0}, r"optim\.muon_steps is 0"),
        ({"loop.steps": 0}, r"loop\.steps is 0.*1 or more"),
        ({"loop.steps": 1.5}, r"loop\.steps is 1\.5\ngive a whole number 1 or more"),
        ({"schedule.name": "spiral"}, r"schedule\.name is 'spiral'\ngive one of cosine, linear"),
        ({"model.n_heads": 3}, "is not a multiple of"),
        ({"checkpoint.incremental": "sometimes"}, r"checkpoint\.incremental is 'sometimes'"),
        ({"schedule.factor": 1.0}, r"schedule\.factor is 1\.0.*above 0 and below 1"),
        ({"sample.top_k": 0}, r"sample\.top_k is 0.*1 or more"),
        ({"sample.temperature": "inf"}, r"sample\.temperature is 'inf'.*finite number 0 or more"),
        ({"sample.tokens": 10**18}, r"sample\.tokens is 1000000000000000000.*or less"),
        ({"data.validation": 1.0}, r"data\.validation is 1\.0.*above 0 and below 1"),
        ({"loop.threads": 10**6}, r"loop\.threads is 1000000.*1024 or less"),
        # Without effect.
        ({"schedule.name": "plateau", "eval.every": 0}, r"schedule\.name is 'plateau', and eval\.every is 0"),
        ({"eval.patience": 3, "eval.every": 0}, r"eval\.patience is 3, and eval\.every is 0"),
        ({"schedule.name": "range"}, r"schedule\.warmup_steps is 100, .*\ngive schedule\.warmup_steps 0"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){message}"):
        BASE.changed(settings)


def test_every_number_is_finite() -> None:
    numbers = [name for name, default in flat(BASE.as_dict()).items() if isinstance(default, float)]
    assert len(numbers) > 20
    for name, value in product(numbers, ("inf", "-inf", "nan")):
        with pytest.raises(UsageError, match=f"{name} is '{value}'"):
            BASE.changed({name: value})


def test_new_tokenizer_resets_the_vocabulary_size_and_a_given_batch_size_is_not_replaced() -> None:
    pairs = get_recipe("chatgot-85m")
    assert pairs.data.vocab_size == 8192
    assert pairs.changed({"data.tokenizer": "byte"}).data.vocab_size is None
    assert pairs.changed({"data.tokenizer": "bpe"}).data.vocab_size == 8192
    assert BASE.changed({"data.vocab_size": 300, "data.tokenizer": "bpe"}).data.vocab_size == 300
    recipe = get_recipe("gpt2-124m")
    assert recipe.loop.auto_batch_size
    given = recipe.changed({"loop.batch_size": 4}).loop
    assert (given.batch_size, given.auto_batch_size) == (4, False)
    assert recipe.changed({"loop.batch_size": 4, "loop.auto_batch_size": True}).loop.auto_batch_size
    assert not recipe.changed({"loop.gradient_accumulation_steps": 4}).loop.auto_batch_size
    assert recipe.changed({"loop.steps": 4}).loop.auto_batch_size


def test_earlier_names_of_settings_are_read_from_every_source(tmp_path: Path) -> None:
    new = {"loop.gradient_accumulation_steps": 3, "loop.auto_batch_size": True, "optim.grad_clip": 2.0}
    expected = BASE.changed(new)
    old = dict(zip(RENAMED, new.values(), strict=True))
    assert BASE.changed(old) == expected
    assert [BASE.setting(name) for name in old] == [BASE.setting(name) for name in new]
    # Stored runs and results.
    values = expected.as_dict()
    for name, (section, field) in zip(new, (each.split(".") for each in old), strict=True):
        values[section][field] = values[section].pop(name.split(".")[1])
    assert Config.from_dict(values) == expected
    # Flags, the environment and files; the current name wins.
    assert read_words(["--optim.grad_clip", "2"]) == (None, {"optim.grad_clip": "2"})
    assert given_settings(environment={"TENSORKEEP_OPTIM_CLIP": "2"}) == {"optim.grad_clip": "2"}
    both = {"TENSORKEEP_OPTIM_CLIP": "2", "TENSORKEEP_OPTIM_GRAD_CLIP": "3"}
    assert given_settings(environment=both) == {"optim.grad_clip": "3"}
    (tmp_path / "x.toml").write_text("[train.loop]\naccumulate = 3\n")
    found = given_settings(file=tmp_path / "x.toml", environment={})
    assert found == {"loop.gradient_accumulation_steps": 3}


def test_optimizer_that_the_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_optimizers(OptimConfig(implementation="fused"), torch.device("cpu"))
    # Which devices have it changes with torch.
    module = sys.modules[torch.optim.Optimizer.__module__]
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: ["abacus"])
    with pytest.raises(UsageError, match=r"optim\.implementation is 'fused', which is not supported on cpu: .*abacus"):
        check_optimizers(OptimConfig(implementation="fused"), torch.device("cpu"))


def test_flags_come_in_any_order_and_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('[train]\nout = "elsewhere"\n[train.optim]\nlr = 1.0\nclip = 2.0\nweight_decay = 3.0\n')
    environment = {"TENSORKEEP_OPTIM_CLIP": "4", "TENSORKEEP_OPTIM_WEIGHT_DECAY": "5"}
    _, words = read_words(["--optim.weight_decay", "6", "--loop.steps=9"])
    found = BASE.changed(given_settings(words, file=file, environment=environment, options=["--out"]))
    assert (found.optim.lr, found.optim.grad_clip, found.optim.weight_decay, found.loop.steps) == (1.0, 4.0, 6.0, 9)
    # Words come in any order.
    expected = ("tiny", {"optim.lr": "3e-4", "loop.steps": "-5"})
    assert read_words(["tiny", "--optim.lr", "3e-4", "--loop.steps=-5"]) == expected
    assert read_words(["--optim.lr", "3e-4", "tiny", "--loop.steps", "-5"]) == expected
    assert read_words(["--loop.steps", "-5", "--optim.lr=3e-4"]) == (None, expected[1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optim.lr"], "--optim.lr has no value"),
        (["tiny", "optim.lr", "3"], "'optim.lr' is not a setting"),
        (["--", "3"], "there is no option --\n"),
        (["-x", "3"], "there is no option -x\n"),
        (["--resum"], "there is no option --resum\ndid you mean --resume?"),
        (["--outt", "x"], "there is no option --outt\ndid you mean --out?"),
        (["--lr", "1"], "there is no option --lr\ndid you mean --optim.lr"),
        (["--recipe", "tiny"], "there is no option --recipe\ngive the recipe as a word"),
    ],
)
def test_invalid_words_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        read_words(words, ["--resume", "--out"])


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    suggestion = r"x\.toml: there is no setting 'optim\.rl'\ndid you mean optim\.lr"
    with pytest.raises(UsageError, match="cannot read"):
        given_settings(file=tmp_path / "x.toml", environment={})
    for text, message in {
        "[train.optim]\nrl = 1.0\n": suggestion,
        "[train": "is not TOML",
        "[train]\nlearning_rate = 1.0\n": r"there is no setting 'learning_rate'\ndid you mean optim\.lr",
        "[train]\nloop = 1.0\n": "there is no setting 'loop'",
    }.items():
        (tmp_path / "x.toml").write_text(text)
        with pytest.raises(UsageError, match=message):
            given_settings(file=tmp_path / "x.toml", environment={})


@given(
    name=st.sampled_from(["cosine", "linear", "wsd", "constant", "range"]),
    warmup=st.integers(0, 20),
    steps=st.integers(1, 60),
    final=st.floats(0.01, 1),
)
def test_schedules_stay_within_their_bounds(name: str, warmup: int, steps: int, final: float) -> None:
    warmup = 0 if name == "range" else warmup
    config = ScheduleConfig(name=name, warmup_steps=warmup, final=final)  # type: ignore[arg-type]
    shares = [learning_rate_factor(config, step, steps) for step in range(1, steps + 1)]
    assert all(0 < each <= 1 + 1e-12 for each in shares)
    assert shares[: min(warmup, steps)] == [step / warmup for step in range(1, min(warmup, steps) + 1)]
    rest = shares[warmup:]
    falling = sorted(rest, reverse=name != "range")
    assert rest == pytest.approx(falling)
    if len(rest) > 1:
        first, last = (final, 1.0) if name == "range" else (1.0, 1.0 if name == "constant" else final)
        assert (rest[0], rest[-1]) == pytest.approx((first, last))


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_last_step_of_a_decay_to_0_changes_the_weights_and_wsd_is_stable_before_it_decays(name: Any) -> None:
    for warmup, steps in product((0, 3), (1, 2, 10, 1000)):
        config = ScheduleConfig(name=name, final=0.0, decay=0.5, warmup_steps=warmup)
        shares = [learning_rate_factor(config, step, steps) for step in range(1, steps + 2)]
        assert min(shares[:-1]) > 0, (warmup, steps)
        assert steps <= warmup or shares[-1] == pytest.approx(0, abs=1e-12), (warmup, steps)
    config = ScheduleConfig(name="wsd", final=0.0, decay=0.2)
    shares = [learning_rate_factor(config, step, 100) for step in range(1, 102)]
    assert (shares[:81], shares[90]) == (pytest.approx([1.0] * 81), pytest.approx(0.5))


def test_settings_without_effect_are_reported_with_the_numbers() -> None:
    base = get_recipe("shakespeare-char-cpu")
    assert not any(ineffective_settings(get_recipe(name)) for name in RECIPES)
    assert not ineffective_settings(base.changed({"sample.every": 9, "sample.prompt": "a", "eval.patience": 6}))
    for changes, note in (
        ({"loop.steps": 20}, "has 20 steps: the learning rate ends at 20% of its peak; for a shorter warm-up: --"),
        ({"loop.steps": 100}, "ends at 100% of its peak, and does not decay"),
        ({"loop.steps": 150, "schedule.start": 100}, "schedule has 50 steps: the learning rate ends at 50% of its"),
        ({"eval.patience": 7}, "eval.patience is 7, and eval.every 250 gives 7 evaluations before the last of 2,000"),
        ({"schedule.name": "plateau", "eval.every": 500}, "schedule.patience is 3, and eval.every 500 gives 3"),
        ({"schedule.name": "constant", "schedule.final": 0.5}, "schedule.final has no effect: schedule.name is 'con"),
        ({"schedule.decay": 0.5}, "schedule.decay has no effect: schedule.name is 'cosine', not 'wsd'"),
        ({"schedule.patience": 1, "schedule.factor": 0.1}, "schedule.patience and schedule.factor have no effect"),
        ({"eval.tokens": 9, "eval.batches": 2}, "eval.tokens has no effect: eval.batches is 2"),
        *(({f"{name}.every": 3000}, f"{name}.every has no effect: the run has 2,000 steps") for name in EVERY),
        ({"sample.every": 9, "sample.temperature": 0, "sample.top_k": 5}, "sample.top_k has no effect: sample.temp"),
        ({"sample.top_k": 5}, "sample.top_k has no effect: sample.every is 0"),
        ({"checkpoint.keep_best": 2, "eval.every": 0}, "checkpoint.keep_best has no effect: eval.every is 0"),
        ({"optim.muon_lr": 0.1}, "optim.muon_lr has no effect: optim.name is 'adamw', not 'muon'"),
        ({"model.rope_base": 5.0}, "model.rope_base has no effect: model.positions is 'learned'"),
    ):
        (found,) = ineffective_settings(base.changed(changes))
        assert note in found, found


def test_a_plateau_lowers_the_rate_and_can_be_saved() -> None:
    config = ScheduleConfig(name="plateau", patience=2, factor=0.5)
    plateau, again = Plateau(config), Plateau(config)
    for loss in (3.0, 2.0, 2.5):
        plateau.add(loss)
    again.load_state_dict(plateau.state_dict())
    for each in (plateau, again):
        assert each.factor == 1.0
        each.add(2.1)
        assert each.factor == 0.5
        each.add(1.0)
        assert each.factor == 0.5


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_has_one_optimizer_and_vectors_do_not_decay(name: str) -> None:
    config = BASE.changed({"optim.name": name, "model.bias": True, "model.vocab_size": 30})
    model = GPT(config.model)
    optimizers = build_optimizers(model, config.optim)
    groups = [group for each in optimizers.values() for group in each.param_groups]
    found = [parameter for group in groups for parameter in group["params"]]
    assert len(found) == len(set(found)) == len(list(model.parameters()))
    for group in groups:
        assert all((parameter.ndim >= 2) == (group["weight_decay"] > 0) for parameter in group["params"])
    # The learning rate is a factor of each group's peak.
    set_learning_rate(optimizers, 0.5)
    set_learning_rate(optimizers, 0.25)
    rates = {name: each.param_groups[0]["lr"] for name, each in optimizers.items()}
    assert rates == {name: 0.25 * (0.02 if name == "muon" else 1e-3) for name in optimizers}


def test_average_follows_the_weights_and_is_put_into_the_model() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2, bias=False)
    average = WeightAverage(dict(model.named_parameters()), 0.5)
    start = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    average.update(100)
    expected = start + 0.5
    with average.in_place():
        assert torch.allclose(model.weight, expected)
    assert torch.allclose(model.weight, start + 1.0)
    other = WeightAverage(dict(torch.nn.Linear(2, 2, bias=False).named_parameters()), 0.5)
    # As a manager restores it, in place.
    other.state_dict()["weight"].copy_(average.state_dict()["weight"])
    assert torch.equal(other.state_dict()["weight"], average.state_dict()["weight"])
    assert WeightAverage(dict(model.named_parameters()), 0.0).state_dict() == {}


def test_clock_sums_the_seconds_of_each_activity_and_mfu_is_never_above_one(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 5.0, 7.0, 7.0, 8.0])
    clock = ActivityTimer(lambda: next(times))
    for what in ("train", "evaluate", "train"):
        with clock.spent_on(what):
            pass
    assert clock.seconds == {"train": 2.0, "evaluate": 2.0}
    speed = Speedometer(peak=100.0)
    speed.add(50, 500, 10.0)
    assert speed.lap() == {"tokens_per_second": 5.0, "mfu": 0.5} and not speed.outran
    speed.add(400, 4000, 10.0)
    assert speed.lap() == {"tokens_per_second": 40.0, "mfu": 1.0}
    # Training was faster than the measured peak: the peak is at least as fast, and MFU at most so much.
    assert (speed.peak, speed.outran) == (400.0, True)
    assert speed.total() == {"tokens_per_second": 22.5, "mfu": 0.5625}
    # The measured peak draws no random numbers of others.
    monkeypatch.setattr("chatgot.step.device._SIZES", (64,))
    monkeypatch.setattr("chatgot.step.device._SECONDS", 0.01)
    before = torch.get_rng_state()
    assert measured_peak(torch.device("cpu")) > 1e6
    assert torch.equal(before, torch.get_rng_state())
