"""Experiment trackers, by stand-ins for their packages: what they receive, when they resume, and when they fail."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import pytest

import tensorkeep
from chatgot.run.folder import RunFolder
from chatgot.run.log import Mlflow, _accepted_names, figures_of
from conftest import Trained
from tensorkeep.testing.cases import case
from tiny_training import CONFIG, check_same, lines, run

WANDB, MLFLOW = {"log.wandb": "tiny"}, {"log.mlflow": "tiny"}


class FakeWandb(SimpleNamespace):
    """Stands in for the package wandb; it accepts what its version 0.31 accepts."""

    def __init__(self) -> None:
        super().__init__(started=[], logged=[], metrics=[], ended=[], fails_at=None, refuses=False)

    @staticmethod
    def Settings(*, console: str) -> str:
        return f"console={console}"

    def init(
        self, *, project: str, id: str, name: str, dir: str, config: Any, resume: str, reinit: str, settings: str
    ) -> Any:
        if self.refuses:
            raise RuntimeError("api_key not configured (no-tty). Call wandb.login\nmore")
        self.started.append({"project": project, "id": id, "name": name, "resume": resume, "config": config})
        assert (reinit, settings, Path(dir).name) == ("create_new", "console=off", name)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        if self.fails_at == values["step"]:
            raise ConnectionError("the network is gone")
        self.logged.append(values)

    def finish(self, *, exit_code: int) -> None:
        self.ended.append(exit_code)


class FakeMlflow(SimpleNamespace):
    """Stands in for the package mlflow and its server; it accepts what its version 3 accepts."""

    def __init__(self) -> None:
        super().__init__(runs={}, experiments={}, entities=self, requests=0, MlflowClient=lambda: self)

    @staticmethod
    def Metric(key: str, value: float, timestamp: int, step: int) -> Any:
        assert timestamp > 1e12
        return (step, key, value)

    @staticmethod
    def Param(key: str, value: str) -> Any:
        assert re.fullmatch(r"[\w/ .:-]+", key)
        return (key, value)

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        return str(self.experiments.setdefault(name, "7"))

    def search_runs(self, experiment_ids: list[str], filter_string: str, max_results: int) -> Any:
        assert (experiment_ids, max_results) == (["7"], 1)
        name, _, wanted = filter_string.partition(" = ")
        assert name == "tags.`tensorkeep.run`"
        found = [each for each in self.runs.values() if each["tags"]["tensorkeep.run"] == wanted.strip("'")]
        return [SimpleNamespace(info=SimpleNamespace(run_id=each["id"])) for each in found]

    def create_run(self, experiment_id: str, *, run_name: str, tags: dict[str, str]) -> Any:
        id = f"id{len(self.runs)}"
        self.runs[id] = {"id": id, "name": run_name, "tags": tags, "status": "RUNNING", "metrics": [], "params": {}}
        return SimpleNamespace(info=SimpleNamespace(run_id=id))

    def update_run(self, run_id: str, *, status: str) -> None:
        self.runs[run_id]["status"] = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) + len(params) <= 100
        self.requests += 1
        self.runs[run_id]["metrics"] += metrics
        self.runs[run_id]["params"] |= dict(params)

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status


@pytest.fixture(autouse=True)
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())  # type: ignore[arg-type]
    return fake


@pytest.fixture(autouse=True)
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    monkeypatch.setitem(sys.modules, "mlflow", fake := FakeMlflow())  # type: ignore[arg-type]
    return fake


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines(folder, "train")]


def test_wandb_receives_the_figures_of_the_log(tmp_path: Path, data: Path, wandb: FakeWandb) -> None:
    run(CONFIG.changed(WANDB | {"eval.every": 6, "checkpoint.every": 5}), tmp_path / "run", data)
    sent = [(each["step"], each["train/loss"]) for each in wandb.logged if "train/loss" in each]
    assert sent == losses(tmp_path / "run")
    assert [each["step"] for each in wandb.logged if "evaluate/validation_loss" in each] == [6, 12]
    assert {each["step"] for each in wandb.logged if "save/new_bytes" in each} >= {5, 10, 12}
    (started,) = wandb.started
    assert (started["project"], started["name"], started["config"]["loop.steps"]) == ("tiny", "run", 12)
    # Saves are reported at the step that was saved, so W&B's own counter of steps cannot be used.
    assert (wandb.metrics, wandb.ended) == ([("step", None), ("*", "step")], [0])


def test_resumed_run_is_the_same_for_wandb_also_of_an_old_version(tmp_path: Path, data: Path, wandb: FakeWandb) -> None:
    def begin_and_resume(name: str, change: Callable[[dict[str, Any]], object]) -> tuple[str, str]:
        """Return the identity of a run before and after its record is changed, and its folder renamed."""
        run(CONFIG.changed(WANDB), tmp_path / name, data, stop_at=1)
        record = json.loads((tmp_path / name / "run.json").read_text())
        change(record)
        (tmp_path / name / "run.json").write_text(json.dumps(record))
        moved = (tmp_path / name).rename(tmp_path / f"{name}, moved")
        run(CONFIG.changed(WANDB), moved, data, resume=True, stop_at=2)
        first, again = (each["id"] for each in wandb.started[-2:])
        assert again == RunFolder(moved).record().identity == json.loads((moved / "run.json").read_text())["identity"]
        return first, again

    def earlier(record: dict[str, Any]) -> None:
        # This version fills the setting in, which the one that started the run did not know.
        del record["config"]["log"]["gradient_norms"]
        record["config"]["log"]["every"] = 2

    first, again = begin_and_resume("run", lambda record: None)
    kept, kept_again = begin_and_resume("earlier", earlier)
    assert (again, kept_again) == (first, kept)
    assert first != kept
    # A record without an identity gets one.
    begin_and_resume("without", lambda record: record.pop("identity"))
    assert {each["resume"] for each in wandb.started} == {"allow"}


def test_mlflow_receives_the_figures_of_the_log(tmp_path: Path, data: Path, mlflow: FakeMlflow) -> None:
    groups = {"optim.groups.blocks.0.*.lr_factor": 0.3, "optim.groups.blocks.0.?orm*.lr_factor": 0.5}
    config = CONFIG.changed(MLFLOW | groups)
    run(config, tmp_path / "run", data, stop_at=5)
    (first,) = mlflow.runs.values()
    assert [(step, value) for step, key, value in first["metrics"] if key == "train/loss"] == losses(tmp_path / "run")
    assert (first["status"], first["name"], first["params"]["loop.steps"]) == ("FINISHED", "run", "12")
    # Names of settings are those that it accepts, with what they stand for.
    assert first["params"]["optim.groups.blocks.0._.lr_factor"] == "0.3"
    names = json.loads(first["tags"]["tensorkeep.names"])
    found = {name: float(first["params"][sent]) for sent, name in names.items() if name.endswith("lr_factor")}
    assert found == groups
    assert _accepted_names(["a.?", "a.*", "a._"]) == {"a.?": "a._", "a.*": "a.__", "a._": "a.___"}
    run(config, tmp_path / "run", data, resume=True, stop_at=8)
    (only,) = mlflow.runs.values()
    assert [step for step, key, _ in only["metrics"] if key == "train/loss"] == list(range(1, 9))
    run(config, tmp_path / "other", data, stop_at=1)
    assert len(mlflow.runs) == 2


def test_mlflow_gets_grouped_events_and_all_before_a_save(tmp_path: Path, mlflow: FakeMlflow, trained: Trained) -> None:
    trained(CONFIG, tmp_path / "run")
    now = [0.0]
    tracker = Mlflow(RunFolder(tmp_path / "run"), "tiny", now=lambda: now[0])
    tracker.begin(0)
    before = mlflow.requests
    for step in range(1, 4):
        tracker.write(step, "train", {"train/loss": 1.0})
    assert mlflow.requests == before
    tracker.write(3, "save", {"save/new_bytes": 5})
    assert mlflow.requests == before + 1
    tracker.write(4, "train", {"train/loss": 1.0})
    now[0] = 6.0
    tracker.write(5, "train", {f"train/{number}": 1.0 for number in range(150)})
    assert mlflow.requests == before + 3


def test_trackers_change_nothing(tmp_path: Path, data: Path, trained: Trained) -> None:
    trained(CONFIG, tmp_path / "plain")
    tracked = CONFIG.changed(WANDB | MLFLOW)
    run(tracked, tmp_path / "tracked", data, stop_at=7)
    run(tracked, tmp_path / "tracked", data, resume=True)
    check_same(tmp_path / "tracked", tmp_path / "plain")


def test_tracker_that_fails_is_left_out_and_the_run_continues(tmp_path: Path, data: Path, wandb: FakeWandb) -> None:
    wandb.fails_at = 4
    with TestCase().assertLogs(level="WARNING") as logged:
        assert run(CONFIG.changed(WANDB), tmp_path / "run", data).reason == "done"
    assert [each["step"] for each in wandb.logged] == [1, 2, 3]
    (message,) = [each.getMessage() for each in logged.records]
    assert message == "log.wandb is off from now on: the network is gone; log.jsonl has all figures"
    assert len(losses(tmp_path / "run")) == 12


def test_tracker_that_refuses_the_run_is_an_error_with_a_remedy(tmp_path: Path, data: Path, wandb: FakeWandb) -> None:
    wandb.refuses = True
    with pytest.raises(tensorkeep.StoreError, match="api_key not configured") as raised:
        run(CONFIG.changed(WANDB), tmp_path / "run", data)
    assert "WANDB_MODE=offline" in str(raised.value) and "more" not in str(raised.value)


def test_failed_run_is_reported_as_failed(tmp_path: Path, data: Path, wandb: FakeWandb, mlflow: FakeMlflow) -> None:
    def fail(opened: Any) -> None:
        opened.operations.update = lambda: 1 / 0

    with pytest.raises(ZeroDivisionError):
        run(CONFIG.changed(WANDB | MLFLOW), tmp_path / "run", data, arrange=fail)
    assert wandb.ended == [1]
    assert [each["status"] for each in mlflow.runs.values()] == ["FAILED"]


def test_missing_package_is_refused_before_writing(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        with case(name), pytest.raises(tensorkeep.MissingExtraError, match=f"log.{name} needs {name}") as raised:
            run(CONFIG.changed({f"log.{name}": "tiny"}), tmp_path / "run", data)
        assert f"pip install './packages/chatgot[{name}]'" in str(raised.value)
        assert not (tmp_path / "run").exists()


def test_figures_are_numbers_by_name() -> None:
    values = {"loss": 2.0, "text": "x", "tokens": 3, "gradient_norms": {"tokens": 1.0, "blocks.0": 0.5}}
    norms = {"train/gradient_norms/tokens": 1.0, "train/gradient_norms/blocks.0": 0.5}
    found = dict(figures_of("train", values))
    assert found == {"train/loss": 2.0, "train/tokens": 3, **norms}
    json.dumps(found)
