"""The folder that the ranks of one save of DCP write into: created by the coordinator, known to all, published once."""

import secrets
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorkeep.errors import RanksDisagreeError
from tensorkeep.formats.native.directory import is_replaceable
from tensorkeep.formats.native.pieces.recovery import finish_saves
from tensorkeep.io.commit import Commit
from tensorkeep.paths import absolute


@dataclass(frozen=True, slots=True)
class Stage:
    """What every rank must know of a save: where to write, the name of the save, and the number of ranks.

    The coordinator puts it into the plans that DCP scatters. A planner that caches plans drops what it receives, and
    gives the writer a plan of an earlier save. So a rank takes note of a stage when it is unpickled.
    """

    destination: str
    directory: str
    save: str
    ranks: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.destination, self.directory, self.save, self.ranks)

    def announce(self) -> "Stage":
        """Take note of it in this process, for `announced`."""
        with _lock:
            _announced[self.destination] = self
        return self

    @classmethod
    def announced(cls, destination: str) -> "Stage":
        """Return the stage of the save that has begun, once; RanksDisagreeError if no stage was received."""
        with _lock:
            stage = _announced.pop(destination, None)
        if stage is None:
            raise RanksDisagreeError(
                "the coordinator's plan did not arrive, or names another path",
                path=destination,
                remedy="give all ranks the same path, and let the planner return the plans that it is given",
            )
        return stage


_lock = threading.Lock()
_announced: dict[str, Stage] = {}


def _received(*fields: Any) -> Stage:
    return Stage(*fields).announce()


class BegunSave:
    """The coordinator's part of a save: the folder of the ranks, until it is published or removed.

    DCP does not call the coordinator's writer when another rank fails. The folder is then removed when the writer is
    collected, when this process begins to save to the same path again, or at exit.

    Raises DestinationExistsError, BusyError, StoreError as `Commit`.
    """

    is_writing: bool

    def __init__(self, destination: Path, *, overwrite: bool) -> None:
        earlier: BegunSave | None = _begun.get(destination)
        if earlier is not None and not earlier.is_writing:
            earlier.abandon()
        finish_saves(absolute(destination).parent)
        commit = Commit(destination, directory=True, overwrite=overwrite, replaceable=is_replaceable)
        commit.__enter__()
        self._end = weakref.finalize(self, commit.__exit__, None, None, None)
        self.commit = commit
        self.name = secrets.token_hex(16)
        self.is_writing = False
        _begun[destination] = self

    def publish(self) -> None:
        """Make the folder, which is complete and durable, visible as the checkpoint."""
        self.commit.publish()
        self._end()

    def abandon(self) -> None:
        """Remove the folder, unless it was published or removed."""
        self._end()


_begun: "weakref.WeakValueDictionary[Path, BegunSave]" = weakref.WeakValueDictionary()
