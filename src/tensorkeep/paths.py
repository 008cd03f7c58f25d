"""Checks of the paths that users give: ``~`` is expanded, URLs are refused."""

import os
import re
from pathlib import PurePath

from tensorkeep.errors import PathLike, UnsupportedError, UsageError

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/(/?)", re.IGNORECASE)


def checked_path(path: PathLike) -> PathLike:
    """Return the path with ``~`` and ``~user`` expanded.

    Raises UsageError if it contains a NUL, or there is no such user; UnsupportedError if it is a URL.
    """
    text = os.fspath(path)
    if "\0" in text:
        raise UsageError(f"{text!r} is not a path: it contains a NUL", remedy="check the path")
    scheme = _SCHEME.match(text)
    # A `Path` has lost the second slash of "s3://".
    if scheme and (scheme[2] or isinstance(path, PurePath)):
        raise _url_error(text, scheme[1])
    if not text.startswith("~"):
        return path
    expanded = os.path.expanduser(text)
    # Unlike a shell: a mistyped user must not become a folder.
    if expanded.startswith("~") and not os.path.lexists(text.partition("/")[0]):
        raise UsageError(
            f"there is no user {text[1:].partition('/')[0]!r}", path=text, remedy=f"check the name, or write ./{text}"
        )
    return expanded


def _url_error(text: str, scheme: str) -> UnsupportedError:
    if scheme.lower() == "file":
        return UnsupportedError("URLs are not supported", path=text, remedy="give the path without file://")
    return UnsupportedError(
        f"{scheme}:// is not supported yet: checkpoints are read and written on file systems only",
        path=text,
        remedy="use the path of a disk, and copy from or to there with the tool of the store",
    )
