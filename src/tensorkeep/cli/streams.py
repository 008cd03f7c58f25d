"""Stdout and stderr as a command finds them: closed, full, or in an encoding that cannot hold every name."""

from __future__ import annotations

import io
import os
import sys


def make_streams_safe() -> None:
    """Make printing to stdout and stderr possible whatever they are; what they cannot encode is escaped."""
    for name in ("stdin", "stdout", "stderr"):
        # Closed by the caller: its number would go to the next file that is opened, and so would what is printed.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def finish_stdout() -> OSError | None:
    """Write what is still waiting to be written to stdout, and return the error if that fails.

    After an error nothing reaches stdout any more: the interpreter flushes it once more at exit, and must not complain.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return error
    return None
