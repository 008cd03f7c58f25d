"""Errors as messages and exit codes; ``docs/reference/exit-codes.md`` lists the codes."""

import errno
import re
import sys
from collections.abc import Iterable
from contextlib import suppress

from cyclopts.exceptions import CycloptsError, UnknownCommandError, UnknownOptionError

from tensorkeep.cli.commands import command_meant
from tensorkeep.cli.output import print_json
from tensorkeep.cli.text import finish_stdout, printable
from tensorkeep.errors import OutOfMemoryError, StoreError, TensorkeepError, UsageError, did_you_mean, is_out_of_memory

# Exit codes, the most severe first: damage before I/O errors before missing paths.
_SEVERITY = (4, 3, 5, 7, 6, 2, 1, 0)
# Keyword arguments in remedies, which the Python API writes for its callers.
_KEYWORD = r"""\b(allow|drop_metadata|force|metric|mode|overwrite|select)=(True|\[[^\]]*\]|"[^"]*")"""


class Interrupted(TensorkeepError, kind="interrupted", exit_code=130):
    """Ctrl-C."""


class InternalError(TensorkeepError, kind="internal", exit_code=70):
    """An unexpected exception, which is a bug of Tensorkeep."""


def most_severe(codes: Iterable[int]) -> int:
    """Return the most severe of several exit codes; 0 without one."""
    # Not the largest number: 7 (unsupported) is milder than 4 (corrupt).
    return min(codes, key=_SEVERITY.index, default=0)


def as_failure(error: BaseException) -> TensorkeepError:
    """Return an exception as a TensorkeepError with a remedy for the command line (``--overwrite``)."""
    if isinstance(error, TensorkeepError):
        # The library writes remedies for Python; a user of the command line has flags.
        error.remedy = error.remedy and re.sub(_KEYWORD, _as_option, error.remedy)
        return error
    if isinstance(error, CycloptsError):
        return _usage_error(error)
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted")
    if is_out_of_memory(error):
        # torch adds a page of advice after the first line.
        reason = str(error).splitlines()[:1]
        return OutOfMemoryError(
            ": ".join(["out of memory", *reason]),
            remedy="give a smaller --memory-budget or fewer --threads, where the command has them, or a smaller state",
        )
    if isinstance(error, OSError):
        # EDQUOT: the quota of the user on this file system.
        full = errno.ENOSPC, errno.EDQUOT
        remedy = "free some space, or write elsewhere" if error.errno in full else None
        return StoreError(error.strerror or str(error), path=error.filename, remedy=remedy)
    return InternalError(
        f"{type(error).__name__}: {error}",
        remedy="this is a bug in tensorkeep: run the command again with -v and report the traceback",
    )


def _as_option(keyword: re.Match[str]) -> str:
    """Return a keyword of a call as options of a command: ``--allow a --allow b`` for ``allow=["a", "b"]``."""
    option = f"--{keyword[1].replace('_', '-')}"
    if keyword[2] == "True":
        return option
    import json
    import shlex

    try:
        value = json.loads(keyword[2])
    except ValueError:  # a name from a file has brackets or quotes
        return keyword[0]
    return " ".join(f"{option} {shlex.quote(each)}" for each in (value if isinstance(value, list) else [value]))


def report_error(error: BaseException, *, as_json: bool, verbose: bool) -> int:
    """Print an error on stderr, with ``as_json`` also as JSON on stdout, and return the exit code."""
    # A traceback of the parser does not help a user who mistyped an option.
    if verbose and not isinstance(error, CycloptsError):
        import traceback

        traceback.print_exception(error, file=sys.stderr)
    failure = print_error(error)
    if as_json:
        # If stdout fails as well, the error is on stderr.
        with suppress(OSError):
            print_json({"error": failure.as_dict()})
    finish_stdout()
    return failure.exit_code


def print_error(error: BaseException) -> TensorkeepError:
    failure = as_failure(error)
    print(*error_lines(failure), sep="\n", file=sys.stderr)
    return failure


def error_lines(failure: TensorkeepError) -> list[str]:
    """Return the message and the remedy, with control characters escaped."""
    # Names in messages may come from hostile files. The text of an error ends with its remedy, a line of its own.
    text = str(failure).removesuffix(f"\n{failure.remedy}")
    prefix = {"interrupted": "", "internal": "internal error: "}.get(failure.kind, "error: ")
    return [printable(line) for line in (f"{prefix}{text}", failure.remedy) if line]


# Options of `bench checkpoint` that its short form `bench claims` does not have.
ONLY_CHECKPOINT = ("--arms", "--budget", "--keep", "--memory-limit", "--seed", "--slow-model", "--time-limit")


def _usage_error(error: CycloptsError) -> UsageError:
    command = " ".join(["tensorkeep", *(error.command_chain or ())])
    remedy = f"see `{command} --help`"
    if isinstance(error, UnknownCommandError) and error.unused_tokens and error.app is not None:
        # cyclopts would import every command to suggest a name.
        token = error.unused_tokens[0]
        if token.startswith("-"):
            return UsageError(f"unknown option: {token}", remedy=remedy)
        if meant := command_meant([*error.unused_tokens]):
            return UsageError(f"unknown command {token!r}; the command for it: {meant}", remedy=remedy)
        # The application also lists its flags, such as --help.
        known = [name for name in error.app if not name.startswith("-")]
        return UsageError(f"unknown command {token!r}; {did_you_mean(token, known, 'commands')}", remedy=remedy)
    if isinstance(error, UnknownOptionError) and command == "tensorkeep bench claims":
        option = (error.token.keyword or error.token.value).partition("=")[0]
        if option in ONLY_CHECKPOINT:
            remedy = f"tensorkeep bench checkpoint --experiment claims {option} ..."
            return UsageError(f"unknown option: {option}", remedy=remedy)
    # cyclopts wraps its messages, and ends them with a full stop.
    message = " ".join(str(error).split()).rstrip(".")
    return UsageError(message[:1].lower() + message[1:], remedy=remedy)
