"""Requests to object stores, through obstore: what is refused, and what is retried.

HTTP, signing, credentials and retries are obstore's (https://developmentseed.org/obstore). It reads the environment
variables of the stores' own tools, such as ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``,
``GOOGLE_APPLICATION_CREDENTIALS`` and ``AZURE_STORAGE_ACCOUNT_NAME``.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tensorkeep.errors import UnsupportedError, UsageError, import_extra
from tensorkeep.io.clock import clock
from tensorkeep.io.objects.store_errors import (
    DETAILS,
    REPEATED,
    TRIED,
    raise_alone,
    replaced,
    store_request,
    unusable,
    was_repeated,
)
from tensorkeep.paths import StorePath, check_url, endpoint

if TYPE_CHECKING:
    from obstore.store import ObjectStore

GIVE_UP_SECONDS = 60.0
"""A request is repeated for so long; ``TENSORKEEP_STORE_TIMEOUT`` replaces it."""

MOST_RETRIES = 10
"""obstore repeats a request at most so often; see `_repeated`."""

SMALL_REQUESTS = 32
"""Requests for a few bytes each that are made at once: they wait for answers, not for the network."""

_CUT_SHORT = "the answer was cut short"

_BROKEN_ANSWERS = ("error sending request", "request or response body error", "Got invalid list response", _CUT_SHORT)
_AGAIN_SECONDS = 0.1
_FIRST_PAUSE = 0.1

T = TypeVar("T")

_used_in: set[int] = set()
"""The process in which obstore has started its threads, which a forked child does not have."""


class ObjectStatus(NamedTuple):
    """An object of a store: its bytes, when it was written, and the tag that changes with its content, if any.

    ``version`` is what some stores compare instead of the tag; ``links`` is how many checkpoints name it, as far as
    that is known.
    """

    key: str
    size: int
    modified: datetime
    tag: str | None
    version: str | None = None
    links: int = 1

    def as_stat(self) -> os.stat_result:
        """Return it as the status of a regular file with so many links."""
        when = int(self.modified.timestamp())
        number = hash(self.key) & (2**63 - 1)
        fields = (stat.S_IFREG | 0o600, number, 0, self.links, 0, 0, self.size, when, when, when)
        return os.stat_result(fields, {"st_blocks": -(-self.size // 512)})


def head(path: StorePath) -> ObjectStatus:
    """Return the status of an object; NotFoundError if it does not exist."""
    store = _store_of(path)
    import obstore

    with store_request(path, "look at the object"):
        return _status(obstore.head(store, path.key))


def get(path: StorePath, start: int = 0, stop: int | None = None, *, tag: str | None = None) -> memoryview:
    """Return bytes ``start:stop`` of an object, or those up to its end; as many as it has.

    Raises NotFoundError if it does not exist; StoreError if its tag is another one, because it was replaced, or if the
    store keeps sending less than it announces.
    """
    return _get(path, start, stop, tag)[0]


def read(path: StorePath, stop: int | None = None) -> tuple[bytes, ObjectStatus]:
    """Return all or the first bytes of an object, and its status then; raise as `get`."""
    content, status = _get(path, 0, stop, None)
    return bytes(content), status


def _get(path: StorePath, start: int, stop: int | None, tag: str | None) -> tuple[memoryview, ObjectStatus]:
    store = _store_of(path)
    import obstore

    # Always a range: the answer then states the size of the object beside the length of what it sends.
    options: dict[str, Any] = {"range": {"offset": start} if stop is None else (start, stop)}
    # A weak tag never matches in a condition (RFC 9110, 13.1.1), so that of the answer is compared.
    weak = tag is not None and tag.startswith("W/")
    if tag is not None and not weak:
        options["if_match"] = tag
    with store_request(path, "read it"):
        try:
            found = _repeated(lambda: _whole(obstore.get(store, path.key, options=options)))  # type: ignore[arg-type]
        except Exception as error:
            if start or "InvalidRange" not in str(error):
                raise
            found = memoryview(b""), head(path)  # it is empty, and has no range
        if weak and found[1].tag != tag:
            raise replaced(path)
        return found


def _whole(answer: Any) -> tuple[memoryview, ObjectStatus]:
    """Return the content of an answer, all of it: obstore accepts less than what was announced."""
    content = memoryview(answer.bytes())
    start, stop = answer.range
    if len(content) != stop - start:
        raise OSError(f"{_CUT_SHORT}: {len(content):,} of {stop - start:,} bytes came")
    return content, _status(answer.meta)


def put(path: StorePath, content: bytes) -> None:
    """Write an object by one request, in place of an older one of this name."""
    store = _store_of(path)
    import obstore

    with store_request(path, "write it"):
        obstore.put(store, path.key, content, use_multipart=False)


def put_unless_changed(path: StorePath, content: bytes, seen: ObjectStatus | None) -> bool | None:
    """Write an object by one request, if the store still has the object that was seen, or none; return whether it did.

    None means that this is not known: the request was repeated, and the store may have carried out an earlier one, or
    may still do so. The errno of a StoreError is EACCES if the store has refused the only request.
    """
    store = _store_of(path)
    import obstore
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    mode: Any = "create"
    if seen is not None:
        known = {"e_tag": seen.tag, "version": seen.version}
        mode = {name: value for name, value in known.items() if value is not None}
    with store_request(path, "write it"):
        try:
            _repeated(lambda: obstore.put(store, path.key, content, mode=mode))
        except (AlreadyExistsError, PreconditionError) as error:
            return None if was_repeated(error) else False
    return True


def put_pieces(path: StorePath, pieces: Iterator[Any], *, part_bytes: int | None, at_once: int) -> None:
    """Write an object from pieces of memory, in parts of so many bytes or by one request; it appears complete.

    The memory of a piece is not copied: it must not change while there is a reference to the piece.
    """
    store = _store_of(path)
    import obstore

    several: dict[str, Any] = {} if part_bytes is None else {"chunk_size": part_bytes, "max_concurrency": at_once}
    with store_request(path, "write it"):
        obstore.put(store, path.key, pieces, use_multipart=part_bytes is not None, **several)


def delete(paths: Sequence[StorePath]) -> None:
    """Delete objects of one bucket; those that do not exist are no error."""
    if not paths:
        return
    store = _store_of(paths[0])
    import obstore

    keys = [path.key for path in paths]
    with store_request(paths[0].parent, "delete its objects"):
        try:
            _repeated(lambda: obstore.delete(store, keys))
        except FileNotFoundError:
            # Some stores stop at the first that is missing.
            for key in keys:
                with suppress(FileNotFoundError):
                    _repeated(lambda key=key: obstore.delete(store, key))  # type: ignore[misc]


def begins_as(path: StorePath, start: bytes) -> bool:
    """Return whether an object begins with these bytes, by a request for all of it that is broken off."""
    store = _store_of(path)
    import obstore

    with store_request(path, "read it"):
        return bytes(next(iter(obstore.get(store, path.key).stream()), b""))[: len(start)] == start


def children(path: StorePath) -> Iterator[tuple[str, ObjectStatus | None]]:
    """Yield the names below a prefix, one level deep; the status is None for a further prefix."""
    store = _store_of(path)
    import obstore

    with store_request(path, "list it"):
        found = _repeated(lambda: obstore.list_with_delimiter(store, path.key or None))
    for prefix in found["common_prefixes"]:
        yield prefix.rstrip("/").rpartition("/")[2], None
    for each in found["objects"]:
        # The empty object that a console makes for a folder has the name of the folder.
        if each["path"] != path.key:
            yield each["path"].rpartition("/")[2], _status(each)


def objects(path: StorePath, *, after: str | None = None) -> list[ObjectStatus]:
    """Return the status of every object below a prefix, at any depth; one request for each thousand.

    With ``after``, only those whose keys are greater. Raises UnsupportedError if the key of one is not supported.
    """
    store = _store_of(path)
    import obstore

    with store_request(path, "list it"):
        found = _repeated(lambda: obstore.list(store, path.key or None, offset=after).collect())
        return [_status(each) for each in found]


def _repeated(request: Callable[[], T]) -> T:
    """Make a request again if its answer was lost or cut short, which obstore does not do for every request.

    The last error has the number of all requests, also of those that obstore has repeated.
    """
    now = clock()
    started, retries = now.monotonic(), 0
    while True:
        try:
            return request()
        except Exception as error:
            text = str(error).partition(DETAILS)[0]
            if not any(broken in text for broken in _BROKEN_ANSWERS):
                if retries:
                    error.add_note(REPEATED)
                raise
        tried = TRIED.search(text)
        retries += int(tried[2]) if tried else 0
        seconds = now.monotonic() - started
        if seconds > give_up_seconds():
            raise OSError(f"{TRIED.sub('', text)} in {seconds:.1f}s, after {retries} retries")
        retries += 1
        now.sleep(_AGAIN_SECONDS)


def _status(meta: Any) -> ObjectStatus:
    return ObjectStatus(meta["path"], meta["size"], meta["last_modified"], meta["e_tag"], meta["version"])


def _store_of(path: StorePath) -> "ObjectStore":
    if _used_in - {os.getpid()}:
        raise UnsupportedError(
            "this process was forked from one that has used an object store, and requests would hang",
            path=path,
            remedy='start processes with "spawn" or "forkserver", or use the store in the child first',
        )
    check_url(path)
    seconds = give_up_seconds()
    store = _connect(path.bucket, endpoint(), seconds, *pauses(seconds))
    _used_in.add(os.getpid())
    return store


@cache
def _connect(bucket: str, endpoint: str, seconds: float, first_pause: float, longest_pause: float) -> "ObjectStore":
    from_url = import_extra("obstore.store", "cloud", f"{bucket} needs the package obstore").from_url
    limit, first, longest = (timedelta(seconds=each) for each in (seconds, first_pause, longest_pause))
    retry: Any = {
        "max_retries": MOST_RETRIES,
        "retry_timeout": limit,
        # The first pause must be the shorter one: obstore panics otherwise.
        "backoff": {"init_backoff": min(first, longest / 2), "max_backoff": longest, "base": 2},
    }
    # A plain endpoint is one that the user has named.
    client: Any = {"timeout": limit, "allow_http": f"{endpoint} {bucket}".count("http://") > 0}
    with store_request(bucket, "use the store"):
        try:
            store: ObjectStore = from_url(bucket, client_options=client, retry_config=retry)
        except Exception as error:
            raise_alone(unusable(bucket, str(error)))
    return store


def pauses(seconds: float) -> tuple[float, float]:
    """Return the first pause before a library repeats a request, and the longest, if it gives up after so long."""
    return clock().library_pause(_FIRST_PAUSE), clock().library_pause(seconds / 8)


def give_up_seconds() -> float:
    """Return for how long a request is repeated."""
    given = os.environ.get("TENSORKEEP_STORE_TIMEOUT", "")
    try:
        seconds = float(given or GIVE_UP_SECONDS)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise UsageError(f"TENSORKEEP_STORE_TIMEOUT is {given!r}", remedy="give a number of seconds")
    return seconds
