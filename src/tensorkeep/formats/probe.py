"""Probing files and folders of an unknown format, on a file system or in an object store.

A path that the operating system refuses to read does not count as missing: every function raises StoreError.
"""

import errno
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from tensorkeep.errors import NotACheckpointError
from tensorkeep.paths import StorePath
from tensorkeep.storage.direct_io import close, store_error
from tensorkeep.storage.places import store_first_bytes, store_folders, store_mode, store_names

_ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENXIO, errno.ELOOP))
"""Error numbers of paths without anything to read (ENXIO: a socket, ELOOP: links that lead to one another)."""

_START_BYTES = 512
_DOWNLOAD = "it is the answer of a web server in the place of the file: download the file again"
_TEXTS = (
    (rb"version https://git-lfs", "a pointer of Git LFS, which stands for the file", "fetch the file: git lfs pull"),
    (rb"(?:\xef\xbb\xbf)?\s*<(?i:!doctype html|html)\b", "an HTML page", _DOWNLOAD),
    (rb"(?:\xef\xbb\xbf)?\s*<\?xml\b", "an XML document", _DOWNLOAD),
)
"""Texts that stand where a file should be: how they begin, what they are, and what to do."""
_CHECK = "check the path; if it was downloaded, this may be the answer of a web server: download it again"
_AS_TORCH = 'if torch.save wrote it, read it as such: format="torch" (--format torch)'
_UNPACK = "unpack it first"
_OTHERS = (
    *_TEXTS,
    (rb"PK\x03\x04", "a zip archive", _AS_TORCH),
    (rb"\x80[\x02-\x05](?!\0\0)", "a Python pickle", _AS_TORCH),
    (rb"GGUF", "a GGUF file", "convert it with the tools of llama.cpp"),
    (rb"\x89HDF\r\n", "an HDF5 file", "read it with h5py, and save its tensors"),
    (rb"\x93NUMPY", "a file of numpy.save", "read it with numpy.load, and save its arrays"),
    (rb"\x1f\x8b|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ\0|\x04\x22\x4d\x18", "a compressed file", _UNPACK),
    (rb"7z\xbc\xaf|(?s:.{257})ustar", "an archive", _UNPACK),
    (rb"\s*[{\[][^\0]*\Z", "a JSON text", _CHECK),
    (rb"[\t\r\n\x20-\x7e]{8,}\Z", "a text", _CHECK),
)
"""The same of all kinds of files that their first bytes identify."""


def _raise_unless_absent(error: OSError, path: Path) -> None:
    if error.errno not in _ABSENT:
        raise store_error(error, path, "inspect it") from error


def file_mode(path: Path, *, follow_links: bool = True) -> int:
    """Return the mode bits of a path, for the functions of `stat`; 0 if nothing is there."""
    if isinstance(path, StorePath):
        return store_mode(path)
    try:
        return os.stat(path, follow_symlinks=follow_links).st_mode
    except OSError as error:
        _raise_unless_absent(error, path)
        return 0


def exists(path: Path) -> bool:
    """Return whether something is at a path, be it a link to nothing."""
    return file_mode(path, follow_links=False) != 0


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory, sorted; an empty list if it is not a directory."""
    if isinstance(directory, StorePath):
        return store_names(directory)
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries)
    except OSError as error:
        _raise_unless_absent(error, directory)
        return []


def folders_in(directory: Path) -> list[str]:
    """Return the names of the directories in a directory, sorted."""
    if isinstance(directory, StorePath):
        return store_folders(directory)
    return [name for name in names_in(directory) if stat.S_ISDIR(file_mode(directory / name))]


def first_bytes(path: Path, count: int) -> bytes | None:
    """Return the first bytes of a file; None if it is not a regular file."""
    if isinstance(path, StorePath):
        return store_first_bytes(path, count)
    try:
        # O_NONBLOCK: opening a pipe would wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.read(fd, count) if stat.S_ISREG(os.fstat(fd).st_mode) else None
        finally:
            close(fd)
    except OSError as error:
        _raise_unless_absent(error, path)
        return None


def check_is_no_pointer(path: Path) -> None:
    """Raise NotACheckpointError if a path stands for an absent file: a pointer of Git LFS, or a dangling link."""
    if not isinstance(path, StorePath) and exists(path) and not file_mode(path):
        raise NotACheckpointError("is a link that leads nowhere", path=path, remedy="fetch the file that it stands for")
    _check_is_none_of(_TEXTS[:1], path, None)


def check_is_no_text(path: Path, cause: Exception | None = None) -> None:
    """Raise NotACheckpointError if a text stands in the place of a file: a pointer of Git LFS, or a web page."""
    _check_is_none_of(_TEXTS, path, cause)


def check_is_no_other(path: Path, cause: Exception | None = None) -> None:
    """Raise NotACheckpointError if a file's first bytes are those of another kind of file, which the error names.

    For files that begin as none of these where they are sound.
    """
    _check_is_none_of(_OTHERS, path, cause)


def _check_is_none_of(kinds: Iterable[tuple[bytes, str, str]], path: Path, cause: Exception | None) -> None:
    start = first_bytes(path, _START_BYTES) or b""
    for pattern, what, remedy in kinds:
        if re.match(pattern, start):
            raise NotACheckpointError(f"is not a checkpoint, but {what}", path=path, remedy=remedy) from cause
