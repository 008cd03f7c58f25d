"""Processes of tests that have imported torch and the trainer already, as forks of the standard library's fork server.

The imports take seconds, which is more than most of these processes do. The server itself imports and computes nothing
else, so that its forks are as good as new interpreters.
"""

import atexit
import faulthandler
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing import Pipe, forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

CONTEXT = get_context("forkserver")
ROOT = Path(__file__).parents[1]
# Where modules are found: those of tests as by `pythonpath` in pyproject.toml, and the packages of this checkout.
PATHS = [ROOT / "tests", *sorted(ROOT.glob("packages/*/tests")), *sorted(ROOT.glob("packages/*/src"))]
PYTHONPATH = os.pathsep.join(map(str, PATHS))


def start_server() -> None:
    """Start the fork server of this process, if it has none; the package uses the same one."""
    # The first optimizer of a process imports torch's compiler.
    CONTEXT.set_forkserver_preload(["torch._dynamo", "techniques.several_processes", "tensorkeep.cli.options"])
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("PYTHONPATH", PYTHONPATH)
        patches.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()


def start(work: Callable[..., object], *arguments: object, output: Path) -> ForkServerProcess:
    """Start a process that calls a function of a module; its standard output and error are appended to a file."""
    # pytest imports test files by their path below the root, which other processes do not.
    module = re.sub(r"^(packages\.[\w-]+\.)?tests\.", "", work.__module__)
    process = CONTEXT.Process(target=_run, args=(module, work.__name__, arguments, output), daemon=True)
    start_server()
    process.start()
    killed_at_exit(process)
    return process


class Server:
    """A process that calls a function of a module with a pipe, and the other end of that."""

    def __init__(self, work: Callable[[Connection], object]) -> None:
        descriptor, output = tempfile.mkstemp(prefix="output-")
        os.close(descriptor)
        self._output = Path(output)
        self.pipe, theirs = Pipe()
        self.process = start(work, theirs, output=self._output)
        theirs.close()

    def tail(self) -> str:
        """Return the end of the output."""
        return self._output.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        kill(self.process)
        self.pipe.close()
        self._output.unlink()


def killed_at_exit(process: BaseProcess) -> None:
    """Let the process of a test that has failed not outlive this one.

    multiprocessing would end it with SIGTERM, which a training run only notes, and then wait for it without a limit.
    """
    # The last function that was registered runs first, so before that of multiprocessing.
    atexit.register(process.kill)


def start_tensorkeep(*words: str | Path, output: Path) -> ForkServerProcess:
    """Start a command of Tensorkeep."""
    return start(_tensorkeep, [*map(str, words)], output=output)


def ended(process: ForkServerProcess, seconds: float = 200) -> int:
    """Wait for a process, and return its exit code, or minus the signal that ended it; it must end in time."""
    process.join(seconds)
    in_time = process.exitcode is not None
    kill(process)
    assert in_time, f"still running after {seconds} s"
    assert process.exitcode is not None
    return process.exitcode


def kill(process: ForkServerProcess) -> None:
    """End a process that may be running."""
    process.kill()
    process.join()


def _run(module: str, work: str, arguments: Sequence[object], output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(file, standard)
    faulthandler.enable(2)  # a crash in native code then shows where
    getattr(import_module(module), work)(*arguments)


def _tensorkeep(words: list[str]) -> None:
    from tensorkeep.cli.main import main

    sys.exit(main(words))
