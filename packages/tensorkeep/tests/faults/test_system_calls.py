"""Each system call of a save, a load, a check, a conversion or a deletion fails once, with several errors.

Then the error is ours, the old or the new checkpoint is whole, no descriptor and no temporary is left, and the next
call works. The calls fail below Python (``system_calls.c``, preloaded), so that none is forgotten.
"""

import ctypes
import errno
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import forked
import tensorkeep
from tensorkeep import CheckpointManager
from tensorkeep.storage import parallel
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_suite import names_in
from tiers import exhaustive

# With others, as single long tests would come last, when the other workers have ended.
pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

# Calls that remove something. If one fails, something is left until the next save.
REMOVING = (
    *("unlink", "unlinkat", "rmdir", "open64", "openat64", "opendir", "fdopendir", "readdir64", "fstatat64", "flock"),
    *("lstat64", "fstat64", "fcntl64", "close"),
)
ERRORS = {"usual": 0, "input/output error": errno.EIO, "stale": errno.ESTALE, "no memory": errno.ENOMEM}


def state(number: int) -> dict[str, Any]:
    return {"w": torch.arange(5000.0) + number, "frozen": torch.ones(3000), "step": number, "text": "a"}


class Operation(NamedTuple):
    """What is called with a folder that has the checkpoints `old` (number 1) and `run` (steps 1 and 2)."""

    call: Callable[[Path], object]
    saves: str = ""
    """The checkpoint that it writes or replaces."""
    number: int = 3
    """That of the checkpoint afterwards."""


def managed(folder: Path, **settings: Any) -> None:
    with CheckpointManager(folder / "run", keep_last=2, **settings) as manager:
        manager.save(3, state(3)).wait()


def loaded(folder: Path, **settings: Any) -> None:
    found = tensorkeep.load(folder / "old", **settings)
    assert same(found, state(1))


def loaded_into(folder: Path) -> None:
    target = state(2)
    tensorkeep.load(folder / "old", into=target)
    assert same(target["w"], state(1)["w"])


def restored(folder: Path) -> None:
    with CheckpointManager(folder / "run") as manager:
        assert {step.number for step in manager.steps()} <= {1, 2}
        # A step that cannot be read is skipped, with a warning.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = manager.restore()
        assert same(found, state(1 if caught else 2))


OPERATIONS = {
    "replacement": Operation(lambda at: tensorkeep.save(state(3), at / "old", overwrite=True), "old"),
    "save": Operation(lambda at: tensorkeep.save(state(3), at / "new"), "new"),
    "coded": Operation(lambda at: tensorkeep.save(state(3), at / "new", compression="lossless"), "new"),
    "asynchronous": Operation(lambda at: tensorkeep.save_async(state(3), at / "new").wait(), "new"),
    **{
        name: Operation(lambda at, name=name: tensorkeep.save(state(3), at / name), name)
        for name in ("new.safetensors", "new.pt")
    },
    "manager": Operation(managed, "run/step-000003"),
    "incremental": Operation(lambda at: managed(at, incremental=True, asynchronous=True), "run/step-000003"),
    "load": Operation(loaded),
    "mapped": Operation(lambda at: loaded(at, mmap=True)),
    "into": Operation(loaded_into),
    "restore": Operation(restored),
    "verify": Operation(lambda at: tensorkeep.verify(at / "old")),
    "convert": Operation(lambda at: tensorkeep.convert(at / "old", at / "new.safetensors"), "new.safetensors", 1),
}


