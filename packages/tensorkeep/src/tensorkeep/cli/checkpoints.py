"""How commands open checkpoints: options, addresses of steps, and the results of several checkpoints."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from tensorkeep.cli.errors import error_lines, most_severe, print_error
from tensorkeep.cli.options import AtLeastOne, Size, StoreOptions
from tensorkeep.cli.output import Output
from tensorkeep.errors import TensorkeepError
from tensorkeep.runs.address import find_checkpoint
from tensorkeep.storage.buffers import DEFAULT_BUDGET

InputFormat = Annotated[str | None, Parameter(help="The format; detected by default.")]
# Patterns of tensor names; the option may be repeated.
Globs = Annotated[list[str] | None, Parameter(negative="", metavar="GLOB")]


@Parameter(name="*")
@dataclass(frozen=True)
class OpenOptions(StoreOptions):
    """The options of commands that open checkpoints.

    Attributes
    ----------
    allow
        Read objects of this class in torch.save files, such as argparse.Namespace, as dicts of their attributes,
        without its code; may be repeated.
    """

    allow: Annotated[list[str] | None, Parameter(negative="", metavar="CLASS")] = None


@Parameter(name="*")
@dataclass(frozen=True)
class ReadOptions(OpenOptions):
    """The options of commands that read the tensors of checkpoints.

    Attributes
    ----------
    threads
        The number of threads.
    memory_budget
        The limit on the memory of all buffers.
    """

    threads: Annotated[int | None, AtLeastOne] = None
    memory_budget: Size = DEFAULT_BUDGET

    @property
    def arguments(self) -> dict[str, Any]:
        return {"allow": self.allow, "threads": self.threads, "memory_budget": self.memory_budget}


OPEN, READ = OpenOptions(), ReadOptions()


def checkpoint_at(path: str, output: Output) -> str:
    """Return the path of the checkpoint at an address; print on stderr which step of a run was chosen."""
    address = find_checkpoint(path)
    # Not only a note: the user asked for the last step, and gets an older one.
    for number, error in address.skipped.items():
        output.note(f"warning: step {number} is skipped: {error_lines(error)[0].removeprefix('error: ')}")
    if address.reason:
        output.note(f"{path}: step {address.step}, {address.reason}")
    return os.fspath(address.path)


class BatchResults:
    """The results of a command for several checkpoints. An error of one checkpoint does not stop the others."""

    def __init__(self, *, alone: bool = False) -> None:
        # The error of the only checkpoint ends the command, so that --json prints it as the error of the command.
        self._alone = alone
        self._documents: list[dict[str, Any]] = []
        self.codes: list[int] = []

    def add(self, document: dict[str, Any], code: int = 0) -> None:
        self._documents.append(document)
        self.codes.append(code)

    @contextmanager
    def attempt(self, **about: str) -> Iterator[None]:
        """Print and record an error in the block; ``about`` are the keys of its JSON."""
        try:
            yield
        # Any other exception is a bug, and ends the command.
        except (TensorkeepError, OSError) as error:
            if self._alone:
                raise
            failure = print_error(error)
            self.add({**about, "ok": False, "error": failure.as_dict()}, failure.exit_code)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": not any(self.codes), "checkpoints": self._documents}

    @property
    def code(self) -> int:
        return most_severe(self.codes)
