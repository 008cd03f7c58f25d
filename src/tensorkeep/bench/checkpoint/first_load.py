"""First loads: in a new process that has imported the tool and loaded nothing before, as in every job that starts.

A process that has loaded once has memory, threads and buffers that make its next load faster. Python's fork server
starts the processes. It is an interpreter of its own, which imports the libraries once and loads nothing, so that a
process takes milliseconds to start.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tensorkeep.bench.checkpoint.gate import digest, read_state
from tensorkeep.bench.checkpoint.probes import release_memory, remove
from tensorkeep.bench.checkpoint.state_pair import Blueprint, Expected, wipe
from tensorkeep.bench.checkpoint.tools.base import Tool
from tensorkeep.bench.experiment.workload import GateError

_WARM_UP_ELEMENTS = 4096

PROCESSES = get_context("forkserver")
"""Starts new processes from a server that has only imported the libraries."""
PROCESSES.set_forkserver_preload(["torch", "safetensors.torch", __name__])


def call_once(tool: Tool, folder: Path) -> None:
    """Save and load a few kilobytes, so that imports and other work of the first call are in no figure."""
    import torch

    path = folder / f"first-call{tool.suffix}"
    state = tool.view({"a": torch.ones(_WARM_UP_ELEMENTS), "b": torch.ones(2, 2)})
    try:
        tool.save(state, path)
        tool.load(path)
    finally:
        remove(path)


@dataclass(frozen=True, slots=True)
class FreshProcess:
    """Loads a checkpoint with a tool in a new process; ``expected`` is what it must return."""

    tool: Tool
    path: Path
    expected: Expected

    def load(self, arm: str, *, into: bool = False, times: int = 1) -> list[float]:
        """Return the seconds of the first load in the process, and of those that follow it.

        The loads go into new memory, or into tensors that exist before each. Errors call the tool ``arm``.

        Raises GateError if a load does not return what was saved; the error of the tool if it raises one.
        """
        blueprint = self.expected.blueprint if into else None
        answer = run_in_new_process(_load, self.tool, self.path, blueprint, times)
        if any(found != self.expected.digest for _, found in answer):
            raise GateError(f"{arm} loaded values that differ from the saved ones, in a new process")
        return [seconds for seconds, _ in answer]


def run_in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function that runs in a new process; its exception is raised here.

    Raises ChildProcessError if the process ends without an answer.
    """
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_answer, args=(theirs, function, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        process.join()
        raise ChildProcessError(f"the loading process ended with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _answer(connection: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    # Ctrl-C reaches every process of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        answer = function(*arguments)
    except Exception as error:
        answer = error
    connection.send(answer)


def _load(tool: Tool, path: Path, blueprint: Blueprint | None, times: int) -> list[tuple[float, str]]:
    """Return the seconds of each load, and the digest of what it returned."""
    with TemporaryDirectory(dir=path.parent) as folder:
        call_once(tool, Path(folder))
    release_memory()
    answer = []
    for _ in range(times):
        existing = None
        if blueprint is not None:
            existing = tool.view(blueprint.allocate())
            wipe(existing)
        begin = time.perf_counter()
        loaded = read_state(tool, path, existing)
        seconds = time.perf_counter() - begin
        answer.append((seconds, digest(loaded)))
        del loaded, existing
    return answer
