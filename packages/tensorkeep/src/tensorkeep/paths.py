"""Paths that users give: ``~`` is expanded, and URLs of object stores become `StorePath`."""

import os
import re
import sys
from pathlib import Path, PosixPath, PurePath

from tensorkeep.errors import PathLike, StoreError, UnsupportedError, UsageError

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/(/?)", re.IGNORECASE)
# Schemes of URLs that checkpoints are read from; the first three are written to as well.
STORES = ("s3", "gs", "az", "https", "http")
# Environment variables with the URL of the server of ``s3://``, the first one that is set.
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# The name of a step of a run: its number, with zeros before it up to six digits.
STEP_NAME = re.compile(r"step-(\d{6,18})")


class StorePath(PosixPath):
    """The path of an object, or of several that share a prefix, in an object store.

    It joins and splits like any other path, but does not exist on a file system: `tensorkeep.storage.storage_of`
    chooses the storage by the class of a path. ``s3://bucket/run/step-000100`` has the bucket ``s3://bucket`` and the
    key ``run/step-000100``.
    """

    def __str__(self) -> str:
        # pathlib drops the second slash.
        return super().__str__().replace(":/", "://", 1)

    @property
    def scheme(self) -> str:
        return self.parts[0].rstrip(":").lower()

    @property
    def bucket(self) -> str:
        return f"{self.parts[0]}//{self.parts[1] if len(self.parts) > 1 else ''}"

    @property
    def key(self) -> str:
        return "/".join(self.parts[2:])

    @property
    def has_listing(self) -> bool:
        """A plain web server cannot list names."""
        return not self.scheme.startswith("http")

    @property
    def is_step(self) -> bool:
        """Other steps may use the objects of a step."""
        return STEP_NAME.fullmatch(self.name) is not None


def _elsewhere(path: PathLike) -> Path | None:
    """Return the path if its class has a storage of its own, such as `StorePath`; None for a path of a disk."""
    return path if isinstance(path, Path) and type(path) is not PosixPath else None


def as_path(path: PathLike) -> Path:
    """A `StorePath` for the URL of an object store."""
    if elsewhere := _elsewhere(path):
        return elsewhere
    return StorePath(path) if _scheme_of(path).lower() in STORES else Path(path)


def _scheme_of(path: PathLike) -> str:
    """Return the scheme of a URL as it is written; empty for the path of a disk."""
    found = _SCHEME.match(os.fspath(path))
    # A `Path` has lost the second slash of "s3://".
    return found[1] if found and (found[2] or isinstance(path, PurePath)) else ""


def absolute(path: PathLike, *, follow_links: bool = False) -> Path:
    """Raises StoreError if the working directory is gone."""
    if elsewhere := _elsewhere(path):
        return elsewhere
    try:
        return Path(os.path.realpath(path) if follow_links else os.path.abspath(path))
    except OSError as error:
        if error.errno is None:
            raise  # by a handler of a signal
        remedy = "change to a folder that exists, or give an absolute path"
        raise StoreError(f"the working directory is not known ({error.strerror})", path=path, remedy=remedy) from error


def check_url(path: StorePath) -> None:
    """Raises UsageError for a URL that stores do not know, or with what is secret: it would be printed."""
    if any(mark in str(path) for mark in "?#") or "@" in path.bucket:
        raise UsageError(
            "the URL has a query, a fragment or a user", remedy="give credentials in the store's environment variables"
        )
    if unknown := re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", str(path)):
        raise UsageError(
            f"{str(path)!r:.200} has the character {unknown[0]!r}, which no store knows", remedy="check the URL"
        )
    if not path.bucket.partition("://")[2]:
        raise UsageError("the URL has no bucket", path=path, remedy="write s3://BUCKET/PATH")
    if ".." in path.parts:
        raise UsageError("the URL has '..' in it, and a store has no folders", path=path, remedy="write the whole path")


def without_secrets(url: str) -> str:
    """A URL without what may be a secret: a user before the host, or a query."""
    return re.sub(r"//[^/]*@", "//", url).partition("?")[0]


def endpoint() -> str:
    """The URL of the server for ``s3://``; empty for the server of the region."""
    return next((url for name in ENDPOINT_VARIABLES if (url := os.environ.get(name, ""))), "")


def checked_path(path: PathLike, *, stores: bool = False) -> PathLike:
    """Return the path with ``~`` and ``~user`` expanded; with ``stores``, URLs of object stores are allowed.

    Raises UsageError for a NUL, a character that the locale cannot encode, an unknown user, or a URL that `check_url`
    refuses; UnsupportedError for any other URL.
    """
    text = os.fspath(path)
    # Before any message: a URL may have credentials in it.
    shown = without_secrets(text) if "://" in text else text
    if "\0" in text:
        raise UsageError(f"{shown!r} is not a path: it contains a NUL", remedy="check the path")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        text = f"{shown!r} has a character that names of files cannot have here ({sys.getfilesystemencoding()})"
        raise UsageError(text, remedy="choose another name, or set LC_ALL=C.UTF-8") from error
    if scheme := _scheme_of(path):
        if not stores or scheme.lower() not in STORES:
            raise _url_error(without_secrets(text), scheme)
        found = as_path(path)
        # Without a bucket, a URL and the path of a folder have the same text.
        if len(found.parts) < 2:
            raise UsageError("the URL has no bucket", path=text, remedy=f"write {scheme}://BUCKET/PATH")
        if isinstance(found, StorePath):
            check_url(found)
        return found
    if not text.startswith("~"):
        return path
    expanded = os.path.expanduser(text)
    # Unlike a shell: a mistyped user must not become a folder.
    if expanded.startswith("~") and not os.path.lexists(text.partition("/")[0]):
        raise UsageError(
            f"there is no user {text[1:].partition('/')[0]!r}", path=text, remedy=f"check the name, or write ./{text}"
        )
    return expanded


def _url_error(shown: str, scheme: str) -> UnsupportedError:
    message = f"{scheme}:// is not supported"
    remedy = f"checkpoints are read from disks and from {', '.join(f'{name}://' for name in STORES)}"
    if scheme.lower() == "file":
        message, remedy = "URLs are not supported", "give the path without file://"
    elif scheme.lower() in STORES:
        message, remedy = f"{message} here", "give the path of a disk"
    return UnsupportedError(message, path=shown, remedy=remedy)
