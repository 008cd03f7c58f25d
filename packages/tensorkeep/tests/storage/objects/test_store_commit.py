"""The commit of a checkpoint in a store: one conditional request, and each of its outcomes is recognised."""

import contextlib
import errno
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from store_servers import JumpingClock
from tensorkeep.errors import DestinationExistsError, StoreError
from tensorkeep.paths import StorePath
from tensorkeep.storage import store_commit, store_requests
from tensorkeep.storage.clock import use_clock
from tensorkeep.storage.object_store import ObjectCommit
from tensorkeep.storage.store_commit import StoreCommit, is_tombstone, object_name, put_tombstone

obstore = pytest.importorskip("obstore")
pytestmark = pytest.mark.usefixtures("memory")

PATH = StorePath("s3://bucket/run/step-1")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a store in the memory of this process."""
    store = obstore.store.MemoryStore()
    monkeypatch.setattr(store_requests, "_connect", lambda *arguments: store)
    with use_clock(JumpingClock()):
        yield


def names() -> set[str]:
    return {status.key for status in store_requests.objects(StorePath("s3://bucket/"))}


def commit(*, overwrite: bool = False, listed: Callable[[Any], list[str]] = lambda path: []) -> StoreCommit:
    return StoreCommit(PATH, overwrite=overwrite, replaceable=lambda path: True, listed=listed)


def manifest(save_id: str, step: int = 1) -> bytes:
    files = [{"name": object_name("model.safetensors", save_id)}]
    return msgspec.json.encode({"body": {"writer": "tensorkeep 9", "step": {"number": step}, "files": files}})


def save(begun: StoreCommit) -> str:
    name = object_name("model.safetensors", begun.save_id)
    store_requests.put(begun.path / name, b"data")
    begun.publish(manifest(begun.save_id))
    return f"run/step-1/{name}"


def save_whole() -> str:
    with commit() as begun:
        return save(begun)


def test_a_published_checkpoint_stays_and_a_failed_one_does_not() -> None:
    with pytest.raises(KeyError), commit() as failed:
        store_requests.put(failed.path / object_name("model.safetensors", failed.save_id), b"data")
        raise KeyError
    assert not names()
    kept = save_whole()
    assert names() == {kept, "run/step-1/manifest.json"}
    with pytest.raises(DestinationExistsError, match="exists already"):
        commit().__enter__()


def test_a_replacement_removes_what_only_the_old_manifest_lists_and_failed_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = save_whole()
    failed = [object_name(name, "1" * 16) for name in ("model.safetensors", "notes.txt")]
    for name in failed:
        store_requests.put(PATH / name, b"x")
    store_requests.put(PATH / "of-nobody.txt", b"x")
    shared = object_name("shared.tensorkeep", "0" * 16)
    store_requests.put(PATH / shared, b"x")
    listed = [old.rpartition("/")[2], shared, "../step-0/model.tensorkeep"]
    with commit(overwrite=True, listed=lambda path: listed) as second:
        store_requests.put(PATH / object_name("model.safetensors", second.save_id), b"data")
        second.publish(manifest(second.save_id) + f'"../step-1/{shared}"'.encode())
    assert old not in names()
    assert names() >= {f"run/step-1/{name}" for name in failed}
    monkeypatch.setattr(store_commit, "LEFTOVER_AGE", timedelta(0))
    with StoreCommit(PATH, overwrite=True, replaceable=bool, is_ours=lambda name: "model" in name) as third:
        third.publish(f'"../step-1/{shared}"'.encode())
    assert {each.rpartition("/")[2] for each in names()} == {"manifest.json", "of-nobody.txt", shared, failed[1]}
    assert names() >= {f"run/step-1/{shared}", "run/step-1/of-nobody.txt"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_loser_of_a_race_learns_who_won(overwrite: bool) -> None:
    if overwrite:
        save_whole()
    with pytest.raises(DestinationExistsError) as caught, commit(overwrite=overwrite) as loser:
        with commit(overwrite=overwrite) as winner:
            save(winner)
        save(loser)
    assert f"another save was first: save {winner.save_id} of step 1 by tensorkeep 9, at 20" in str(caught.value)
    assert not any(loser.save_id in name for name in names())
    assert sum(winner.save_id in name for name in names()) == 1


def test_objects_that_were_visible_stay_when_they_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    path = PATH.parent / "step-000001"
    answers(monkeypatch, "retried after a lost answer")
    real, winner = StoreCommit._read_back, StoreCommit(path, overwrite=True, replaceable=lambda path: True)

    def read_back(self: StoreCommit) -> Any:
        monkeypatch.setattr(StoreCommit, "_read_back", real)
        with winner as begun:
            save(begun)
        return real(self)

    with (
        pytest.raises(DestinationExistsError, match=f"another save was first: save {winner.save_id}"),
        StoreCommit(path, overwrite=False, replaceable=lambda path: True) as loser,
    ):
        monkeypatch.setattr(StoreCommit, "_read_back", read_back)
        save(loser)
    assert any(loser.save_id in name for name in names()), "whoever opened it may read it still"


def test_a_save_of_more_than_a_day_is_not_published_without_its_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_commit, "LEFTOVER_AGE", timedelta(-1))
    with commit() as whole:
        save(whole)
    with pytest.raises(StoreError, match="was deleted meanwhile: after 24 h"), commit(overwrite=True) as begun:
        begun.publish(manifest(begun.save_id))
    with pytest.raises(StoreError, match=r"model-.* was deleted meanwhile"), commit(overwrite=True) as ranks:
        fragment = object_name("rank-00000.json", ranks.save_id)
        store_requests.put(PATH / fragment, manifest(ranks.save_id))
        ranks.publish(f'{{"fragments": ["{fragment}"]}}'.encode())
    assert len(names()) == 2
    assert store_requests.read(PATH / "manifest.json")[0] == manifest(whole.save_id)


def answers(monkeypatch: pytest.MonkeyPatch, *outcomes: str) -> None:
    """Let the next requests for a manifest be carried out or not, and answered or not."""
    real = store_requests.put_unless_changed
    left = list(outcomes)

    def put(path: StorePath, content: bytes, seen: Any) -> bool | None:
        outcome = left.pop(0) if left and path.name == "manifest.json" else "as it is"
        done = outcome in ("as it is", "answer lost", "retried after a lost answer") and real(path, content, seen)
        if outcome == "refused":
            raise StoreError("cannot write it: AccessDenied", path=path, errno=errno.EACCES)
        if outcome in ("answer lost", "nothing arrives"):
            raise StoreError("cannot write it: timed out", path=path)
        return None if outcome == "retried after a lost answer" else done

    monkeypatch.setattr(store_requests, "put_unless_changed", put)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "outcomes",
    [["retried after a lost answer"], ["answer lost"], ["conflict"], ["conflict", "conflict", "answer lost"]],
)
def test_our_manifest_is_no_other_save(monkeypatch: pytest.MonkeyPatch, outcomes: list[str], overwrite: bool) -> None:
    if overwrite:
        save_whole()
    answers(monkeypatch, *outcomes)
    with commit(overwrite=overwrite) as begun:
        kept = save(begun)
    assert names() >= {kept, "run/step-1/manifest.json"}
    assert store_requests.read(PATH / "manifest.json")[0] == manifest(begun.save_id)


@pytest.mark.parametrize(
    ("outcome", "times", "message", "left"),
    [
        ("nothing arrives", 1000, "timed out; if the store still carries out the request", 1),
        ("refused", 1, "AccessDenied", 0),
        ("conflict", 1000, "keeps answering that another request is in its way", 0),
    ],
)
def test_a_commit_that_fails_leaves_objects_only_for_a_manifest_that_may_appear(
    monkeypatch: pytest.MonkeyPatch, outcome: str, times: int, message: str, left: int
) -> None:
    answers(monkeypatch, *[outcome] * times)
    with pytest.raises(StoreError, match=message), commit() as begun:
        save(begun)
    assert len(names()) == left


def test_a_manifest_that_is_listed_and_cannot_be_read_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    save_whole()
    monkeypatch.setattr(StoreCommit, "_read_back", lambda self: None)
    with pytest.raises(StoreError, match="lists a manifest that cannot be read"), commit(overwrite=True):
        pass


@pytest.mark.parametrize("readable", [True, False])
def test_after_a_lost_answer_a_refusal_keeps_what_may_be_seen(monkeypatch: pytest.MonkeyPatch, readable: bool) -> None:
    def refused(path: StorePath, *arguments: Any) -> Any:
        raise StoreError("AccessDenied", path=path, errno=errno.EACCES)

    def put(path: StorePath, content: bytes, seen: Any) -> bool:
        store_requests.put(path, content)
        if not readable:
            monkeypatch.setattr(store_requests, "read", refused)
        raise StoreError("AccessDenied", path=path)

    with contextlib.nullcontext() if readable else pytest.raises(StoreError, match="AccessDenied"), commit() as begun:
        monkeypatch.setattr(store_requests, "put_unless_changed", put)
        save(begun)
    assert len(names()) == 2


def test_a_tombstone_does_not_replace_another() -> None:
    for content in (b"first", b"second", b"second"):
        put_tombstone(PATH, content)
    found = {name.rpartition("/")[2] for name in names()}
    assert len(found) == 2 and all(map(is_tombstone, found))
    assert {store_requests.read(PATH / name)[0] for name in found} == {b"first", b"second"}


def test_leftovers_of_dead_saves_are_no_obstacle_and_other_objects_are() -> None:
    store_requests.put(PATH / object_name("model.safetensors", "0" * 16), b"half")
    store_requests.put(PATH / "removed.json", b"{}")
    save_whole()
    store_requests.delete([PATH / "manifest.json"])
    store_requests.put(PATH / "notes.txt", b"mine")
    with pytest.raises(DestinationExistsError, match=r"holds 'notes\.txt', and is not a checkpoint"):
        commit(overwrite=True).__enter__()


def test_one_object_is_not_replaced_unless_asked_for() -> None:
    path = PATH / "w.safetensors"
    with ObjectCommit(path, overwrite=False, replaceable=lambda path: False):
        store_requests.put(path, b"x")
    with pytest.raises(DestinationExistsError, match="exists already"):
        ObjectCommit(path, overwrite=False, replaceable=lambda path: True).__enter__()
    with pytest.raises(DestinationExistsError, match="not a checkpoint of this format"):
        ObjectCommit(path, overwrite=True, replaceable=lambda path: False).__enter__()
