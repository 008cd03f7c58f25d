"""Which objects of a run in a store may be deleted: none that a step, a reader or a running save needs."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from tensorkeep.runs.backends import Garbage
from tensorkeep.runs.object_store import ManifestReferences, find_garbage, freed_bytes
from tensorkeep.storage.store_requests import ObjectStatus

NOW = datetime(2026, 5, 1, tzinfo=UTC)
GRACE = timedelta(hours=1)
ID = "0123456789abcdef"
A, B, C = (f"run/step-00000{number}/model-{ID}.tensorkeep" for number in (1, 2, 3))


def ago(hours: float) -> datetime:
    return NOW - timedelta(hours=hours)


def object_of(key: str, hours: float = 30) -> ObjectStatus:
    return ObjectStatus(key, 100, ago(hours), "tag")


def manifest(step: int, *keys: str, damaged: bool = False) -> ManifestReferences:
    return namer(step, "manifest.json", 29, keys, damaged)


def tombstone(step: int, hours: float, *keys: str, damaged: bool = False) -> ManifestReferences:
    return namer(step, "removed.json", hours, keys, damaged)


def namer(step: int, name: str, hours: float, keys: tuple[str, ...], damaged: bool) -> ManifestReferences:
    prefix = f"run/step-{step:06d}/"
    named = None if damaged else frozenset((*keys, prefix + name))
    return ManifestReferences(object_of(prefix + name, hours), prefix, named)


def garbage_of(
    others: list[ObjectStatus], manifests: list[ManifestReferences], tombstones: list[ManifestReferences]
) -> Garbage:
    found = [*others, *(each.status for each in (*manifests, *tombstones))]
    return find_garbage({each.key: each for each in found}, manifests, tombstones, now=NOW, grace=GRACE)


def test_what_a_step_names_remains_and_so_does_the_tombstone_of_an_earlier_one() -> None:
    assert not garbage_of([object_of(A), object_of(B)], [manifest(1, A), manifest(2, B, A)], [])
    assert not garbage_of([object_of(A), object_of(B)], [manifest(2, B, A)], [tombstone(1, 9, A)])


def test_objects_of_a_deleted_step_go_after_the_grace_period() -> None:
    others = [object_of(A), object_of(B)]
    assert garbage_of(others, [manifest(2, B)], [tombstone(1, 0.9, A)]) == Garbage(waiting={A: 100})
    found = garbage_of(others, [manifest(2, B)], [tombstone(1, 1.1, A)])
    assert found.removable == {A: 100, "run/step-000001/removed.json": 100}
    assert not found.waiting


def test_a_reader_of_a_later_step_keeps_what_that_shared() -> None:
    found = garbage_of([object_of(A), object_of(B)], [], [tombstone(1, 9, A), tombstone(2, 0.5, A, B)])
    assert found == Garbage(waiting={A: 100, B: 100})
    found = garbage_of([object_of(A), object_of(B)], [], [tombstone(1, 9, A), tombstone(2, 2, A, B)])
    assert [*found.removable] == sorted([A, B, "run/step-000001/removed.json", "run/step-000002/removed.json"])
    # A tombstone that only refers to others goes before them.
    found = garbage_of([object_of(A), object_of(C)], [manifest(3, C, A)], [tombstone(1, 9, A), tombstone(2, 9, A)])
    assert [*found.removable] == ["run/step-000002/removed.json"]


def test_objects_of_a_failed_save_go_after_a_day_and_objects_of_others_remain() -> None:
    assert garbage_of([object_of(A, 23)], [], []) == Garbage(unfinished={A: 100})
    assert garbage_of([object_of(A, 25)], [], []) == Garbage(removable={A: 100})
    others = ["eval.json", "model.tensorkeep", f"notes-{ID}.txt", "notes-12.tensorkeep"]
    assert not garbage_of([object_of(f"run/step-000001/{name}", 999) for name in others], [], [])


def test_an_object_that_was_written_after_the_tombstone_is_of_another_save() -> None:
    key = "run/step-000001/model.safetensors"
    assert not garbage_of([object_of(key, 2)], [], [tombstone(1, 3, key)]).removable.get(key)
    assert garbage_of([object_of(key, 4)], [], [tombstone(1, 3, key)]).removable.get(key)


def test_a_damaged_manifest_keeps_the_objects_beside_it() -> None:
    other = "run/step-000002/model.safetensors"
    assert not garbage_of([object_of(A)], [manifest(1, damaged=True)], [tombstone(1, 9, A)])
    found = garbage_of([object_of(other), object_of("run/step-000002/x.txt")], [], [tombstone(2, 9, damaged=True)])
    assert [*found.removable] == [other, "run/step-000002/removed.json"]


def test_deleting_steps_frees_what_no_other_names() -> None:
    objects = {key: object_of(key) for key in (A, B, C)}
    steps = [manifest(1, A), manifest(2, A, B), manifest(3, B, C)]
    assert [freed_bytes(objects, steps[:count], steps[count:]) for count in range(4)] == [0, 0, 100, 300]


class Model:
    """A run in a store: saves that build on others, deletions and sweeps, in any order, by a clock of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = NOW
        self.objects: dict[str, ObjectStatus] = {}
        self.steps: dict[int, ManifestReferences] = {}
        self.deleted: dict[int, ManifestReferences] = {}
        self.last = 0

    def put(self, key: str) -> ObjectStatus:
        self.objects[key] = ObjectStatus(key, 1, self.now, None)
        return self.objects[key]

    def name(self, step: int, name: str, keys: frozenset[str]) -> ManifestReferences:
        prefix = f"run/step-{step:06d}/"
        return ManifestReferences(self.put(prefix + name), prefix, keys | {prefix + name})

    def save(self) -> Iterator[None]:
        """Save a step over another one; whatever else happens does so at the yields."""
        self.last += 1
        step, base = self.last, self.random.choice([None, *self.steps.values()])
        yield
        keys = {self.put(f"run/step-{step:06d}/model-{step:016x}.tensorkeep").key}
        yield
        if base is not None:
            if base not in self.steps.values():
                return  # it was deleted: the save fails
            assert base.keys is not None
            keys |= {key for key in base.keys if key.endswith(".tensorkeep") and self.random.random() < 0.7}
        checked = self.now
        yield
        if self.now - checked < GRACE:
            self.steps[step] = self.name(step, "manifest.json", frozenset(keys))

    def delete(self) -> None:
        if self.steps:
            step = self.random.choice(list(self.steps))
            keys = self.steps[step].keys or frozenset()
            self.deleted[step] = self.name(step, "removed.json", keys - {f"run/step-{step:06d}/manifest.json"})
            del self.objects[self.steps.pop(step).status.key]

    def sweep(self) -> None:
        tombstones = [each for each in self.deleted.values() if each.status.key in self.objects]
        manifests = list(self.steps.values())
        found = find_garbage(self.objects, manifests, tombstones, now=self.now, grace=GRACE)
        for key in found.removable:
            del self.objects[key]

    def check(self) -> None:
        read = [each for each in self.deleted.values() if self.now - each.status.modified < GRACE]
        for each in (*self.steps.values(), *read):
            assert {*(each.keys or ())} <= {*self.objects}


@given(st.integers(0, 2**32))
def test_no_order_of_saves_deletions_and_sweeps_loses_an_object(seed: int) -> None:
    model = Model(seed)
    saves: list[Iterator[None]] = []
    for _ in range(150):
        model.now += timedelta(minutes=model.random.choice([1, 5, 25]))
        action = model.random.randrange(5)
        if action == 0 and len(saves) < 4:
            saves.append(model.save())
        elif action == 1:
            model.delete()
        elif action == 2:
            model.sweep()
        saves = [each for each in saves if model.random.random() < 0.5 or next(each, True) is None]
        model.check()
    for _ in range(2):
        model.now += timedelta(days=2)
        model.sweep()
    kept = set().union(*(each.keys or () for each in model.steps.values()))
    assert {key for key in model.objects if not key.endswith("removed.json")} == kept
