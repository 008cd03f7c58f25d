"""The training workload: the settings of an arm, its gate, and what a cell measures."""

import math
import os
import time
import zlib
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from tensorkeep.bench.experiment.library import read_experiment, shipped
from tensorkeep.bench.experiment.workload import DoesNotApplyError, GateError, Task
from tensorkeep.bench.training import cell as cell
from tensorkeep.bench.training.arms import arm_config, check_arm, loss_tolerance, without_systems_techniques
from tensorkeep.bench.training.reference_losses import LossGate, reference_losses, train_steps
from tensorkeep.bench.training.workload import WORKLOAD
from tensorkeep.errors import UsageError
from tensorkeep.train import loop
from tensorkeep.train.config.recipes import RECIPES
from tensorkeep.train.run import validation
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import TECHNIQUE_CLASSES, Technique, Verification
from tensorkeep.train.techniques.stack import COMBINATIONS
from train.tiny_training import CONFIG, prepared

STEPS = 8


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "tiny", lambda: CONFIG.changed({"data.tokenizer": "char"}))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for runs whose losses are references, so that the tests train each once."""
    return tmp_path_factory.mktemp("references")


@pytest.fixture(autouse=True)
def shared_references(references: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train references in this process, where it is not what is tested."""

    def shared(config: Any, data: Path, steps: int, cache: Path) -> list[float]:
        kept = references / f"{zlib.crc32(msgspec.json.encode(config)):08x}-{steps}.json"
        if not kept.exists():
            kept.write_bytes(msgspec.json.encode(train_steps(config, data, steps, kept.with_suffix(""))))
        return msgspec.json.decode(kept.read_bytes(), type=list[float])

    monkeypatch.setattr("tensorkeep.bench.training.workload.reference_losses", shared)


def task(data: Path, folder: Path, arm: dict[str, Any], **settings: Any) -> Task:
    given = WORKLOAD.parse_settings({"recipe": "tiny", "data": str(data), "steps": STEPS, "warmup": 2, **settings})
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    prepared = WORKLOAD.prepare(given, [arm], scratch)
    content = msgspec.to_builtins(prepared.input)
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


def measured(data: Path, folder: Path, arm: dict[str, Any], **settings: Any) -> dict[str, float]:
    folder.mkdir()
    return WORKLOAD.measure(task(data, folder, arm, **settings)).figures


def trained(data: Path, folder: Path, protocol: cell.Protocol, arm: dict[str, Any]) -> dict[str, float]:
    config = arm_config("tiny", arm, steps=STEPS)
    return cell.run_training(config, data, folder, protocol, LossGate([], 0.0)).figures


