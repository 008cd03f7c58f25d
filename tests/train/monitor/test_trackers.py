"""Experiment trackers, by stand-ins for their packages: what they receive, when they resume, and when they fail."""

import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tensorkeep
from tensorkeep.testing.equality import difference
from tensorkeep.train.monitor.trackers import Mlflow, _accepted_names, figures_of
from tensorkeep.train.run.folder import RunFolder
from train.tiny_training import CONFIG, last_state, lines, run

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


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    return fake


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)  # type: ignore[arg-type]
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


def test_resumed_run_is_the_same_run_for_wandb(tmp_path: Path, data: Path, wandb: FakeWandb) -> None:
    run(CONFIG.changed(WANDB), tmp_path / "run", data, stop_at=5)
    (tmp_path / "run").rename(tmp_path / "moved")
    run(CONFIG.changed(WANDB), tmp_path / "moved", data, resume=True)
    run(CONFIG.changed(WANDB), tmp_path / "other", data)
    first, again, other = (each["id"] for each in wandb.started)
    assert first == again == RunFolder(tmp_path / "moved").record().identity != other
    assert {each["resume"] for each in wandb.started} == {"allow"}


def test_settings_of_a_later_version_leave_a_run_the_same(tmp_path: Path, data: Path, wandb: FakeWandb) -> None:
    run(CONFIG.changed(WANDB), tmp_path / "run", data, stop_at=5)
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text())
    # This version fills the setting in, which the one that started the run did not know.
    del record["config"]["log"]["gradient_norms"]
    record["config"]["log"]["every"] = 2
    path.write_text(json.dumps(record))
    run(CONFIG.changed(WANDB), tmp_path / "run", data, resume=True)
    assert len({each["id"] for each in wandb.started}) == 1


def test_record_without_an_identity_gets_one_when_the_run_resumes(tmp_path: Path, data: Path, wandb: FakeWandb) -> None:
    run(CONFIG, tmp_path / "run", data, stop_at=5)
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text())
    del record["identity"]
    path.write_text(json.dumps(record))
    run(CONFIG.changed(WANDB), tmp_path / "run", data, resume=True)
    assert json.loads(path.read_text())["identity"] == wandb.started[0]["id"]


def test_mlflow_receives_the_figures_of_the_log(tmp_path: Path, data: Path, mlflow: FakeMlflow) -> None:
    run(CONFIG.changed(MLFLOW), tmp_path / "run", data, stop_at=5)
    (first,) = mlflow.runs.values()
    assert [(step, value) for step, key, value in first["metrics"] if key == "train/loss"] == losses(tmp_path / "run")
    assert (first["status"], first["name"], first["params"]["loop.steps"]) == ("FINISHED", "run", "12")
    run(CONFIG.changed(MLFLOW), tmp_path / "run", data, resume=True)
    (only,) = mlflow.runs.values()
    assert [step for step, key, _ in only["metrics"] if key == "train/loss"] == list(range(1, 13))
    run(CONFIG.changed(MLFLOW), tmp_path / "other", data)
    assert len(mlflow.runs) == 2


def test_mlflow_gets_names_that_it_accepts_and_what_they_stand_for(
    tmp_path: Path, data: Path, mlflow: FakeMlflow
) -> None:
    groups = {"optim.groups.blocks.0.*.lr_factor": 0.3, "optim.groups.blocks.0.?orm*.lr_factor": 0.5}
    run(CONFIG.changed(MLFLOW | groups), tmp_path / "run", data, stop_at=2)
    (only,) = mlflow.runs.values()
    assert only["params"]["optim.groups.blocks.0._.lr_factor"] == "0.3"
    names = json.loads(only["tags"]["tensorkeep.names"])
    assert {only["params"][sent]: name for sent, name in names.items() if name.endswith("lr_factor")} == {
        "0.3": "optim.groups.blocks.0.*.lr_factor",
        "0.5": "optim.groups.blocks.0.?orm*.lr_factor",
    }
    sent = _accepted_names(["a.?", "a.*", "a._"])
    assert sent == {"a.?": "a._", "a.*": "a.__", "a._": "a.___"}


def test_mlflow_gets_several_events_in_a_request_and_all_before_a_checkpoint(
    tmp_path: Path, data: Path, mlflow: FakeMlflow
) -> None:
    run(CONFIG, tmp_path / "run", data)
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


@pytest.mark.parametrize("tracker", [WANDB, MLFLOW])
def test_trackers_change_nothing(
    tmp_path: Path, data: Path, tracker: dict[str, object], wandb: FakeWandb, mlflow: FakeMlflow
) -> None:
    run(CONFIG, tmp_path / "plain", data)
    run(CONFIG.changed(tracker), tmp_path / "tracked", data, stop_at=7)
    run(CONFIG.changed(tracker), tmp_path / "tracked", data, resume=True)
    assert lines(tmp_path / "tracked") == lines(tmp_path / "plain")
    assert difference(last_state(tmp_path / "tracked"), last_state(tmp_path / "plain")) is None


def test_tracker_that_fails_is_left_out_and_the_run_continues(
    tmp_path: Path, data: Path, wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.fails_at = 4
    with caplog.at_level(logging.WARNING):
        assert run(CONFIG.changed(WANDB), tmp_path / "run", data).reason == "done"
    assert [each["step"] for each in wandb.logged] == [1, 2, 3]
    (message,) = [each.getMessage() for each in caplog.records]
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


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_package_is_refused_before_anything_is_written(
    tmp_path: Path, data: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(tensorkeep.MissingExtraError, match=f"log.{name} needs {name}") as raised:
        run(CONFIG.changed({f"log.{name}": "tiny"}), tmp_path / "run", data)
    assert f"pip install '.[{name}]'" in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_figures_are_numbers_by_name() -> None:
    values = {"loss": 2.0, "text": "x", "tokens": 3, "gradient_norms": {"tokens": 1.0, "blocks.0": 0.5}}
    assert dict(figures_of("train", values)) == {
        "train/loss": 2.0,
        "train/tokens": 3,
        "train/gradient_norms/tokens": 1.0,
        "train/gradient_norms/blocks.0": 0.5,
    }
    json.dumps(dict(figures_of("train", values)))
