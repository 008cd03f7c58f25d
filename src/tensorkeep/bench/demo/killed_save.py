"""Part 3 of the demo: ``kill -9`` in the middle of a save that replaces a checkpoint."""

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tensorkeep.bench.checkpoint.first_load import PROCESSES
from tensorkeep.bench.checkpoint.gate import digest
from tensorkeep.bench.checkpoint.state_pair import StatePair, wipe
from tensorkeep.bench.checkpoint.tools.torch_tools import TorchTool
from tensorkeep.checkpoint.loading import load
from tensorkeep.checkpoint.saving import save
from tensorkeep.checkpoint.verify import verify
from tensorkeep.errors import StoreError, TensorkeepError, first_line
from tensorkeep.machine import written_bytes

_FRACTIONS = (0.5, 0.25, 0.1, 0.02)
"""Of the bytes after which a save is killed; the later ones are tried if a save ended before."""
_POLL_SECONDS = 0.001
_ENOUGH_BYTES = 64 * 1024**2
"""A save of fewer bytes ends before it can be killed."""


@dataclass(frozen=True, slots=True)
class KilledSave:
    """A save that was killed: after how long, how much it had written, and what is left of the checkpoint before it."""

    tool: str
    seconds: float
    written: int  # bytes, of ``nbytes``
    nbytes: int
    intact: bool  # whether the checkpoint loads, with every bit of the state that it had
    error: str | None  # why it does not load


def kill_saves(folder: Path, states: StatePair) -> list[KilledSave]:
    """Kill ``torch.save`` and `tensorkeep.save` while they replace a checkpoint; a small state is padded with zeros."""
    if states.nbytes < _ENOUGH_BYTES:
        padding = torch.zeros(_ENOUGH_BYTES, dtype=torch.uint8)
        states = StatePair({"state": states.source, "padding": padding})
    path = folder / "latest"
    save(states.source, path)
    return [_kill_torch(folder / "latest.pt", path, states), _kill_tensorkeep(path, states)]


def _kill_tensorkeep(path: Path, states: StatePair) -> KilledSave:
    after, written = _kill("tensorkeep", path, path, states.nbytes)
    try:
        report = verify(path)
        intact = report.ok and digest(load(path)) == digest(states.source)
        error = None if intact else "it holds another state"
    except TensorkeepError as raised:
        intact, error = False, raised.message
    return KilledSave("tensorkeep", after, written, states.nbytes, intact, error)


def _kill_torch(path: Path, source: Path, states: StatePair) -> KilledSave:
    tool = TorchTool()
    tool.save(states.source, path)
    after, written = _kill("torch", path, source, states.nbytes)
    try:
        intact = digest(tool.load(path)) == digest(states.source)
        error = None if intact else "it holds another state"
    except Exception as raised:
        intact, error = False, first_line(raised).partition(". ")[0]
    path.unlink()
    return KilledSave("torch", after, written, states.nbytes, intact, error)


def _kill(tool: str, path: Path, source: Path, nbytes: int) -> tuple[float, int]:
    """Kill a save by SIGKILL; return after how many seconds, and how many bytes it had written."""
    for fraction in _FRACTIONS:
        ours, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=_save_over, args=(theirs, tool, path, source), daemon=True)
        process.start()
        theirs.close()
        try:
            ours.recv()  # The state is ready, and the save begins.
            begin, before, written = time.perf_counter(), written_bytes(process.pid), 0
            while written < fraction * nbytes and not ours.poll(_POLL_SECONDS):
                written = written_bytes(process.pid) - before
            seconds = time.perf_counter() - begin
        except EOFError:
            raise StoreError("the saving process ended before it saved", path=path) from None
        finally:
            process.kill()
            process.join()
        if not _has_saved(ours):
            return seconds, written
    raise StoreError("every save ended before it was killed", path=path, remedy="use a larger --size")


def _has_saved(connection: Connection) -> bool:
    """Return whether the process, which has ended, reported the end of its save."""
    try:
        return connection.poll() and bool(connection.recv())
    except EOFError:
        return False


def _save_over(connection: Connection, tool: str, path: Path, source: Path) -> None:
    state = load(source)
    wipe(state)  # No part of the new checkpoint is that of the old one.
    connection.send("ready")
    if tool == "tensorkeep":
        save(state, path, overwrite=True)
    else:
        TorchTool().save(state, path)
    connection.send("done")
