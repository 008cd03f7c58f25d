"""What the ranks do in the fault tests: collective saves, one of whose operations is broken on one rank."""

import errno
import os
import signal
import stat
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import distributed as dist

import tensorkeep
from checkpoint.ranks.cases import divided
from faults import injection as faults
from tensorkeep.ranks import group, merge
from tensorkeep.ranks.group import ranks_of

GRACE_SECONDS = 0.15
"""In place of a second, in which the living ranks would have to arrive on a busy machine."""

CONNECTING = ["connect", "connect"]
"""The operations with which the first save of a process group begins: its callers connect, and its writers."""

ACTIONS: dict[str, faults.Action] = {
    "killed before": faults.die,
    "killed after": faults.die_after,
    "full disk": faults.raise_error(errno.ENOSPC),
    "hung": faults.stop,
}


class Fault(NamedTuple):
    """What is broken: an operation of a rank, by its index, and how."""

    rank: int
    index: int
    action: str
    operation: str  # its name

    @property
    def is_found_at_timeout(self) -> bool:
        """Whether the other ranks notice it by the timeout only: it hangs, or ends before it has connected."""
        done = self.index + (self.action == "killed after")
        return self.action == "hung" or (self.action.startswith("killed") and done < len(CONNECTING))


class Part(NamedTuple):
    """What became of the save on one rank: its operations, and the class and text of its error, if it raised one."""

    operations: list[str]
    error: str | None
    message: str
    trace: str


def full_state(number: int) -> dict[str, Any]:
    """Return the state that all ranks have together; part of it is the same for all numbers."""
    return {
        "model": {"w": torch.arange(70.0).reshape(7, 10) * number, "frozen": torch.arange(4000.0).reshape(20, 200)},
        "plain": torch.full((30,), number),
        "step": number,
    }


def own_state(number: int) -> dict[str, Any]:
    return divided(full_state(number), "rows")


def save(root: Path, number: int, **options: Any) -> None:
    tensorkeep.save(own_state(number), root / "c", overwrite=True, **options)


def save_async(root: Path, number: int, **options: Any) -> None:
    tensorkeep.save_async(own_state(number), root / "c", overwrite=True, compression="lossless", **options).wait()


def save_step(root: Path, number: int, **options: Any) -> None:
    """Save a step over the last one, and delete that."""
    own = own_state(number)
    with tensorkeep.CheckpointManager(root, keep_last=1, incremental=True, **options) as manager:
        if manager.latest() is not None:
            manager.restore(into=own_state(0))
        manager.save(number, own).wait()


def take_part(rank: int, work: str, root: str, number: int, timeout: float, fault: Fault | None) -> Part:
    """Save together with the other ranks, while an operation of one of them is broken."""
    broken = fault is not None and fault.rank == rank
    error: BaseException | None = None
    given: Any = {"fail_at": fault.index, "action": ACTIONS[fault.action]} if broken else {}
    with mock.patch.object(group, "_GRACE", GRACE_SECONDS), faults.broken(**given) as operations:
        try:
            globals()[work](Path(root), number, group=dist.group.WORLD, timeout=timeout, threads=1)
        except BaseException as raised:
            error = raised
    trace = "".join(traceback.format_exception(error)) if error else ""
    return Part(operations.seen, type(error).__name__ if error else None, str(error or ""), trace)


def error_of_save(state: Any, root: str, timeout: float) -> str:
    """Save; return the class and the text of the error, if there is one."""
    try:
        tensorkeep.save(state, Path(root) / "c", overwrite=True, group=dist.group.WORLD, timeout=timeout)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save_again(rank: int, root: str, how: str) -> list[str]:
    """Save twice by one process group, the first time while rank 1 is disturbed; return the error of each."""
    state, errors = own_state(2), []
    if how != "interrupted while connecting":
        ranks_of(dist.group.WORLD, 100)

    def disturb(*arguments: Any, **options: Any) -> Any:
        if how.startswith("interrupted"):
            raise KeyboardInterrupt
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3)
        return real(*arguments, **options)

    # Every exchange begins with zeros.
    owner: Any = torch if how.startswith("interrupted") else merge.GroupSaveCoordinator
    name = "zeros" if how.startswith("interrupted") else "finish"
    real = getattr(owner, name)
    with mock.patch.object(group, "_GRACE", GRACE_SECONDS):
        for attempt in range(2):
            with mock.patch.object(owner, name, disturb if (rank, attempt) == (1, 0) else real):
                errors.append(error_of_save(state, root, timeout=1.5 if (how, attempt) == ("slow", 0) else 100))
    return errors


def save_beside_a_stopped_store(rank: int, root: str, port: int) -> list[str]:
    """Save twice when the process that serves the store of the process group has stopped; return the errors."""
    store = dist.TCPStore("127.0.0.1", port, dist.get_world_size(), rank == 0, timedelta(seconds=100))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    state = own_state(2)
    tensorkeep.save(state, Path(root) / "c", group=dist.group.WORLD, timeout=100)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    with mock.patch.object(group, "_GRACE", GRACE_SECONDS), mock.patch.object(group, "_STORE_SECONDS", 0.5):
        return [error_of_save(state, root, timeout=1.5) for _ in range(2)]


def leave_a_child(rank: int, root: str, pipe: str) -> None:
    """Fork a process that lives on, as a worker of a DataLoader may, while rank 0 is killed in a save."""

    def fork_and_die(*arguments: Any) -> None:
        child = os.fork()
        if child == 0:
            # The pipe to the test, whose end is that of the rank; the connections of the rank remain open.
            for path in [*Path("/proc/self/fd").iterdir()]:
                with suppress(OSError):
                    if stat.S_ISFIFO(path.stat().st_mode):
                        os.close(int(path.name))
            time.sleep(600)
            os._exit(0)
        Path(pipe).write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(merge, "write_root", fork_and_die):
        tensorkeep.save(own_state(2), Path(root) / "c", group=dist.group.WORLD, timeout=10)
