"""``python -m MODULE ARGUMENT`` as a fork of the fork server, which has imported torch already; see ``forked.py``."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from forked import start


def forks(test: Callable[..., None]) -> Any:
    """Mark a test that uses the fork server."""
    return pytest.mark.integration(pytest.mark.xdist_group("processes")(test))


class ForkedModule:
    """Stands in for `subprocess.Popen` where a command begins with ``python -m``; it may have pipes."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = True,
        env: dict[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        assert list(command[:2]) == [sys.executable, "-m"], command
        self.args = command
        self.stdin, read = self._pipe_to_it() if stdin == subprocess.PIPE else (None, os.open(os.devnull, os.O_RDONLY))
        self.stdout, out = self._output(stdout, 1)
        self.stderr, err = self._output(stderr, 2)
        # Connections carry file descriptors to the fork server, and close these copies of them.
        ends = [Connection(end, readable=True) for end in (read, out, err)]
        ready, leads = Pipe(duplex=False)
        self._process = start(_run, command[2:], ends, leads, env, start_new_session, output=Path(os.devnull))
        for end in (*ends, leads):
            end.close()
        ready.recv()  # a process group can be killed only once it exists
        ready.close()
        self.pid = self._process.pid

    @staticmethod
    def _pipe_to_it() -> tuple[IO[str], int]:
        read, write = os.pipe()
        return os.fdopen(write, "w"), read

    @staticmethod
    def _output(file: Any, standard: int) -> tuple[IO[str] | None, int]:
        if file != subprocess.PIPE:
            return None, os.dup(standard if file is None else file.fileno())
        read, write = os.pipe()
        return os.fdopen(read), write

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> tuple[str | None, str | None]:
        """Return what it prints until it ends, which is little."""
        out, err = (None if file is None else file.read() for file in (self.stdout, self.stderr))
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()
        return out, err


def _completed(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[Any]:
    process = ForkedModule(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.wait(), out, err)


FORKING = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedModule, "run": _completed})
"""Stands in for the module `subprocess` in a module that starts ``python -m``."""


def _run(words: Sequence[str], ends: Sequence[Connection], leads: Connection, env: Any, session: bool) -> None:
    if session:
        os.setsid()
    leads.send(os.getpid())
    for standard, end in enumerate(ends):
        os.dup2(end.fileno(), standard)
    sys.stdin = os.fdopen(0)  # multiprocessing has replaced it
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