def test_loss_in_equal_time_uses_the_windows_of_the_final_loss(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a technique changes the size of batches."""
    seen = []
    evaluate = validation.evaluate

    def noted(model: Any, rows: Any, **options: Any) -> float:
        rows = list(rows)
        seen.append([inputs.tolist() for inputs, _ in rows])
        return evaluate(model, rows, **options)

    monkeypatch.setattr(validation, "evaluate", noted)
    arm = {"loop.batch_size": 4, "techniques.gradient-accumulation.batches": 4}
    figures = trained(data, tmp_path / "run", cell.Protocol(2, seconds=1e-9), arm)
    in_time, at_the_end = seen
    assert in_time == at_the_end
    assert figures[cell.LOSS_IN_TIME] != figures[cell.LOSS]


def test_run_that_ends_sooner_has_no_loss_in_equal_time(data: Path, tmp_path: Path) -> None:
    figures = trained(data, tmp_path / "run", cell.Protocol(2, seconds=1000), {})
    assert cell.LOSS_IN_TIME not in figures
    assert figures[cell.LOSS] > 0


@pytest.mark.parametrize(("counted", "measure", "most"), [(False, cell.RESIDENT, 10), (True, cell.MEMORY, 1000)])
def test_peak_of_the_process_includes_evaluations_only_if_asked(
    counted: bool, measure: str, most: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"peak": 0}
    validation_loss = loop.validation_loss

    def evaluated(run: Run) -> float:
        memory["peak"] = 1000
        return validation_loss(run)

    monkeypatch.setattr(loop, "validation_loss", evaluated)
    monkeypatch.setattr(loop, "peak_memory", lambda _: memory["peak"])
    monkeypatch.setattr(cell, "reset_peak_resident", lambda: memory.update(peak=10))
    monkeypatch.setattr(cell, "_nbytes", lambda _: 0)
    monkeypatch.setattr(cell, "resident_bytes", lambda: 0)
    figures = trained(data, tmp_path / "run", cell.Protocol(2, with_evaluation=counted), {"eval.every": 1})
    assert figures[measure] == most


def test_first_step_includes_compilation(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = TECHNIQUE_CLASSES.get("activation-checkpointing")
    monkeypatch.setattr(kind, "warm_up", lambda *_: time.sleep(0.5))
    figures = measured(data, tmp_path / "a", {"techniques.activation-checkpointing": "on"})
    assert figures[cell.FIRST] > 0.5


def test_compile_cache_is_empty(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "earlier")
    seen = []
    kind = TECHNIQUE_CLASSES.get("activation-checkpointing")
    monkeypatch.setattr(kind, "warm_up", lambda *_: seen.append(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    measured(data, tmp_path / "a", {"techniques.activation-checkpointing": "on"})
    assert seen == [str(tmp_path / "a" / "cell" / "compiled")]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "earlier"


def test_each_block_has_its_own_seed_and_is_repeatable(data: Path, tmp_path: Path) -> None:
    losses = []
    for number, block in enumerate((0, 0, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        one = task(data, folder, {})
        losses.append(WORKLOAD.measure(msgspec.structs.replace(one, block=block)).figures[cell.LOSS])
    assert losses[0] == losses[1] != losses[2]


class Wrong(Technique):
    """Changes the losses, and declares that it does not."""

    name: ClassVar = "wrong"
    kind: ClassVar = "systems"
    changes: ClassVar = "loss"
    tolerance: ClassVar = 0.01
    summary: ClassVar = "nothing"
    effect: ClassVar = "none"
    reference: ClassVar = "none"

    def apply(self, run: Run) -> None:
        inner = run.operations.loss
        run.operations.loss = lambda inputs, targets: inner(inputs, targets) * 1.05

    def verify(self, run: Run) -> Verification:
        yield
        return None


class Absent(Wrong):
    """Is not active."""

    name: ClassVar = "absent"

    def apply(self, run: Run) -> None: ...

    def verify(self, run: Run) -> Verification:
        yield
        raise self.not_active("nothing was seen", "report it")


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the techniques above."""
    known, named = TECHNIQUE_CLASSES.get, TECHNIQUE_CLASSES.names
    mine = {"wrong": Wrong, "absent": Absent}
    monkeypatch.setattr(TECHNIQUE_CLASSES, "get", lambda name: mine.get(name) or known(name))
    monkeypatch.setattr(TECHNIQUE_CLASSES, "names", lambda: [*named(), *mine])


@pytest.mark.usefixtures("others")
def test_technique_that_changes_losses_fails_the_gate(data: Path, tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"the loss of step 1 is .*at most 1.00% may differ"):
        WORKLOAD.measure(task(data, tmp_path, {"techniques.wrong": "on"}))


@pytest.mark.usefixtures("others")
def test_inactive_technique_fails_the_gate(data: Path, tmp_path: Path) -> None:
    with pytest.raises(GateError, match="absent was requested and is not active"):
        WORKLOAD.measure(task(data, tmp_path, {"techniques.absent": "on"}))


def test_arm_that_does_not_fit_the_recipe_does_not_apply(data: Path, tmp_path: Path) -> None:
    arm = {"techniques.gradient-accumulation.batches": 2}
    with pytest.raises(DoesNotApplyError, match="a batch of 3 sequences cannot be split into 2 equal micro-batches"):
        WORKLOAD.measure(task(data, tmp_path, arm))


@pytest.mark.parametrize("loss", [1.0201, 0.9799, math.nan, math.inf])
def test_gate_refuses_other_losses(loss: float) -> None:
    gate = LossGate([5.0, 1.0], 0.02)
    gate.check(2, 1.0199)
    gate.check(3, loss)
    with pytest.raises(GateError, match="the loss of step 2"):
        gate.check(2, loss)
    with pytest.raises(GateError, match="must be equal"):
        LossGate([1.0], 0.0).check(1, 1.0 + 1e-12)


def test_reference_is_the_run_without_systems_techniques(data: Path, tmp_path: Path) -> None:
    arm = {"techniques.mixed-precision.dtype": "bf16", "techniques.fused-optimizer": "on"}
    config = arm_config("tiny", {**arm, "techniques.lr-plateau": "on", "eval.every": 4}, steps=STEPS)
    assert list(without_systems_techniques(config).techniques) == ["lr-plateau"]
    assert loss_tolerance(config) == pytest.approx(0.021)
    plain = arm_config("tiny", {}, steps=STEPS)
    losses = reference_losses(plain, data, 3, tmp_path)
    assert len(losses) == 3
    [kept] = tmp_path.iterdir()
    kept.write_text("[1.0]")
    assert reference_losses(plain, data, 3, tmp_path) == [1.0]


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ({"loop.steps": 5}, "loop.steps is the same for all arms"),
        ({"data.source": "x"}, "data.source is the same for all arms"),
        ({"techniques.compil": "on"}, "there is no technique named 'compil'"),
        ({"techniques.compile.mod": "x"}, "compile has no setting 'mod'"),
        ({"optim.lrr": 1}, "the setting 'optim.lrr' does not exist"),
        ({"techniques.fused-optimizer": "on", "techniques.low-bit-optimizer": "on"}, "cannot be combined"),
    ],
)
def test_invalid_arms_are_refused(arm: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError) as error:
        check_arm(arm)
    assert expected in error.value.message
    assert error.value.remedy


