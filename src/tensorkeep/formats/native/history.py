"""What a save has to do with earlier ones: whether later saves may build on it, and which one it builds on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    PathLike,
    StoreError,
    UnsupportedError,
    UsageError,
)
from tensorkeep.formats.base import OpenSettings, WriteSettings
from tensorkeep.formats.blockfile.plan import BlockFileOptions
from tensorkeep.formats.native.previous import Previous

CHANGES_PREFIX = "changes-"
"""How a data file is called that does not hold a whole part: not as other tools expect a whole one to be."""


class NativeOptions(BlockFileOptions, frozen=True):
    """The options of the native format.

    Attributes
    ----------
    incremental : bool or None
        Whether later saves may build on this one; by default they may if this one has a base.
    base : path-like, callable or None
        An earlier checkpoint on the same file system: only the blocks that have changed since are written. A callable
        returns it, or None, when the writing begins.
    delta : bool
        Whether changed blocks may be stored as differences from the base; only with ``compression="lossless"``.
    """

    incremental: bool | None = None
    base: Any = None
    delta: bool = False

    def __post_init__(self) -> None:
        if self.base is not None and self.incremental is False:
            raise UsageError("a save with a base is incremental", remedy="leave out incremental=False, or the base")
        if not (self.base is None or callable(self.base) or isinstance(self.base, str | os.PathLike)):
            raise UsageError(f"base is {self.base!r}", remedy="give the path of an earlier checkpoint")


@dataclass(slots=True)
class History:
    """The options ``incremental``, ``base`` and ``delta`` of a save.

    Attributes
    ----------
    incremental : bool
        Whether later saves may build on this one.
    base : path-like, callable or None
        The earlier checkpoint, or what says it when the writing begins: until then another save may still be under way.
    delta : bool
        Whether changed blocks may be stored as differences.
    base_used : str or None
        The base that blocks could be taken from.
    refused : str or None
        Why none could, or not all that are still right.
    """

    incremental: bool
    base: PathLike | Callable[[], PathLike | None] | None
    delta: bool
    settings: OpenSettings
    base_used: str | None = None
    refused: str | None = None

    @classmethod
    def of(cls, options: NativeOptions, settings: WriteSettings) -> History:
        """Return what the options ask for.

        Raises
        ------
        UsageError
            If they contradict the settings.
        """
        if options.delta and settings.compression != "lossless":
            raise UsageError(
                "delta=True stores compressed differences, and this save is not compressed",
                remedy='give compression="lossless", or leave delta out',
            )
        incremental = options.base is not None if options.incremental is None else options.incremental
        return cls(incremental, options.base, options.delta, OpenSettings(pool=settings.pool))

    @contextmanager
    def opened(self, directory: Path, own_files: int) -> Iterator[Previous | None]:
        """Open the base and link its files into a directory; None if there is none, or nothing can be taken from it.

        Parameters
        ----------
        directory : Path
        own_files : int
            How many data files the save writes itself.

        Raises
        ------
        NotACheckpointError
            If there is no checkpoint at the path that was given.
        """
        previous = self._open()
        if previous is None:
            yield None
            return
        try:
            previous.link_into(directory, own_files)
            self.base_used = os.fspath(previous.path) if previous.linked else None
            yield previous if previous.linked else None
        finally:
            self.refused = previous.obstacle
            previous.close()

    def _open(self) -> Previous | None:
        base = self.base() if callable(self.base) else self.base
        if base is None:
            return None
        try:
            return Previous(Path(base), self.settings, delta=self.delta)
        except NotACheckpointError as error:
            if not callable(self.base):
                raise NotACheckpointError(
                    f"is no base to save on: {error.message}", path=error.path, remedy="correct base=, or leave it out"
                ) from error
            self.refused = str(error)
        except (CorruptCheckpointError, StoreError, UnsupportedError) as error:
            # All of the state is written then, which needs nothing of what is there.
            self.refused = str(error)
        return None
