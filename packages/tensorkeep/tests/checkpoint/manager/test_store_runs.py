"""Runs in object stores: saving, retention, shared objects, deletion in two stages, and readers beside all that."""

import json
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
import torch

import tensorkeep
from simulated_ranks import save_by_ranks
from store_servers import Fault, FaultAt, Proxy, damage
from tensorkeep import CheckpointManager
from tensorkeep.cli.main import main
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.finding import open_reader
from tensorkeep.formats.native.directory import read_contents
from tensorkeep.formats.native.writer import NativeWrite
from tensorkeep.paths import StorePath
from tensorkeep.runs import object_store as store_backend
from tensorkeep.runs.address import backend_of
from tensorkeep.storage import object_store, store_requests
from tensorkeep.storage.buffers import BufferPool
from tensorkeep.storage.object_store import StoreDirectory
from tensorkeep.testing.equality import same

pytestmark = pytest.mark.integration
pytest.importorskip("obstore")

BUCKET = "s3://runs"

Prune = Callable[..., Any]


@pytest.fixture
def root(bucket: Proxy, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> StorePath:
    """Return the root of a run of its own; deleted steps are kept for an hour."""
    monkeypatch.delenv("TENSORKEEP_STORE_GRACE", raising=False)
    return StorePath(f"{BUCKET}/{abs(hash(request.node.name)):x}")


@pytest.fixture
def no_grace(root: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORKEEP_STORE_GRACE", "0")


@pytest.fixture
def prune(root: StorePath, capsys: pytest.CaptureFixture[str]) -> Prune:
    """Prune the run on the command line; return the JSON document."""

    def call(*arguments: str) -> Any:
        assert main(["prune", str(root), *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def state(step: int) -> dict[str, Any]:
    """Return a state of which one tensor in four changes with each step."""
    tensors = {n: torch.randn(4000, generator=torch.Generator().manual_seed(n)) for n in range(4)}
    tensors[step % 4] += step / 1000
    return {"model": {f"w{n}": tensor for n, tensor in tensors.items()}, "n": step}


def names(root: StorePath) -> list[str]:
    """Return the keys of all objects of the steps, below the root of the run."""
    found = (each.key.removeprefix(f"{root.key}/") for each in store_requests.objects(root))
    return sorted(name for name in found if "/" in name)


def save_all(root: StorePath, steps: range, **settings: Any) -> list[Any]:
    with CheckpointManager(root, **settings) as manager:
        return [manager.save(step, state(step), metrics={"loss": 9.0 - step}).wait() for step in steps]


def numbers(root: StorePath) -> list[int]:
    return [step.number for step in backend_of(root).listing().steps]


@pytest.mark.usefixtures("no_grace")
def test_retention_over_many_steps(root: StorePath) -> None:
    with CheckpointManager(root, keep_last=2, keep_every=4, metric="loss") as manager:
        for step in range(1, 11):
            manager.save(step, state(step), metrics={"loss": abs(step - 5.5)})
        manager.wait()
        assert [step.number for step in manager.steps()] == [4, 8, 9, 10]
        assert manager.latest().number == 10  # type: ignore[union-attr]
        assert manager.best().number == 4  # type: ignore[union-attr]
        assert same(manager.restore(), state(10))
        assert same(manager.restore(4), state(4))
    assert same(tensorkeep.load(f"{root}@best"), state(4))
    assert {name.partition("/")[0] for name in names(root)} == {f"step-{n:06d}" for n in (4, 8, 9, 10)}
    pruned = {step.number: step.metrics["loss"] for step in tensorkeep.log(root).pruned}
    assert pruned == {step: abs(step - 5.5) for step in (1, 2, 3, 5, 6, 7)}
    assert not any(name.endswith("removed.json") for name in names(root))


@pytest.mark.parametrize("incremental", [pytest.param(True, marks=pytest.mark.exhaustive), "delta"])
@pytest.mark.usefixtures("no_grace")
def test_incremental_steps_share_objects_and_survive_the_deletion_of_others(root: StorePath, incremental: Any) -> None:
    reports = save_all(root, range(1, 9), incremental=incremental, keep_every=4, keep_last=1)
    assert all(report.base for report in reports[1:])
    assert all(report.new_bytes < reports[0].new_bytes / 2 for report in reports[1:4])
    assert numbers(root) == [4, 8]
    for step in (4, 8):
        assert same(tensorkeep.load(f"{root}@{step}"), state(step))
        assert tensorkeep.verify(f"{root}@{step}")
    # Nothing is left but what both steps use, and the tombstones of those whose objects they share.
    places = [StoreDirectory(root / f"step-{step:06d}") for step in (4, 8)]
    used = {place.path_of(name) for place in places for name in read_contents(place).sizes}
    left = {name for name in names(root) if not name.endswith("removed.json")}
    assert {str(path.relative_to(root)) for path in used} == left
    assert any(path.parent.name not in ("step-000004", "step-000008") for path in used)


def test_a_run_is_shown_by_address_copied_whole_and_counts_shared_objects_once(
    root: StorePath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = save_all(root, range(1, 4), incremental=True)
    found = tensorkeep.log(root)
    assert [step.new_bytes for step in found.steps] == [report.new_bytes for report in reports]
    assert [step.nbytes for step in found.steps] == [report.stored_bytes for report in reports]
    own = [step.own_bytes for step in backend_of(root).listing().steps]
    assert 0 < own[0] < found.steps[0].nbytes
    assert main(["info", f"{root}@3"]) == 0
    assert "shared with others" in capsys.readouterr().out
    for address in ("latest", "best:loss"):
        assert same(tensorkeep.load(f"{root}@{address}"), state(3)), address
    assert tensorkeep.verify(root)
    assert not tensorkeep.diff(f"{root}@1", f"{root}@2").equal
    tensorkeep.convert(f"{root}@3", tmp_path / "copy")  # has the objects that the step shares, too
    assert same(tensorkeep.load(tmp_path / "copy"), state(3))
    with pytest.raises(tensorkeep.NotFoundError, match="has no step 9\nthe nearest steps are 1, 2, 3"):
        tensorkeep.load(f"{root}@9")


def test_a_deleted_step_is_read_to_the_end_and_saved_again_in_the_grace_period(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(root, range(1, 3))
    with CheckpointManager(root) as manager:
        with tensorkeep.open(f"{root}@2") as opened:
            manager.delete(2)
            assert numbers(root) == [1]
            assert torch.equal(opened["model.w0"].load(), state(2)["model"]["w0"])
        with pytest.raises(tensorkeep.NotFoundError, match="has no step 2"):
            tensorkeep.load(f"{root}@2")
        with pytest.raises(tensorkeep.NotFoundError, match="step-000002: this step was deleted"):
            tensorkeep.load(root / "step-000002")
        assert "step-000002/removed.json" in names(root)
        assert manager.latest().number == 1  # type: ignore[union-attr]
        manager.save(2, state(7)).wait()
        assert same(manager.restore(2), state(7))
    monkeypatch.setenv("TENSORKEEP_STORE_GRACE", "0")
    backend_of(root).sweep()
    assert len(names(root)) == 4
    assert same(tensorkeep.load(f"{root}@2"), state(7))


def test_each_replaced_version_stays_for_the_grace_period(root: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(root, range(1, 2))
    monkeypatch.setattr(store_backend, "LEFTOVER_AGE", timedelta(0))
    with tensorkeep.open(root / "step-000001") as opened, CheckpointManager(root) as manager:
        for value in (2, 3):
            manager.save(1, state(value), overwrite=True).wait()
        manager.delete(1)
        backend_of(root).sweep()
        assert torch.equal(opened["model.w0"].load(), state(1)["model"]["w0"])
    monkeypatch.setenv("TENSORKEEP_STORE_GRACE", "0")
    backend_of(root).sweep()
    assert names(root) == []


def test_a_step_saved_again_during_its_deletion_remains(root: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(root, range(1, 2))
    real = store_backend.put_tombstone

    def put_tombstone(*arguments: Any) -> Any:
        monkeypatch.setattr(store_backend, "put_tombstone", real)
        tombstone = real(*arguments)
        with CheckpointManager(root) as manager:
            manager.save(1, state(7), overwrite=True).wait()
        return tombstone

    monkeypatch.setattr(store_backend, "put_tombstone", put_tombstone)
    with pytest.raises(tensorkeep.StoreError, match="was saved again while it was deleted"):
        backend_of(root).remove(root / "step-000001")
    assert same(tensorkeep.load(f"{root}@1"), state(7))


@pytest.mark.parametrize("incremental", [True, False])
def test_a_step_whose_objects_others_use_is_replaced(root: StorePath, incremental: bool) -> None:
    save_all(root, range(1, 3), incremental=True)
    with CheckpointManager(root, incremental=incremental) as manager, warnings.catch_warnings(action="ignore"):
        manager.restore(1)
        report = manager.save(1, state(9), overwrite=True).wait()
    assert report.base == (str(root / "step-000001") if incremental else None)
    assert not any(name.startswith("../") for name in read_contents(StoreDirectory(root / "step-000001")).sizes)
    for step, expected in ((1, 9), (2, 2)):
        assert tensorkeep.verify(f"{root}@{step}")
        assert same(tensorkeep.load(f"{root}@{step}"), state(expected))


def test_a_base_that_is_deleted_during_the_save_fails_it(root: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(root, range(1, 2), incremental=True)
    real = NativeWrite._write_files

    def write_files(*arguments: Any) -> Any:
        backend_of(root).remove(root / "step-000001")
        return real(*arguments)

    with CheckpointManager(root, incremental=True, asynchronous=False) as manager:
        manager.restore(1)
        monkeypatch.setattr(NativeWrite, "_write_files", write_files)
        with pytest.raises(tensorkeep.StoreError, match="was deleted or replaced during a save that shares it"):
            manager.save(2, state(2))
        assert [step.number for step in manager.steps()] == []


@pytest.mark.usefixtures("no_grace")
def test_failed_saves_leave_objects_that_prune_deletes(
    root: StorePath, prune: Prune, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_all(root, range(1, 3))
    orphan = root / "step-000003" / "model-0123456789abcdef.safetensors"
    store_requests.put(orphan, bytes(500))
    store_requests.put(root / "step-000003" / "notes.txt", b"mine")
    assert numbers(root) == [1, 2]
    document = prune("--keep-last", "1", "--dry-run")
    assert (document["leftovers"]["objects"], document["unfinished"]) == (0, {"objects": 1, "bytes": 500})
    monkeypatch.setattr(store_backend, "LEFTOVER_AGE", timedelta(0))
    assert main(["prune", str(root), "--broken", "--dry-run"]) == 0
    assert "would delete leftovers of earlier deletions and failed saves: 1 object, 500 B" in capsys.readouterr().out
    assert str(orphan.relative_to(root)) in names(root)
    document = prune("--keep-last", "1")
    assert document["leftovers"] == {"objects": 1, "bytes": 500}
    assert [step["step"] for step in document["deleted"]] == [1]
    left = ["step-000003/notes.txt"]
    assert [name for name in names(root) if not name.startswith("step-000002/")] == left
    store_requests.put(orphan, bytes(500))
    with CheckpointManager(root) as manager:
        assert manager.prune() == []
    assert [name for name in names(root) if not name.startswith("step-000002/")] == left


@pytest.mark.parametrize("hours", [26, 1.1, -26])
def test_a_wrong_clock_deletes_nothing_that_others_use(
    root: StorePath, prune: Prune, monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    save_all(root, range(1, 3))
    store_requests.put(root / "step-000003" / "model-0123456789abcdef.safetensors", b"of a save that runs")
    used = {*names(root)} - {"step-000001/manifest.json"}
    wrong = mock.Mock(now=lambda zone: datetime.now(zone) + timedelta(hours=hours))
    monkeypatch.setattr(store_backend, "datetime", wrong)
    found = "the clock of this machine is 1 [dh] ahead of the store's, .* is not deleted\nset the clock of this machine"
    with pytest.warns(UserWarning, match=found) if hours > 0 else nullcontext():
        assert [step["step"] for step in prune("--keep-last", "1")["deleted"]] == [1]
    assert {*names(root)} == {*used, "step-000001/removed.json"}


def test_prune_says_when_the_objects_are_deleted_and_which_are_not(
    root: StorePath, prune: Prune, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(root, range(1, 4))
    document = prune("--keep-last", "2", "--dry-run")
    size = document["freed_bytes"]
    assert document["grace_seconds"] == 3600
    assert size > 64_000
    assert main(["prune", str(root), "--keep-last", "2"]) == 0
    assert "by the next save or prune after 1 h" in capsys.readouterr().out
    document = prune("--keep-last", "2")
    assert document["deleted"] == []
    assert document["waiting"]["objects"] == 1
    assert 64_000 < document["waiting"]["bytes"] < size
    assert numbers(root) == [2, 3]
    monkeypatch.setenv("TENSORKEEP_STORE_GRACE", "0")
    document = prune("--keep-last", "2")
    assert document["leftovers"]["objects"] == 2
    assert not [name for name in names(root) if name.startswith("step-000001")]
    # A step with an object of the user is kept.
    store_requests.put(root / "step-000002" / "eval.json", b"{}")
    document = prune("--keep-last", "1")
    assert document["deleted"] == []
    assert "holds 'eval.json', which does not belong to the step" in document["left"]["2"]
    assert numbers(root) == [2, 3]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_damaged_step_is_skipped_and_saved_again_unless_it_was_replaced(root: StorePath, replaced: bool) -> None:
    save_all(root, range(1, 4))
    damage(root / next(name for name in names(root) if name.startswith("step-000003/model")))
    with CheckpointManager(root) as manager:
        with pytest.warns(UserWarning, match="step-000003 is skipped"):
            assert same(manager.restore(), state(2))
        if replaced:
            tensorkeep.save(state(9), root / "step-000003", overwrite=True)
            with pytest.raises(tensorkeep.DestinationExistsError, match="this step was saved already"):
                manager.save(3, state(3))
        else:
            manager.save(3, state(3)).wait()
    assert same(tensorkeep.load(f"{root}@3"), state(9 if replaced else 3))


def test_steps_are_listed_by_few_requests_also_while_the_store_fails(root: StorePath, server: Proxy) -> None:
    save_all(root, range(1, 7))
    place = backend_of(root)
    for count in (7, 1):  # one for each manifest, the first time
        server.start_again(None)
        assert len(place.listing().steps) == 6
        assert len([each for each in server.requests if "list-type" in each]) == 1
        assert len(server.requests) == count
    server.start_again(Fault("500", lambda number: number % 3 == 0))
    assert numbers(root) == [1, 2, 3, 4, 5, 6]
    assert same(tensorkeep.load(root), state(6))
    # A store that does not give manifests is not an empty run.
    object_store._first.clear()
    server.start_again(
        Fault("503", lambda number: server.requests[number].startswith("GET") and "list" not in server.requests[number])
    )
    with pytest.raises(tensorkeep.StoreError), CheckpointManager(root) as manager:
        manager.latest()
    with pytest.raises(tensorkeep.StoreError):
        tensorkeep.load(f"{root}@latest")


@pytest.mark.usefixtures("no_grace")
def test_objects_of_a_console_and_of_others_do_not_disturb_a_run(root: StorePath, server: Proxy) -> None:
    """The empty objects of folders, and keys that obstore does not read."""

    def put(key: str) -> None:
        urlopen(Request(f"{server.target}/{root.bucket[5:]}/{root.key}{quote(key)}", b"", method="PUT")).close()

    for key in ("/", "/step-000001/", "/step-000002/", "-model/"):
        put(key)
    assert tensorkeep.save(state(0), f"{root}-model")
    save_all(root, range(1, 3), incremental=True)
    put("//x")
    save_all(root, range(3, 4))
    with CheckpointManager(root, keep_last=2) as manager:
        assert [step.number for step in manager.prune()] == [1]
    assert same(tensorkeep.load(f"{root}@latest"), state(3))
    assert len(tensorkeep.log(root).steps) == 2
    put("-model//x")
    assert same(tensorkeep.load(f"{root}-model"), state(0))
    message = r"holds the object '[^']*/%s', and names with.*\nrename or delete that object"
    urlopen(Request(f"{server.target}/{root.bucket[5:]}/{root.key}//x", method="DELETE")).close()
    put("/zzz//x")
    put("/step-000003/a\nb")
    put("/step-000009//x")
    save_all(root, range(4, 5))
    save_all(root, range(5, 6), incremental=True)
    assert [step.number for step in tensorkeep.log(root).steps] == [2, 3, 4, 5]
    with (
        pytest.warns(UserWarning, match=r"an old step was not deleted: .*(step-000003/a\\nb|step-000009//x)"),
        CheckpointManager(root, keep_last=1) as manager,
    ):
        assert [step.number for step in manager.prune()] == [2, 4]
    with pytest.raises(tensorkeep.UnsupportedError, match=message % r"step-000003/a\\nb"):
        CheckpointManager(root).delete(3)
    assert all(same(CheckpointManager(root).restore(step), state(step)) for step in (3, 5))
    put("/step-x\nb")
    with pytest.raises(tensorkeep.UnsupportedError, match=message % r"step-x\\nb"):
        tensorkeep.log(root)


@pytest.mark.usefixtures("no_grace")
def test_a_deletion_of_many_steps_reads_each_manifest_once(root: StorePath, server: Proxy, prune: Prune) -> None:
    save_all(root, range(1, 13), incremental=True)

    def counted(call: Callable[[], Any]) -> tuple[int, int, int]:
        """Return how often manifests were read, tombstones written, and all other requests made."""
        server.start_again(None)
        call()
        kinds = [(each.startswith("GET"), "/removed" in each, "/manifest" in each) for each in server.requests]
        read, written = kinds.count((True, False, True)), kinds.count((False, True, False))
        return read, written, len(kinds) - read - written

    assert counted(lambda: CheckpointManager(root).latest()) <= (1, 0, 9)
    read, written, others = counted(lambda: prune("--keep-last", "2", "--dry-run"))
    assert (read, written) == (12, 0)
    assert others < 6
    read, written, others = counted(lambda: prune("--keep-last", "7"))
    assert (read, written) == (12, 5)
    # Three of them are for the metrics of the deleted steps.
    assert others < 15
    read, written, others = counted(lambda: CheckpointManager(root, keep_last=2).prune())
    assert (read, written) == (7, 5)
    assert others < 15
    assert numbers(root) == [11, 12]
    assert all(same(tensorkeep.load(f"{root}@{step}"), state(step)) for step in (11, 12))


def test_a_grace_period_that_is_not_a_duration_is_refused(root: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORKEEP_STORE_GRACE", "soon")
    with pytest.raises(tensorkeep.UsageError, match="TENSORKEEP_STORE_GRACE is 'soon'"):
        CheckpointManager(root)


def test_the_base_may_be_any_step_of_the_run_only(root: StorePath, tmp_path: Path) -> None:
    save_all(root, range(1, 2), incremental=True)
    tensorkeep.save(state(1), tmp_path / "c", incremental=True)
    report = tensorkeep.save(state(2), f"{root}/best", base=f"{root}/step-000001")
    assert report.base is None
    assert "only steps of one run share objects" in (report.base_refused or "")
    assert same(tensorkeep.load(f"{root}/best"), state(2))
    mixed = "one is on a disk, the other in an object store\nleave out base="
    for base, place in ((f"{root}/step-000001", tmp_path / "d"), (tmp_path / "c", f"{root}/step-000009")):
        with pytest.raises(tensorkeep.UsageError, match=mixed):
            tensorkeep.save(state(2), place, base=base)


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("times", [2, math.inf])
def test_a_step_that_is_not_read_is_neither_ignored_nor_deleted(root: StorePath, server: Proxy, times: float) -> None:
    """A run would otherwise seem to have fewer steps, and keep or delete others than it should."""
    save_all(root, range(1, 4))
    server.start_again(FaultAt("short", "step-000001/manifest.json", times))
    with CheckpointManager(root, keep_last=1) as manager:
        if times == 2:
            assert [step.number for step in manager.prune()] == [1, 2]
            return
        with pytest.raises(tensorkeep.StoreError, match=r"step-000001/manifest.json: cannot read it: the answer was"):
            manager.prune()
    server.start_again(None)
    assert numbers(root) == [1, 2, 3]


@pytest.mark.parametrize("action", ["reset", "truncated", "lost", "500"])
def test_listing_and_deletion_survive_a_connection_that_breaks(root: StorePath, server: Proxy, action: str) -> None:
    paths = [root / "step-000001" / f"{number}" for number in range(3)]
    for path in paths:
        store_requests.put(path, b"x")
    for call in (store_requests.objects, store_requests.children):
        server.start_again(Fault(action, lambda number: number == 0))
        assert len(list(call(root))) == (3 if call is store_requests.objects else 1)
    server.start_again(Fault(action, lambda number: number == 0))
    store_requests.delete(paths)
    assert store_requests.objects(root) == []


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("damaged", [False, True])
def test_an_uploaded_step_of_two_ranks_is_deleted(root: StorePath, tmp_path: Path, prune: Prune, damaged: bool) -> None:
    save_by_ranks(tmp_path / "step", state(1), 2)
    for file in (tmp_path / "step").iterdir():
        store_requests.put(root / "step-000001" / file.name, file.read_bytes())
    assert same(tensorkeep.load(f"{root}@1"), state(1))
    save_all(root, range(2, 3))
    if damaged:
        store_requests.put(root / "step-000001" / "manifest.json", b'{"xxh3_64":"damaged')
    document = prune("--keep-last", "1", "--broken")
    assert document["deleted_broken"] == ([1] if damaged else [])
    assert {name.partition("/")[0] for name in names(root)} == {"step-000002"}


def test_a_checkpoint_that_was_replaced_has_another_identity(root: StorePath) -> None:
    """Ranks compare it, so that none loads the old one beside others that load the new one."""
    path = root / "step-000001"
    tensorkeep.save({"w": torch.ones(3)}, path)
    with BufferPool(64 * 1024**2) as pool, open_reader(path, OpenSettings(pool=pool)) as old:
        before = old.identity()
        tensorkeep.save({"w": torch.zeros(3)}, path, overwrite=True)
        with open_reader(path, OpenSettings(pool=pool)) as new:
            assert new.identity() != before
        try:
            assert old.identity() == before
        except tensorkeep.StoreError as error:
            assert "was replaced" in str(error)


def test_a_run_behind_a_web_server_is_not_an_empty_one(root: StorePath, bucket: Proxy) -> None:
    with CheckpointManager(str(root)) as manager:
        manager.save(7, state(7))
    web = CheckpointManager(f"{bucket.url}/{str(root).removeprefix('s3://')}", keep_last=1)
    for call in (web.latest, web.steps, web.restore, web.prune):
        with pytest.raises(tensorkeep.UnsupportedError, match=r"lists no names.*\ngive the number of a step"):
            call()
    assert same(web.restore(7), state(7))
    assert same(tensorkeep.load(f"{web.root}@7"), state(7))
    with pytest.raises(tensorkeep.NotFoundError, match="has no step 8\ncheck the URL and the number"):
        tensorkeep.load(f"{web.root}@8")
    with pytest.raises(tensorkeep.UnsupportedError, match=r"lists no names.*\ngive the number of a step"):
        tensorkeep.load(f"{web.root}@latest")
    with pytest.raises(tensorkeep.NotFoundError, match="has no step 8"):
        web.restore(8)
    with pytest.raises(tensorkeep.UnsupportedError, match="is only read from"):
        web.save(8, state(8))
