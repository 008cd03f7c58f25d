"""The command line: parse, run the command, and return its exit code; a command returns None for 0."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from tensorkeep.cli.commands import COMMANDS, CORE, GROUPS, Command, add_commands, epilogue, overview, plug_in_commands
from tensorkeep.cli.text import BROKEN_PIPE, finish_stdout, make_streams_safe
from tensorkeep.errors import StoreError
from tensorkeep.version import __version__

if TYPE_CHECKING:
    from cyclopts import App

# Functions import cyclopts and the modules that use it: `--help` and `--version` take half of the time of that import.

EPILOGUE = """\
Options also come from the environment (TENSORKEEP_MEMORY_BUDGET=1GiB) and from a TOML file (-C FILE) with one table \
per command; a flag overrides the environment, the environment overrides the file.

Exit codes: 0 ok, 1 difference or failed check, 2 usage, 3 I/O or store error, 4 corrupt, 5 not found or not a \
checkpoint, 6 destination exists, 7 unsupported, 70 internal error, 130 interrupted."""


DESCRIPTION = "Fast, verified, crash-safe checkpoints for PyTorch, in files that other tools open."


def build_app(*, plug_ins: bool = True, name: str = CORE, description: str = DESCRIPTION) -> "App":
    """Return the application with all commands, or the one of another package, named like it, with its commands."""
    from cyclopts import App

    from tensorkeep.cli.options import from_environment, from_file, with_local_paths

    commands = _commands(name, plug_ins=plug_ins)
    # A table of -C is named like the first word of a command.
    tables = [*dict.fromkeys(name.partition(" ")[0] for name in commands)]
    app = App(
        name=name,
        help=description,
        help_format="plaintext",
        help_epilogue=_notes(name),
        version=__version__,
        version_flags=["--version", "-V"],
        config=(from_environment, partial(from_file, tables), with_local_paths),
    )
    # They are imported when they run: `tensorkeep --help` imports neither torch nor numpy.
    add_commands(app, commands)
    return app


def _commands(program: str, *, plug_ins: bool = True) -> dict[str, Command]:
    commands = COMMANDS | (plug_in_commands() if plug_ins else {})
    return {words: command for words, command in commands.items() if program in (CORE, command.package)}


def _notes(program: str) -> str:
    return f"{EPILOGUE}\n\n{epilogue('')}" if program == CORE else EPILOGUE


def main(arguments: Sequence[str] | None = None, name: str = CORE, description: str = DESCRIPTION) -> int:
    """Run the command line, by default ``sys.argv``, and return its exit code; see `build_app`."""
    make_streams_safe()
    try:
        # A closed pipe shows while the command prints, or at the last flush.
        code = _run(list(sys.argv[1:] if arguments is None else arguments), name, description)
    except BrokenPipeError:
        finish_stdout()
        return BROKEN_PIPE
    failure = finish_stdout()
    # The last flush fails on a full disk, which must not look like success.
    if failure is None:
        return code
    if isinstance(failure, BrokenPipeError):
        return BROKEN_PIPE
    from tensorkeep.cli.errors import report_error

    # The output was buffered, and is lost: the command itself succeeded.
    unwritten = StoreError(f"cannot write the output: {failure.strerror}", remedy="free some space, or write elsewhere")
    return report_error(unwritten, as_json=False, verbose=False)


def _run(tokens: list[str], name: str, description: str) -> int:
    # Errors in the options themselves follow --json and -v, too.
    as_json = "--json" in tokens or os.environ.get("TENSORKEEP_JSON", "").lower() in ("1", "true", "yes")
    verbose = not {"-v", "--verbose"}.isdisjoint(tokens)
    try:
        text = _about(tokens, name, description)
        if text is not None:
            print(text)
            return 0
        from tensorkeep.cli.options import StoreOptions, flags_after_command, mistyped_variables
        from tensorkeep.cli.output import Output, logging_to_stderr

        # `tensorkeep --json info x`, as git and docker allow it.
        tokens = flags_after_command(tokens, GROUPS)
        # Reading the entry points of all installed packages takes longer than parsing the options.
        known = " ".join(tokens[:1]) in COMMANDS or " ".join(tokens[:2]) in COMMANDS
        app = build_app(plug_ins=not known, name=name, description=description)
        words = [token for token in tokens if token not in app.help_flags]
        shows_help = len(words) < len(tokens)
        if shows_help:
            # Only here: the import takes a tenth of the time of a short command.
            from tensorkeep.cli.help import Formatter, show_whole_docstring

            app.help_formatter = Formatter()
            show_whole_docstring(app.parse_commands(words)[1][-1])
        command, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
        output = bound.arguments.get("output", Output(json=as_json, verbose=verbose))
        # From here on the options are known, with the environment and the file.
        as_json, verbose = output.json, output.verbose
        store = next((each for each in bound.arguments.values() if isinstance(each, StoreOptions)), StoreOptions())
        for message in [] if shows_help else mistyped_variables(command):
            output.note(f"warning: {message}")
        with nullcontext() if shows_help else logging_to_stderr(output), store.applied():
            return command(*bound.args, **bound.kwargs) or 0
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        from tensorkeep.cli.errors import report_error

        return report_error(error, as_json=as_json, verbose=verbose)


def _about(tokens: list[str], name: str, description: str) -> str | None:
    """Return what the program prints about itself if there is no command."""
    if tokens in (["--version"], ["-V"]):
        return __version__
    if tokens in ([], ["--help"], ["-h"]):
        return overview(name, description, _notes(name), _commands(name))
    return None
