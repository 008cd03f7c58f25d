"""What the command line says and returns when something goes wrong.

====  ==========================================================================================
code  meaning
====  ==========================================================================================
0     done, and nothing is wrong
1     a difference, or a failed check
2     the command was called wrongly
3     the disk, the network or the memory refused
4     corrupt
5     not found, or not a checkpoint
6     the destination exists
7     unsupported: a dtype, a codec, a format, or an extra that is not installed
70    a bug in Tensorkeep
130   interrupted (Ctrl-C)
141   nobody reads the output any more (``tensorkeep ls x | head -1``)
====  ==========================================================================================
"""

from __future__ import annotations

import difflib
import errno
import json
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress

from cyclopts.exceptions import CycloptsError, UnknownCommandError

from tensorkeep.cli.streams import finish_stdout
from tensorkeep.cli.text import printable
from tensorkeep.errors import OutOfMemoryError, StoreError, TensorkeepError, UsageError, is_out_of_memory

BROKEN_PIPE = 141

# What the user hears of when several checkpoints fail in several ways: damage outranks a disk that refused, which
# outranks what is not there.
_SEVERITY = (4, 3, 5, 7, 6, 2, 1, 0)


class Interrupted(TensorkeepError):
    """Ctrl-C."""

    kind = "interrupted"
    exit_code = 130


class InternalError(TensorkeepError):
    """An exception that nobody meant to raise."""

    kind = "internal"
    exit_code = 70


def most_severe(codes: Iterable[int]) -> int:
    """Return the exit code that stands for several: 4, else 3, else 5, else 7, ... else 0."""
    return min(codes, key=_SEVERITY.index, default=0)


def as_failure(error: BaseException) -> TensorkeepError:
    """Return any exception as one that has an exit code and at most two lines to say."""
    if isinstance(error, TensorkeepError):
        return error
    if isinstance(error, CycloptsError):
        return _usage_error(error)
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted")
    if is_out_of_memory(error):
        reason = str(error).splitlines()[:1]
        return OutOfMemoryError(
            ": ".join(["out of memory", *reason]),
            remedy="give a smaller --memory-budget or fewer --threads, where the command has them, or a smaller state",
        )
    if isinstance(error, OSError):
        full = errno.ENOSPC, errno.EDQUOT
        remedy = "free some space, or write elsewhere" if error.errno in full else None
        return StoreError(error.strerror or str(error), path=error.filename, remedy=remedy)
    return InternalError(
        f"{type(error).__name__}: {error}",
        remedy="this is a bug in tensorkeep: run the command again with -v and report the traceback",
    )


def tell(error: BaseException, *, as_json: bool, verbose: bool) -> int:
    """Say what went wrong, on stderr and as JSON on stdout if that was asked for, and return the exit code."""
    failure = as_failure(error)
    if verbose and not isinstance(error, CycloptsError):
        traceback.print_exception(error, file=sys.stderr)
    for line in error_lines(failure):
        print(line, file=sys.stderr)
    if as_json:
        with suppress(OSError):
            print(json.dumps({"error": failure.as_dict()}, indent=2))
    # If stdout fails, too, then stderr has said what matters.
    finish_stdout()
    return failure.exit_code


def error_lines(failure: TensorkeepError) -> list[str]:
    """Return the one or two lines of an error; what a file made up cannot add a third or move the cursor."""
    remedy = printable(failure.remedy) if failure.remedy else ""
    said = str(failure)
    if remedy:
        said = said.removesuffix(f"\n{failure.remedy}")
    if isinstance(failure, Interrupted):
        return [printable(said), *([remedy] if remedy else [])]
    prefix = "internal error" if isinstance(failure, InternalError) else "error"
    return [f"{prefix}: {printable(said)}", *([remedy] if remedy else [])]


def _usage_error(error: CycloptsError) -> UsageError:
    command = " ".join(["tensorkeep", *(error.command_chain or ())])
    remedy = f"see `{command} --help`"
    if isinstance(error, UnknownCommandError) and error.unused_tokens and error.app is not None:
        # The library's own message would import every command to suggest one.
        token = error.unused_tokens[0]
        if token.startswith("-"):
            return UsageError(f"unknown option: {token}", remedy=remedy)
        known = [name for name in error.app if not name.startswith("-")]
        near = difflib.get_close_matches(token, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(known)}"
        return UsageError(f"there is no command {token!r}; {hint}", remedy=remedy)
    message = " ".join(str(error).split()).rstrip(".")
    return UsageError(message[:1].lower() + message[1:], remedy=remedy)
