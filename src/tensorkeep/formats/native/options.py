"""The options of the native format."""

import os
from typing import Any

from tensorkeep.errors import UsageError
from tensorkeep.formats.blockfile.plan import BlockFileOptions


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

    @property
    def wide_digests(self) -> bool:
        """Whether the checksums of raw blocks have 128 bits, so that later saves may build on this one."""
        return self.base is not None if self.incremental is None else self.incremental