def main() -> None:
    """Break calls of an operation in this process, into which the library is loaded; print how many of which."""
    name, error, stride = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    library = ctypes.CDLL(None)
    library.broken_call.restype = ctypes.c_char_p
    operation = OPERATIONS[name]
    with tempfile.TemporaryDirectory() as place:
        template, folder = Path(place) / "template", Path(place) / "folder"
        tensorkeep.save(state(1), template / "old")
        with CheckpointManager(template / "run") as manager:
            for number in (1, 2):
                manager.save(number, state(number)).wait()

        def attempt(index: int) -> tuple[int, str, BaseException | None]:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(template, folder)
            failure = None
            library.arm(index, error)
            try:
                # A thread without memory ends before it begins.
                with mock.patch.object(parallel, "LONGEST_THREAD_START", 1.0):
                    operation.call(folder)
            except BaseException as raised:
                failure = raised
            finally:
                count = library.disarm()
            return count, library.broken_call().decode(), failure

        for _ in range(2):  # imports, and what is found out once
            count, _, failure = attempt(-1)
            assert failure is None, failure
        broken: dict[str, int] = {}
        problems = 0
        for index in range(stride // 2, count, stride):
            before = descriptors()
            _, call, failure = attempt(index)
            where = f"{call}, number {index}: {failure!r}"
            print(where, file=sys.stderr)  # shown if the test fails, or hangs
            try:
                if not isinstance(failure, tensorkeep.TensorkeepError | None):
                    raise failure
                check(folder, operation, call, failure)
                failure = None
                gc.collect()
                # The file that torch cannot map, or close, stays open in torch.
                assert descriptors() <= before or "cannot be mapped" in where
            except BaseException:
                problems += 1
                traceback.print_exc()
            broken[call] = broken.get(call, 0) + 1
    assert not problems, f"{problems} calls"
    print(json.dumps(broken))


def descriptors() -> set[str]:
    """Return the open descriptors, but for the one that reads them, and what they are of."""
    links = [*Path("/proc/self/fd").iterdir()]
    return {f"{link.name}: {os.readlink(link)}" for link in links if os.path.lexists(link)}


def check(folder: Path, operation: Operation, call: str, failure: BaseException | None) -> None:
    """Check what a call left behind that succeeded or failed, and that the next ones work."""
    alive = [thread.name for thread in threading.enumerate() if thread.is_alive()]
    assert not [name for name in alive if name.startswith("tensorkeep-save")]
    visible = {*names_in(folder), *(f"run/{name}" for name in names_in(folder / "run"))}
    left = {name for name in visible if name.split("/")[-1].startswith(".")}
    # What was replaced is kept until its successor is durable, and a deleted step until its deletion is.
    kept = call in REMOVING or "perhaps not durable" in str(failure)
    assert kept or all(name.startswith("run/.step-000001.") for name in left), left
    expected = {"old": 1, "run/step-000001": 1, "run/step-000002": 2}
    saved = operation.saves
    if saved:
        assert saved in visible or (failure is not None and saved not in expected)
        before = expected.pop(saved, operation.number)
        if saved in visible:
            allowed = {before, operation.number} if failure is not None else {operation.number}
            assert any(same(tensorkeep.load(folder / saved), state(number)) for number in allowed)
    for name in expected.keys() & visible:
        assert same(tensorkeep.load(folder / name), state(expected[name])), name
    # The manager keeps two steps.
    assert expected.keys() - visible <= ({"run/step-000001"} if saved.startswith("run") else set())
    if saved:
        shutil.rmtree(folder / saved, ignore_errors=True)
        (folder / saved).unlink(missing_ok=True)
        operation.call(folder)
    tensorkeep.save(state(4), folder / "old", overwrite=True)
    with CheckpointManager(folder / "run", keep_last=1) as manager:
        manager.save(5, state(5)).wait()
    assert not [name for name in names_in(folder) + names_in(folder / "run") if name.startswith(".")]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("library") / "system_calls.so"
    source = Path(__file__).with_name("system_calls.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], check=True)
    return built


@pytest.mark.parametrize(
    ("operation", "error", "stride"),
    [
        ("manager", "usual", 29),
        *exhaustive(*((operation, error, 1) for operation in OPERATIONS for error in ERRORS)),
    ],
)
def test_a_failing_call_is_an_error_of_ours_and_leaves_nothing(
    library: Path, operation: str, error: str, stride: int, record_property: Any
) -> None:
    run = subprocess.run(
        [sys.executable, __file__, operation, str(ERRORS[error]), str(stride)],
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": forked.PYTHONPATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    broken = json.loads(run.stdout)
    assert len(broken) > 3
    record_property("cases", sum(broken.values()))


if __name__ == "__main__":
    main()
