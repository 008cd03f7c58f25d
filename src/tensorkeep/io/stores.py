"""Requests to object stores, through obstore: what is refused, what is retried, and what an error says.

HTTP, signing, credentials and retries are obstore's (https://developmentseed.org/obstore). It reads the environment
variables of the stores' own tools, such as ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``,
``GOOGLE_APPLICATION_CREDENTIALS`` and ``AZURE_STORAGE_ACCOUNT_NAME``.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorkeep.errors import NotFoundError, StoreError, TensorkeepError, UnsupportedError, UsageError
from tensorkeep.paths import StorePath

if TYPE_CHECKING:
    from obstore.store import ObjectStore

GIVE_UP_SECONDS = 60.0
"""A request is repeated for so long; ``TENSORKEEP_STORE_TIMEOUT`` replaces it."""

_MOST_RETRIES = 10

_used_in: set[int] = set()
"""The process in which obstore has started its threads, which a forked child does not have."""


class ObjectStatus(NamedTuple):
    """An object of a store: its bytes, when it was written, and the tag that changes with its content, if any."""

    key: str
    size: int
    modified: datetime
    tag: str | None

    def as_stat(self) -> os.stat_result:
        """Return it as the status of a regular file that nothing else links to."""
        when = int(self.modified.timestamp())
        number = hash(self.key) & 0xFFFFFFFF
        fields = (stat.S_IFREG | 0o600, number, 0, 1, 0, 0, self.size, when, when, when)
        return os.stat_result(fields, {"st_blocks": -(-self.size // 512)})


def head(path: StorePath) -> ObjectStatus:
    """Return the status of an object; NotFoundError if it does not exist."""
    store = _store_of(path)
    import obstore

    with store_request(path, "look at the object"):
        return _status(obstore.head(store, path.key))


def get(path: StorePath, start: int = 0, stop: int | None = None, *, tag: str | None = None) -> memoryview:
    """Return bytes ``start:stop`` of an object, or those up to its end; as many as it has.

    Raises NotFoundError if it does not exist; StoreError if its tag is another one, because it was replaced.
    """
    store = _store_of(path)
    import obstore

    options: dict[str, Any] = {} if tag is None else {"if_match": tag}
    if stop is not None:
        options["range"] = (start, stop)
    elif start:
        options["range"] = {"offset": start}
    with store_request(path, "read it"):
        return memoryview(obstore.get(store, path.key, options=options).bytes())  # type: ignore[arg-type]


def children(path: StorePath) -> Iterator[tuple[str, ObjectStatus | None]]:
    """Yield the names below a prefix, one level deep; the status is None for a further prefix."""
    store = _store_of(path)
    import obstore

    with store_request(path, "list it"):
        found = obstore.list_with_delimiter(store, path.key or None)
    for prefix in found["common_prefixes"]:
        yield prefix.rstrip("/").rpartition("/")[2], None
    for each in found["objects"]:
        yield each["path"].rpartition("/")[2], _status(each)


def lists(path: StorePath) -> bool:
    """Return whether the store of a path can list names; a plain web server cannot."""
    return not path.bucket.startswith("http")


def _status(meta: Any) -> ObjectStatus:
    return ObjectStatus(meta["path"], meta["size"], meta["last_modified"], meta["e_tag"])


def _store_of(path: StorePath) -> "ObjectStore":
    if _used_in - {os.getpid()}:
        raise UnsupportedError(
            "this process was forked from one that has used an object store, and requests would hang",
            path=path,
            remedy='start processes with "spawn" or "forkserver", or use the store in the child first',
        )
    if any(mark in str(path) for mark in "?#") or "@" in path.bucket:
        raise UsageError(
            "the URL has a query, a fragment or a user", remedy="give credentials in the store's environment variables"
        )
    if not path.bucket.partition("://")[2]:
        raise UsageError("the URL has no bucket", path=path, remedy="write s3://BUCKET/PATH")
    store = _connect(path.bucket, os.environ.get("AWS_ENDPOINT_URL", ""), _give_up_seconds())
    _used_in.add(os.getpid())
    return store


@cache
def _connect(bucket: str, endpoint: str, seconds: float) -> "ObjectStore":
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise UnsupportedError(
            "object stores need the package obstore", path=bucket, remedy="pip install 'tensorkeep[cloud]'"
        ) from error
    limit = timedelta(seconds=seconds)
    with store_request(bucket, "use the store"):
        return from_url(
            bucket,
            # A plain endpoint is one that the user has named.
            client_options={"timeout": limit, "allow_http": f"{endpoint} {bucket}".count("http://") > 0},
            retry_config={
                "max_retries": _MOST_RETRIES,
                "retry_timeout": limit,
                "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": limit / 8, "base": 2},
            },
        )


def _give_up_seconds() -> float:
    given = os.environ.get("TENSORKEEP_STORE_TIMEOUT", "")
    try:
        seconds = float(given or GIVE_UP_SECONDS)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise UsageError(f"TENSORKEEP_STORE_TIMEOUT is {given!r}", remedy="give a number of seconds")
    return seconds


@contextmanager
def store_request(path: "StorePath | str", action: str) -> Iterator[None]:
    """Raise errors of obstore as errors of this package: "cannot <action>", with what the store answered."""
    try:
        yield
    except TensorkeepError:
        raise
    except FileNotFoundError as error:
        raise NotFoundError(_missing(str(error)), path=path, remedy="check the URL") from None
    except Exception as error:
        kind = type(error).__name__
        if type(error).__module__.partition(".")[0] != "obstore" and not isinstance(error, OSError):
            raise
        if kind == "PreconditionError":
            raise StoreError("was replaced while it was read", path=path, remedy="read it again") from None
        refused = kind in ("PermissionDeniedError", "UnauthenticatedError")
        # Without credentials, the metadata service of a cloud machine is asked for some.
        remedy = _CREDENTIALS if refused or _METADATA_SERVICE in str(error) else _NETWORK
        raise StoreError(f"cannot {action}: {_reason(str(error))}", path=path, remedy=remedy) from None


_METADATA_SERVICE = "//169.254.169.254/"
_CREDENTIALS = "check the credentials and the region (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, ...)"
_NETWORK = "check the network and the endpoint (AWS_ENDPOINT_URL); TENSORKEEP_STORE_TIMEOUT sets how long is tried"


def _missing(text: str) -> str:
    return "its bucket does not exist" if "NoSuchBucket" in text else "does not exist"


def _reason(text: str) -> str:
    """Return the part of an error's text that a user can use, without the request, which may have signatures."""
    text = text.partition("\n\nDebug source")[0]
    code = text.partition("<Code>")[2].partition("</Code>")[0]
    message = text.partition("<Message>")[2].partition("</Message>")[0]
    if code:
        return f"{code}: {message}" if message else code
    words = [word.partition("?")[0] if "://" in word else word for word in text.split()]
    return " ".join(words)