def test_values_that_do_not_fit_the_recipe_are_refused_before_the_run(data: Path, tmp_path: Path) -> None:
    check_arm({"model.n_heads": 3})
    with pytest.raises(UsageError, match="d_model=16 is not a multiple of n_heads=3"):
        task(data, tmp_path, {"model.n_heads": 3})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"recipe": "gpt5"}, "there is no recipe"),
        ({"steps": 5, "warmup": 5}, "steps: 5 is less than 8"),
        ({"step": 5}, "settings has no field 'step'"),
        ({"steps": "many"}, "settings: steps: expected `int`, got `str`"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        WORKLOAD.parse_settings(settings)


@pytest.mark.parametrize("name", shipped("training"))
def test_shipped_experiments_are_valid(name: str) -> None:
    found = read_experiment(name).experiment
    assert found.workload == "training"
    assert found.settings["steps"] > found.settings["warmup"] + 2


def test_each_technique_is_measured_alone() -> None:
    used = {key.split(".")[1] for arm in read_experiment("techniques").arms for key in arm.settings if "tech" in key}
    assert used == set(TECHNIQUE_CLASSES.names())


def test_combinations_are_those_of_the_command_line() -> None:
    found = {arm.name: arm for arm in read_experiment("combinations").arms}
    for name, parts in COMBINATIONS.items():
        used = [key.split(".")[1] for key in found[name].settings]
        assert sorted(used) == sorted(parts)


def test_losses_of_the_steps_are_kept_thinned(data: Path, tmp_path: Path) -> None:
    outcome = WORKLOAD.measure(task(data, tmp_path, {}))
    assert [step for step, _ in outcome.losses] == list(range(1, STEPS + 1))
    assert outcome.losses[0][1] > outcome.losses[-1][1] > 0
    long = cell.thinned([(step, 2.0 if step % 2 else math.nan if step == 4 else 4.0) for step in range(1, 1001)])
    assert len(long) == 100
    assert (long[0], long[-1]) == ((10, 2.88889), (1000, 3.0))
    assert cell.thinned([(1, math.inf)]) == cell.thinned([]) == ()
