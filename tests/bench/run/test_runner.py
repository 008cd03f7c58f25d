"""A run keeps what it measured at every moment, ends cleanly, and goes on where it stopped."""

import json

import pytest
from tensorkeep.bench.experiment.experiment import read_experiment

from tensorkeep.bench import results as documents
from tensorkeep.bench.experiment import workload
from tensorkeep.bench.run.cell import CellResult
from tensorkeep.bench.run.runner import execute
from tensorkeep.bench.run.scratch import NAME, Scratch
from tensorkeep.errors import BusyError, NotACheckpointError, StoreError, UsageError

ARMS = ["one", "one (again)", "two", "three"]


@pytest.fixture
def document(tmp_path):
    file = tmp_path / "experiment.json"
    settings = {"model": "openllama-3b:scale=0.0005:layers=1", "slow_model": "openllama-3b:scale=0.0005:first-2"}
    arms = [
        {"name": "one", "settings": {"tool": "torch"}},
        {"name": "two", "settings": {"tool": "safetensors"}, "slow": True},
        {"name": "three", "settings": {"tool": "tensorkeep"}},
    ]
    file.write_text(json.dumps({"name": "small", "runs": 3, "settings": settings, "arms": arms}))
    home = workload.get("checkpoint")
    experiment = read_experiment(file, check_settings=home.check)
    file.unlink()
    return documents.plan(experiment, home, "tensorkeep bench")


class Told:
    def __init__(self):
        self.events = []

    def preparing(self):
        self.events.append("preparing")

    def begins(self, cell, done, total, seconds_left):
        self.events.append((cell["arm"], done, total, seconds_left))

    def ended(self, cell):
        self.events.append(cell["status"])


def measured(task, limits):
    figures = {"save": 1.0, "load_cold": 2.0, "load_warm": 3.0, "stored": 4.0, "returned": 0.5}
    return CellResult("ok", None, 10.0, figures, {"build": 1.0})


def go(document, folder, run=measured, told=None):
    execute(document, folder / "results.json", folder, told or Told(), run)


def on_disk(folder):
    return json.loads((folder / "results.json").read_text())


def test_every_cell_is_run_once_in_blocks(document, tmp_path):
    tasks, told = [], Told()

    def run(task, limits):
        assert list((tmp_path / NAME).iterdir())
        assert not (tmp_path / task.directory).exists()
        tasks.append(task)
        return measured(task, limits)

    go(document, tmp_path, run, told)
    assert sorted(task.arm for task in tasks[:4]) == sorted(ARMS)
    assert sorted(task.arm for task in tasks) == sorted(ARMS * 3)
    assert len({task.directory for task in tasks}) == 12
    assert not (tmp_path / NAME).exists()
    found = on_disk(tmp_path)
    assert found == document
    assert found["complete"]
    assert found["finished"] >= found["started"]
    assert found["summary"]["arms"]["two"]["save"]["n"] == 3
    assert {measure["name"] for measure in found["measures"]} >= {"save", "load_cold", "load_warm", "stored"}
    assert "into_warm" not in {measure["name"] for measure in found["measures"]}
    assert found["environment"]["storage"]["free_bytes"] > 0
    assert told.events[0] == "preparing"
    assert told.events[1][1:] == (0, 12, None)
    assert told.events[-2][1:] == (11, 12, 10.0)


def test_slow_arms_work_on_the_smaller_subject(document, tmp_path):
    go(document, tmp_path)
    amounts = {cell["arm"]: cell["amount"] for cell in document["cells"]}
    assert amounts["one"] == amounts["three"] == document["subject"]["bytes"]
    assert 0 < amounts["two"] < amounts["one"]
    [subject] = {cell["subject"] for cell in document["cells"] if cell["arm"] == "two"}
    assert subject.startswith("openllama-3b:scale=0.0005:first-2: 2 tensors, ")


def test_what_is_measured_is_kept_at_every_moment(document, tmp_path):
    counts = []

    def run(task, limits):
        counts.append(sum(cell["status"] == "ok" for cell in on_disk(tmp_path)["cells"]))
        return measured(task, limits)

    go(document, tmp_path, run)
    assert counts == list(range(12))


def interrupt_at(number, error):
    calls = []

    def run(task, limits):
        calls.append(task)
        if len(calls) == number:
            raise error
        return measured(task, limits)

    return run


