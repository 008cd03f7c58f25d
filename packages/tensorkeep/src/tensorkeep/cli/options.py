"""Options that commands share, and their values: a flag overrides ``TENSORKEEP_MEMORY_BUDGET=1GiB`` in the environment,
which overrides the TOML file of ``-C`` (``[convert]`` / ``memory-budget = "1GiB"``), which overrides the default.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Literal, get_args

from cyclopts import App, Parameter
from cyclopts.argument import ArgumentCollection
from cyclopts.token import Token
from cyclopts.validators import Number

from tensorkeep.cli.commands import COMMANDS
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.errors import UsageError
from tensorkeep.paths import ENDPOINT_VARIABLES, checked_path
from tensorkeep.units import parse_bytes
from tensorkeep.variables import PREFIX, mistyped

# The table that ``tensorkeep tune checkpoint`` writes. The library reads it in every command that saves.
_SAVE_TABLE = "save"
# The tables within it, such as ``[train.optim]``, are settings of a recipe. ``tensorkeep train`` reads them.
_TRAIN_TABLE = "train"


def _size(kind: type, tokens: Sequence[Token]) -> int:
    try:
        return parse_bytes(tokens[0].value)
    except UsageError as error:
        raise ValueError(f"{error.message}: {error.remedy}") from error


SIZE = Parameter(converter=_size, n_tokens=1, metavar="SIZE")
Size = Annotated[int, SIZE, Parameter(show_default=lambda count: f"{count / 1024**2:g}MiB")]
# A flag that is off by default; `--flag=false` overrides the environment and the file.
Switch = Parameter(negative="", show_default=False)
AtLeastOne = Parameter(validator=Number(gte=1))
AtLeastZero = Parameter(validator=Number(gte=0))
Run = Annotated[Path, Parameter(help="The folder of the run, or one of its steps: RUN@1200, RUN@best.")]
Which = Annotated[Literal["last", "best"], Parameter(help="The last checkpoint, or the best one by validation loss.")]
Checkpoint = Annotated[Path | None, Parameter(name="--from", metavar="CHECKPOINT")]


@Parameter(name="*")
@dataclass(frozen=True)
class StoreOptions:
    """The options of commands that read or write object stores.

    Attributes
    ----------
    endpoint
        The server of s3:// paths, such as http://127.0.0.1:9000, instead of the one in AWS_ENDPOINT_URL.
    """

    endpoint: Annotated[str | None, Parameter(metavar="URL")] = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the server for ``s3://`` in the block; UsageError if ``endpoint`` is not the URL of a server."""
        if self.endpoint is None:
            yield
            return
        # A query, a fragment or a user could hold secrets, and errors print the URL.
        if not re.fullmatch(r"https?://[^\s@?#]+", self.endpoint):
            raise UsageError("--endpoint is not the URL of a server", remedy="give http://HOST:PORT, or https://HOST")
        # All variables that could name another server, because the first one that is set wins.
        kept = {name: os.environ.pop(name) for name in ENDPOINT_VARIABLES if name in os.environ}
        os.environ["AWS_ENDPOINT_URL"] = self.endpoint.rstrip("/")
        try:
            yield
        finally:
            del os.environ["AWS_ENDPOINT_URL"]
            os.environ.update(kept)


STORE = StoreOptions()


def flags_after_command(tokens: Sequence[str], groups: Collection[str]) -> list[str]:
    """Move flags of every command from before the command to after it: ``--json info x`` becomes ``info --json x``."""
    # Assembling the arguments takes milliseconds, and most calls have no flag in front.
    takes_value = _flags_everywhere() if tokens and tokens[0].startswith("-") else {}
    start = 0
    while start < len(tokens):
        flag, given, _ = tokens[start].partition("=")
        if flag not in takes_value:
            break
        start += 2 if takes_value[flag] and not given else 1
    if start and not tokens[start:]:
        raise UsageError("no command is given", remedy="see `tensorkeep --help`")
    # A group is followed by its command.
    end = start + (2 if tokens[start : start + 1] and tokens[start] in groups else 1)
    return [*tokens[start:end], *tokens[:start], *tokens[end:]]


def _flags_everywhere() -> dict[str, bool]:
    """Return the flags that every command takes, and whether a flag takes a value."""

    def command(*, output: Output = DEFAULT) -> None: ...

    arguments = App(default_command=command).assemble_argument_collection()
    return {name: argument.hint is not bool for argument in arguments for name in argument.names}


def from_environment(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Take options, but no positional arguments, from ``TENSORKEEP_*``."""
    from cyclopts.config import Env

    options = arguments.copy()
    # TENSORKEEP_PATH in the environment must not become the path of a command.
    options[:] = [argument for argument in arguments if argument.name.startswith("-")]
    Env(PREFIX, command=False)(app, commands, options)


def mistyped_variables(command: Callable[..., object]) -> list[str]:
    """Return a message for each variable that is spelled nearly like one of an option of the command."""
    # Assembling the options takes milliseconds, and most programs have no such variable.
    if not any(name.startswith(PREFIX) for name in os.environ):
        return []
    found = mistyped(_variables(command))
    if found:
        # Only now, because it imports all commands: the variable may belong to an option of another one.
        names = set().union(*(_variables(resolve_name(each.target)) for each in COMMANDS.values() if each.installed))
        found = [message for message in found if message.partition(" ")[0] not in names]
    return found


def _variables(command: Callable[..., object]) -> set[str]:
    arguments = App(default_command=command).assemble_argument_collection()
    options = [argument.name for argument in arguments if argument.name.startswith("--")]
    return {f"{PREFIX}{name[2:].replace('-', '_').upper()}" for name in options}


def with_local_paths(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Expand ``~`` in options of the type `Path`, and refuse URLs."""
    for argument in arguments:
        # A `Path` would lose the second slash of a URL, and name a local folder.
        if Path in (argument.hint, *get_args(argument.hint)):
            argument.tokens[:] = [token.evolve(value=os.fspath(checked_path(token.value))) for token in argument.tokens]


def from_file(known: Collection[str], app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Take options from the TOML file of ``-C`` or ``TENSORKEEP_CONFIG``."""
    # Flags and the environment were read before, so that the path is known.
    tokens = [argument.tokens for argument in arguments if argument.name == "--config" and argument.tokens]
    if not tokens:
        return
    # Only here, because `tensorkeep --help` needs none of them.
    import difflib

    from cyclopts.config import Dict

    from tensorkeep.checkpoint.options import named_tables

    path = tokens[0][-1].value
    found = named_tables(Path(checked_path(path)))
    tables = {key: table for key, table in found.items() if key != _SAVE_TABLE or not isinstance(table, dict)}
    # A mistyped table would be ignored silently.
    for key, table in tables.items():
        if key not in known or not isinstance(table, dict):
            # A value outside of a table has a known name as well, and is not mistyped.
            near = difflib.get_close_matches(key, known, n=1)
            remedy = f"did you mean [{near[0]}]?" if near and key not in known else f"tables: {', '.join(known)}"
            raise UsageError(f"{key!r} is not a table of options of a command", path=path, remedy=remedy)
    if _TRAIN_TABLE in tables:
        # `tensorkeep train` reports the others, because it knows which settings they may mean.
        own = {name.lstrip("-") for argument in arguments for name in argument.names}
        options = {name: value for name, value in tables[_TRAIN_TABLE].items() if name.replace("_", "-") in own}
        tables[_TRAIN_TABLE] = options
    # cyclopts takes the table of the command, and reports unknown keys in it.
    Dict(tables, source=path)(app, commands, arguments)
