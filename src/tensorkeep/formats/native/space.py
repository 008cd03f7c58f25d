"""The disk space that checkpoints occupy, when several of them have hard links to one file.

Bytes are those of the blocks that the file system has allocated for a file, as ``du`` counts them: the last block
counts in full, and a file system that compresses or leaves out zeros allocates fewer.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tensorkeep.io.files import store_error

_UNIT = 512
"""The unit of ``st_blocks`` in bytes; it does not depend on the file system."""


@dataclass(frozen=True, slots=True)
class Space:
    """The disk space of a checkpoint's files.

    Attributes
    ----------
    own_bytes : int
        Of files that nothing else has a link to: removing the checkpoint alone would free them.
    shared_bytes : int
        Of files that other checkpoints have links to as well.
    """

    own_bytes: int
    shared_bytes: int

    @property
    def occupied_bytes(self) -> int:
        """Of all files."""
        return self.own_bytes + self.shared_bytes


def occupied_bytes(status: os.stat_result) -> int:
    """Return the bytes of disk that a file occupies."""
    return status.st_blocks * _UNIT


def space_of(statuses: Iterable[os.stat_result]) -> Space:
    """Return the disk space of the files of one checkpoint."""
    own = shared = 0
    for status in statuses:
        if status.st_nlink > 1:
            shared += occupied_bytes(status)
        else:
            own += occupied_bytes(status)
    return Space(own, shared)


def freed_bytes(checkpoints: Iterable[os.PathLike[str]]) -> int:
    """Return the bytes of disk that removing all of these checkpoints would free.

    A file that several of them share is freed if they hold all of its links.

    Raises StoreError if the operating system refuses access.
    """
    links: dict[tuple[int, int], int] = {}
    freed = 0
    for path in checkpoints:
        for status in _statuses_in(Path(path)):
            identity = status.st_dev, status.st_ino
            links[identity] = links.get(identity, 0) + 1
            if links[identity] == status.st_nlink:
                freed += occupied_bytes(status)
    return freed


def _statuses_in(directory: Path) -> list[os.stat_result]:
    try:
        with os.scandir(directory) as entries:
            return [entry.stat(follow_symlinks=False) for entry in entries if not entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise store_error(error, directory, "look at the checkpoint") from error