def test_an_interrupted_run_goes_on_where_it_stopped(document, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        go(document, tmp_path, interrupt_at(6, KeyboardInterrupt()))
    found = documents.read(tmp_path / "results.json")
    assert not (tmp_path / NAME).exists()
    assert sum(cell["status"] == "ok" for cell in found["cells"]) == 5
    assert (found["complete"], found["finished"]) == (False, None)
    assert found["summary"]["arms"]["one"]["save"]["n"] >= 1
    done = [cell for cell in found["cells"] if cell["status"] == "ok"]
    tasks = []

    def run(task, limits):
        tasks.append(task.arm)
        return measured(task, limits)

    go(found, tmp_path, run)
    assert len(tasks) == 7
    assert tasks == [cell["arm"] for cell in document["cells"]][5:]
    assert found["complete"]
    assert [cell for cell in found["cells"] if cell["order"] < 5] == done


def test_a_full_disk_ends_the_run_and_is_tried_again(document, tmp_path):
    def run(task, limits):
        if task.arm == "three":
            return CellResult("disk", "no space left", 1.0)
        return measured(task, limits)

    with pytest.raises(StoreError, match=r"the disk was full in arm 'three'.*\n.*--resume goes on"):
        go(document, tmp_path, run)
    assert not (tmp_path / NAME).exists()
    found = documents.read(tmp_path / "results.json")
    assert not found["complete"]
    assert sum(cell["status"] == "disk" for cell in found["cells"]) == 1
    go(found, tmp_path)
    assert found["complete"]
    assert {cell["status"] for cell in found["cells"]} == {"ok"}


@pytest.mark.parametrize("status", ["failed", "timeout", "memory", "gate", "not-run"])
def test_what_fails_is_not_repeated(status, document, tmp_path):
    tasks = []

    def run(task, limits):
        tasks.append(task.arm)
        return CellResult(status, "why", 1.0) if task.arm == "two" else measured(task, limits)

    go(document, tmp_path, run)
    assert tasks.count("two") == 1
    assert tasks.count("one") == 3
    cells = [cell for cell in document["cells"] if cell["arm"] == "two"]
    assert [cell["status"] for cell in cells] == [status, "not-run", "not-run"]
    assert cells[2]["reason"].startswith("not repeated: in block 1 it ")
    assert document["complete"]
    assert document["summary"]["arms"]["two"]["save"]["verdict"] == "not run"


def test_two_runs_do_not_meet(document, tmp_path):
    with Scratch(tmp_path), pytest.raises(BusyError, match="another bench runs here"):
        go(document, tmp_path)


def test_what_a_killed_run_left_is_removed(tmp_path):
    left = tmp_path / NAME / "cell-3"
    left.mkdir(parents=True)
    (left / "state.pt").write_bytes(b"x")
    with Scratch(tmp_path) as scratch:
        assert list(scratch.path.iterdir()) == []
        (scratch.path / "y").write_bytes(b"y")
    assert list(tmp_path.iterdir()) == []


def test_results_that_are_none_are_refused(tmp_path):
    with pytest.raises(NotACheckpointError, match="no results to go on with"):
        documents.read(tmp_path / "results.json")
    for content in ("{", "[]", '{"kind": "tensorkeep-results", "schema": 99}'):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(UsageError, match="results"):
            documents.read(tmp_path / "results.json")


def test_infinite_figures_are_written_as_null(tmp_path):
    documents.write({"a": [float("inf"), 1.0, {"b": float("nan")}]}, tmp_path / "results.json")
    assert on_disk(tmp_path) == {"a": [None, 1.0, {"b": None}]}


def test_earlier_results_stay_until_a_run_has_begun(document, tmp_path):
    (tmp_path / "results.json").write_text("earlier")
    document["experiment"]["settings"]["model"] = "openllama-3b:scale=16"
    with pytest.raises(StoreError, match="are needed"):
        go(document, tmp_path)
    assert (tmp_path / "results.json").read_text() == "earlier"


def test_another_machine_does_not_go_on(document, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        go(document, tmp_path, interrupt_at(3, KeyboardInterrupt()))
    found = documents.read(tmp_path / "results.json")
    found["environment"]["versions"]["torch"] = "1.0"
    with pytest.raises(UsageError, match="not what this run began on"):
        go(found, tmp_path)
    assert on_disk(tmp_path)["environment"]["versions"]["torch"] != "1.0"


def test_names_in_a_results_file_decide_no_folder(document, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    for cell in document["cells"]:
        cell["order"] = f"x/../../../{victim}"
    folders = []

    def run(task, limits):
        folders.append(task.directory)
        return measured(task, limits)

    go(document, tmp_path, run)
    assert all(folder.startswith(str(tmp_path / NAME / "cell-")) and ".." not in folder for folder in folders)
    assert victim.exists()


def test_a_disk_without_room_is_refused_before_anything_runs(document, tmp_path):
    document["experiment"]["settings"]["model"] = "openllama-3b:scale=16"
    with pytest.raises(StoreError, match="are needed"):
        go(document, tmp_path, lambda task, limits: pytest.fail("ran"))
