"""A save is interrupted at each of its file-system operations: the old or the new checkpoint is there, complete."""

import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tensorkeep
from fault_cases import Choose, swept
from faults import injection as faults
from interrupted_saves import (
    ERRORS,
    NEW,
    REPLACE,
    Kind,
    allowed,
    check_errors,
    check_handlers,
    check_next_save,
    check_short_writes,
    folders,
    holds,
    saves,
)
from tensorkeep.testing.format_suite import names_in
from tiers import exhaustive


def background(path: Path, state: object) -> None:
    tensorkeep.save_async(state, path, overwrite=True, threads=2).wait()


def incremental(path: Path, state: object) -> None:
    base = path if path.exists() else None
    options = {"incremental": True, "base": base, "delta": True}
    tensorkeep.save(state, path, overwrite=True, compression="lossless", threads=2, **options)


KINDS: dict[str, Kind] = {
    "native": (saves(threads=2), "ckpt"),
    "lossless": (saves(compression="lossless", threads=2), "ckpt"),
    "background": (background, "ckpt"),
    "incremental": (incremental, "ckpt"),
    "sharded": (saves(shard_bytes=4096, threads=2), "ckpt"),
    "safetensors": (saves(format="safetensors", threads=2), "ckpt.safetensors"),
    "torch": (saves(format="torch"), "ckpt.pt"),
    "dcp": (saves(format="dcp", thread_count=2), "ckpt"),
}
DEATHS = {"before": faults.die, "after": faults.die_after}


@pytest.mark.integration
@pytest.mark.parametrize(("kind", "replace", "action", "choose"), swept(KINDS, REPLACE, DEATHS))
def test_killed_at_any_operation(tmp_path: Path, kind: Kind, replace: bool, action: Any, chosen: Choose) -> None:
    save, name = kind
    met = set()
    for index, folder in folders(kind, tmp_path, chosen, replace=replace):

        def work(folder: Path = folder, index: int = index) -> None:
            with faults.broken(fail_at=index, action=action):
                save(folder / name, NEW)

        assert faults.in_child(work) == signal.SIGKILL
        met.add(holds(folder / name))
        check_next_save(kind, folder)
    assert met == allowed(replace)


@pytest.mark.parametrize(("kind", "replace", "number", "choose"), swept(KINDS, REPLACE, ERRORS))
def test_an_error_at_any_operation(tmp_path: Path, kind: Kind, replace: bool, number: int, chosen: Choose) -> None:
    check_errors(tmp_path, kind, replace, number, chosen)


@pytest.mark.parametrize(("kind", "choose"), swept(KINDS))
def test_short_writes_are_continued(tmp_path: Path, kind: Kind, chosen: Choose) -> None:
    check_short_writes(tmp_path, kind, chosen)


def managed(path: Path, state: object, *, asynchronous: bool) -> None:
    with tensorkeep.CheckpointManager(path, asynchronous=asynchronous, threads=2, keep_last=1) as manager:
        manager.save(1, state, overwrite=True)


MANAGED: dict[str, Kind] = {str(on): (partial(managed, asynchronous=on), "runs") for on in (False, True)}


@pytest.mark.parametrize("stride", [499, *exhaustive(3)])
@pytest.mark.parametrize("kind", [*KINDS.values(), *MANAGED.values()], ids=[*KINDS, *MANAGED])
def test_a_handler_that_raises_at_any_place_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, stride: int
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # it may raise in the callback of a weak reference
    managed = kind in MANAGED.values()
    check_handlers(tmp_path, kind, stride, names_in if managed else lambda path: [holds(path)])
