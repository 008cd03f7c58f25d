"""A save is interrupted at each of its file-system operations: the old or the new checkpoint is there, complete.

TensorStore writes in threads of its own, unseen; the folder, the sidecar, syncing and renaming are seen. It aborts in a
process that was forked after it was used.
"""

import importlib
import signal
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fault_cases import Choose, every, some, swept
from faults import injection as faults
from forked import ended, start
from interrupted_saves import (
    ERRORS,
    NEW,
    OLD,
    REPLACE,
    Kind,
    allowed,
    check_errors,
    check_handlers,
    check_next_save,
    check_short_writes,
    holds,
    operations,
    saves,
)
from tiers import exhaustive

KINDS: dict[str, Kind] = {name: (saves(format=name), "ckpt") for name in ("t5x", "tensorstore")}


@pytest.mark.integration
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("name", "replace", "chosen"),
    [("tensorstore", True, "some"), *exhaustive(*product(("tensorstore", "t5x"), (False, True), ("every",)))],
)
def test_killed_beside_threads(tmp_path: Path, name: str, replace: bool, chosen: str, record_property: Any) -> None:
    # In a process that imports TensorStore and uses it only in its children.
    process = start(kill_everywhere, name, replace, tmp_path, chosen, output=tmp_path / "output")
    code, output = ended(process), (tmp_path / "output").read_text()
    assert code == 0, output
    assert set(output.split()) == allowed(replace)
    record_property("cases", len(output.split()))


def kill_everywhere(name: str, replace: bool, root: Path, chosen: str) -> None:
    """Kill a save at some of its operations, or at every one, and print what the folder holds after each."""
    importlib.import_module("tensorstore")
    kind = save, file = KINDS[name]
    total = root / "total"

    def count() -> None:
        total.write_text(str(len(operations(kind, root / "count", replace=replace))))

    assert faults.in_child(count) == 0
    for index in {"some": some, "every": every}[chosen](int(total.read_text())):
        folder = root / str(index)
        folder.mkdir()

        def work(folder: Path = folder, index: int = index) -> None:
            if replace:
                save(folder / file, OLD)
            with faults.broken(fail_at=index, action=faults.die):
                save(folder / file, NEW)

        def look(folder: Path = folder) -> None:
            folder.with_suffix(".found").write_text(holds(folder / file))
            check_next_save(kind, folder)

        assert faults.in_child(work) == signal.SIGKILL
        assert faults.in_child(look) == 0, f"after operation {index}"
        print(folder.with_suffix(".found").read_text(), flush=True)


@pytest.mark.parametrize(("kind", "replace", "number", "choose"), swept(KINDS, REPLACE, ERRORS))
def test_an_error_at_any_operation(tmp_path: Path, kind: Kind, replace: bool, number: int, chosen: Choose) -> None:
    check_errors(tmp_path, kind, replace, number, chosen)


@pytest.mark.parametrize(("kind", "choose"), swept(KINDS))
def test_short_writes_are_continued(tmp_path: Path, kind: Kind, chosen: Choose) -> None:
    check_short_writes(tmp_path, kind, chosen)


@pytest.mark.parametrize("stride", [499, *exhaustive(3)])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_handler_that_raises_at_any_place_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, stride: int
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # it may raise in the callback of a weak reference
    check_handlers(tmp_path, kind, stride, lambda path: [holds(path)])
