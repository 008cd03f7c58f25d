"""The training workload: the settings of an arm, its gate, and what a cell measures."""

import math
import os
import time
import zlib
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from chatgot import loop
from chatgot.config.recipes import RECIPES
from chatgot.step.state import StepState
from chatgot.techniques.base import TECHNIQUE_CLASSES, Technique, Verification
from chatgot.techniques.stack import COMBINATIONS
from forked_modules import FORKING, forks
from tensorkeep.errors import UsageError
from tensorkeep.testing.cases import case
from tensorkeep_bench.experiment import read_experiment, shipped
from tensorkeep_bench.training import cell as cell
from tensorkeep_bench.training.cell import LossGate, reference_losses, train_steps
from tensorkeep_bench.training.workload import (
    WORKLOAD,
    arm_config,
    check_arm,
    loss_tolerance,
    without_systems_techniques,
)
from tensorkeep_bench.workload import DoesNotApplyError, GateError, Task
from tiny_training import CONFIG, prepared

STEPS = 8


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "tiny", lambda: CONFIG.changed({"data.tokenizer": "char"}))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def shared_references(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train each reference once and in this process, where it is not what is tested."""

    def shared(config: Any, data: Path, steps: int, cache: Path) -> list[float]:
        kept = data.parent / f"{zlib.crc32(msgspec.json.encode(config)):08x}-{steps}.json"
        if not kept.exists():
            kept.write_bytes(msgspec.json.encode(train_steps(config, data, steps, kept.with_suffix(""))))
        return msgspec.json.decode(kept.read_bytes(), type=list[float])

    monkeypatch.setattr("tensorkeep_bench.training.workload.reference_losses", shared)


def task(data: Path, folder: Path, arm: dict[str, Any], **settings: Any) -> Task:
    given = WORKLOAD.parse_settings({"recipe": "tiny", "data": str(data), "steps": STEPS, "warmup": 2, **settings})
    scratch = folder / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    content = msgspec.to_builtins(WORKLOAD.prepare(given, [arm], scratch)[0].input)
    return Task("training", "arm", arm, content, WORKLOAD.measures_of(given), str(folder / "cell"))


def test_cell_measures_speed_memory_and_loss_and_records_techniques(data: Path, tmp_path: Path) -> None:
    arm = {"techniques.activation-checkpointing": "on"}
    outcome = WORKLOAD.measure(task(data, tmp_path, arm, seconds=1000))
    # It ends sooner.
    assert outcome.figures.keys() == {measure.name for measure in WORKLOAD.measures} - {cell.LOSS_IN_TIME}
    assert all(value > 0 for value in outcome.figures.values())
    loop, length = CONFIG.loop, CONFIG.model.context_length
    assert outcome.figures[cell.TOKENS] == STEPS * loop.batch_size * length
    assert "recomputed" in outcome.observed["activation-checkpointing"]
    assert {"build", "gate", "evaluate"} <= outcome.clocks.keys()


def trained(data: Path, folder: Path, protocol: cell.Protocol, arm: dict[str, Any]) -> dict[str, float]:
    config = arm_config("tiny", arm, steps=STEPS)
    return cell.run_training(config, data, folder, protocol, LossGate([], 0.0)).figures


def test_loss_in_equal_time_has_the_same_windows(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the final loss, also where a technique changes the size of batches."""
    seen = []
    evaluate = loop.evaluate

    def noted(model: Any, rows: Any, **options: Any) -> float:
        rows = list(rows)
        seen.append([inputs.tolist() for inputs, _ in rows])
        return evaluate(model, rows, **options)

    monkeypatch.setattr(loop, "evaluate", noted)
    arm = {"loop.batch_size": 4, "techniques.gradient-accumulation.batches": 4}
    figures = trained(data, tmp_path / "run", cell.Protocol(2, seconds=1e-9), arm)
    in_time, at_the_end = seen
    assert in_time == at_the_end
    assert figures[cell.LOSS_IN_TIME] != figures[cell.LOSS]


def test_peak_includes_evaluations_only_if_asked(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"peak": 0}
    validation_loss = loop.validation_loss

    def evaluated(run: StepState) -> float:
        memory["peak"] = 1000
        return validation_loss(run)

    monkeypatch.setattr(loop, "validation_loss", evaluated)
    monkeypatch.setattr(loop, "peak_memory", lambda _: memory["peak"])
    monkeypatch.setattr(cell.machine, "reset_peak_resident", lambda: memory.update(peak=10))
    monkeypatch.setattr(cell, "_nbytes", lambda _: 0)
    monkeypatch.setattr(cell.machine, "resident_bytes", lambda: 0)
    for counted, measure, most in ((False, cell.RESIDENT, 10), (True, cell.MEMORY, 1000)):
        protocol = cell.Protocol(2, with_evaluation=counted)
        assert trained(data, tmp_path / measure, protocol, {"eval.every": 1})[measure] == most, measure


def test_first_step_compiles_into_an_empty_cache(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "earlier")
    seen = []

    def warm_up(*_: object) -> None:
        seen.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        time.sleep(0.2)

    monkeypatch.setattr(TECHNIQUE_CLASSES.get("activation-checkpointing"), "warm_up", warm_up)
    found = WORKLOAD.measure(task(data, tmp_path, {"techniques.activation-checkpointing": "on"}))
    assert found.figures[cell.FIRST] > 0.2
    assert seen == [str(tmp_path / "cell" / "compiled")]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "earlier"


def test_each_block_has_its_own_seed_and_is_repeatable(data: Path, tmp_path: Path) -> None:
    tasks = [msgspec.structs.replace(task(data, tmp_path / str(n), {}), block=n // 2) for n in range(3)]
    first, again, other = (WORKLOAD.measure(each).losses for each in tasks)
    assert first == again != other
    assert [step for step, _ in first] == list(range(1, STEPS + 1))
    assert first[0][1] > first[-1][1] > 0


class Wrong(Technique):
    """Changes the losses, and declares that it does not."""

    name: ClassVar = "wrong"
    kind: ClassVar = "systems"
    changes: ClassVar = "loss"
    tolerance: ClassVar = 0.01
    summary = effect = reference = "none"

    def apply(self, run: StepState) -> None:
        inner = run.operations.loss
        run.operations.loss = lambda inputs, targets: inner(inputs, targets) * 1.05

    def verify(self, run: StepState) -> Verification:
        yield
        return None


class Absent(Wrong):
    """Is not active."""

    name: ClassVar = "absent"

    def apply(self, run: StepState) -> None: ...

    def verify(self, run: StepState) -> Verification:
        yield
        raise self.not_active("nothing was seen", "report it")


def test_wrong_inactive_or_inapplicable_techniques_fail_the_gate(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    known, names = TECHNIQUE_CLASSES.get, TECHNIQUE_CLASSES.names()
    mine = {"wrong": Wrong, "absent": Absent}
    monkeypatch.setattr(TECHNIQUE_CLASSES, "get", lambda name: mine.get(name) or known(name))
    monkeypatch.setattr(TECHNIQUE_CLASSES, "names", lambda: [*names, *mine])
    for name, value, error, message in (
        ("wrong", "on", GateError, r"the loss of step 1 is .*at most 1.00% may differ"),
        ("absent", "on", GateError, "absent was requested and is not active"),
        ("gradient-accumulation", {"batches": 2}, DoesNotApplyError, "a batch of 3 sequences cannot be split into 2"),
    ):
        with case(name), pytest.raises(error, match=message):
            WORKLOAD.measure(task(data, tmp_path / name, {f"techniques.{name}": value}))


def test_gate_refuses_other_losses() -> None:
    gate = LossGate([5.0, 1.0], 0.02)
    gate.check(2, 1.0199)
    for loss in (1.0201, 0.9799, math.nan, math.inf):
        gate.check(3, loss)
        with case(loss), pytest.raises(GateError, match="the loss of step 2"):
            gate.check(2, loss)
    with pytest.raises(GateError, match="must be equal"):
        LossGate([1.0], 0.0).check(1, 1.0 + 1e-12)


@forks
def test_reference_has_no_systems_techniques(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorkeep_bench.training.cell.subprocess", FORKING)
    arm = {"techniques.mixed-precision.dtype": "bf16", "techniques.fused-optimizer": "on"}
    config = arm_config("tiny", {**arm, "techniques.lr-plateau": "on", "eval.every": 4}, steps=STEPS)
    assert list(without_systems_techniques(config).techniques) == ["lr-plateau"]
    assert loss_tolerance(config) == pytest.approx(0.021)
    plain = arm_config("tiny", {}, steps=STEPS)
    assert len(reference_losses(plain, data, 3, tmp_path)) == 3
    [kept] = tmp_path.iterdir()
    kept.write_text("[1.0]")
    assert reference_losses(plain, data, 3, tmp_path) == [1.0]


def test_invalid_arms_and_settings_are_refused(data: Path, tmp_path: Path) -> None:
    for arm, expected in (
        ({"loop.steps": 5}, "loop.steps is the same for all arms"),
        ({"data.source": "x"}, "data.source is the same for all arms"),
        ({"techniques.compil": "on"}, "there is no technique named 'compil'"),
        ({"techniques.compile.mod": "x"}, "compile has no setting 'mod'"),
        ({"optim.lrr": 1}, "there is no setting 'optim.lrr'"),
        ({"techniques.fused-optimizer": "on", "techniques.low-bit-optimizer": "on"}, "cannot be combined"),
    ):
        with case(arm), pytest.raises(UsageError, match=expected) as error:
            check_arm(arm)
        assert error.value.remedy
    for settings, expected in (
        ({"recipe": "gpt5"}, "there is no recipe"),
        ({"steps": 5, "warmup": 5}, "steps: 5 is less than 8"),
        ({"step": 5}, "settings has no field 'step'"),
        ({"steps": "many"}, "settings: steps: expected `int`, got `str`"),
    ):
        with case(settings), pytest.raises(UsageError, match=expected):
            WORKLOAD.parse_settings(settings)
    with pytest.raises(UsageError, match="give at least --steps 8"):
        WORKLOAD.parse_settings({"steps": 3, "warmup": 5})
    # Values that do not fit the recipe are refused before the run, too.
    check_arm({"model.n_heads": 3})
    with pytest.raises(UsageError, match="d_model=16 is not a multiple of n_heads=3"):
        task(data, tmp_path, {"model.n_heads": 3})


def test_shipped_experiments_are_valid_and_measure_each_technique_and_combination() -> None:
    for name in shipped("training"):
        found = read_experiment(name).experiment
        with case(name):
            assert found.workload == "training" and found.settings["steps"] > found.settings["warmup"] + 2
    used = {key.split(".")[1] for arm in read_experiment("techniques").arms for key in arm.settings if "tech" in key}
    assert used == set(TECHNIQUE_CLASSES.names())
    arms = {arm.name: arm for arm in read_experiment("combinations").arms}
    for name, parts in COMBINATIONS.items():
        assert sorted(key.split(".")[1] for key in arms[name].settings) == sorted(parts), name


def test_losses_of_many_steps_are_thinned() -> None:
    long = cell.thinned([(step, 2.0 if step % 2 else math.nan if step == 4 else 4.0) for step in range(1, 1001)])
    assert (len(long), long[0], long[-1]) == (100, (10, 2.88889), (1000, 3.0))
    assert cell.thinned([(1, math.inf)]) == cell.thinned([]) == ()
