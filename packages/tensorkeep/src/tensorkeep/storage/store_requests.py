"""Requests to object stores through obstore: errors without secrets, and what is repeated."""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import cache, partial
from html import unescape
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import unquote

from tensorkeep.errors import NotFoundError, StoreError, TensorkeepError, UnsupportedError, UsageError, import_extra
from tensorkeep.paths import StorePath, check_url, endpoint, without_secrets
from tensorkeep.storage.clock import clock
from tensorkeep.units import counted
from tensorkeep.variables import read_variable

if TYPE_CHECKING:
    from obstore.store import ObjectStore


# Errors of obstore as errors of this package, without secrets.

# How long and how often obstore has repeated a request.
TRIED = re.compile(r" in (\d\S*), after (\d+) retries(?:, max_retries: \d+, retry_timeout: \S+)?")
# The rest of the text is for developers of obstore.
DETAILS = "\n\nDebug source"
# A note on an error: `_repeated` has sent the request before, which obstore's text does not say.
REPEATED = "the request was sent before, without an answer"
# Parts of errors without values of settings.
_SETTINGS_ERRORS = re.compile(
    r"\w+ must be specified|Unable to (open|decode) service account file|Invalid Access Key|Error reading pem file"
)
# Answers about credentials: stores give 400 for a token that has expired and for another region than theirs, and 200
# for objects that they do not delete.
_REFUSED = re.compile(
    r"status code: (40[13]\b|400\b(?!.*<Code>)|400\b.*<Code>\w*(Token|Auth|Access|Security|Signature|Expired|Region))"
    r"|incorrectly configured region|\(code: AccessDenied\)",
    re.DOTALL,
)
# Answers about the request itself: to repeat it does not help.
_WRONG = re.compile(r"status code: 4(?!08|29)\d\d")
_SKEWED = ("RequestTimeTooSkewed", "RequestTimeTooFar")
# Environment variables with secret values, which are never printed.
_SECRET_NAMES = re.compile(r"(AWS|AZURE|GOOGLE|GCP)_.*(KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SAS)")
# What is secret in an answer that repeats a request, or says what is wrong with it.
_SECRETS = re.compile(
    r"""
    # A field of a request: a header, of a query, of a form, in JSON, in XML or in a repr.
    (?P<shown>(?:x-(?:amz|goog|ms)-[\w-]+|x-api-key|api_?key|access_?key\w*|account_?key|private_?key\w*|googleaccessid
        |authorization|credentials?|cookie|token|secret\w*|passw(?:or)?d|assertion|signature\w*|\bsig
        |string\ ?to\ ?sign\w*|canonical\ ?request\w*)
        (?:["']\s*[,:]|\s*[=:>])+[\s\[(]*)
        (?:"[^"]*"?|'[^']*'?|[^<&]*)
    # A sentence about one.
    |(?P<words>signature[\w ]*(?=["'])|\b(?:bearer|basic|sharedkey(?:lite)?)\s+(?!tokens?\b|auth|realm))
        (?:"[^"]*"?|'[^']*'?|\S+)
    # A token that stores and their sign-in services give, wherever it is.
    |\b(?:eyJ|ya29\.|AKIA|ASIA)[\w.~+/=-]{8,}
    |-----BEGIN[^<&]*
    |(?<=//)[^/\s]*(?=@)
    """,
    re.IGNORECASE | re.VERBOSE,
)
_MOST_CHARACTERS = 500
_METADATA_SERVICE = "//169.254.169.254/"
_CREDENTIALS = {
    "s3": "and the region (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, ...)",
    "gs": "(GOOGLE_APPLICATION_CREDENTIALS)",
    "az": "and the account (AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, ...)",
}


@contextmanager
def obstore_errors(path: "StorePath | str", action: str) -> Iterator[None]:
    """Raise errors of obstore as "cannot <action>", with what the store answered."""
    try:
        yield
    except TensorkeepError:
        raise
    # BaseException: a panic of obstore is not an Exception.
    except BaseException as error:
        ours = _error_for(error, path, action)
        if ours is None:
            raise
        raise_alone(ours)


def raise_alone(error: TensorkeepError) -> NoReturn:
    try:
        raise error from None
    finally:
        # `from None` only hides the context. A debugger or a log of the full chain would still print credentials.
        error.__context__ = None


def _error_for(error: BaseException, path: "StorePath | str", action: str) -> TensorkeepError | None:
    """Return the error of this package for one of obstore or of the system; None for others."""
    kind, text = type(error).__name__, str(error)
    if kind == "PanicException":
        # A class that obstore does not export; its text says nothing about the setting.
        return StoreError(
            f"cannot {action}: obstore has failed",
            path=path,
            remedy="check the credentials and the endpoint in the environment: a line break at the end, or no host",
        )
    if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] != "obstore":
        return None
    # Each store answers in its own words, and obstore passes the text on: kinds are recognised by both.
    if isinstance(error, FileNotFoundError) or "NoSuchBucket" in text:
        what = "its bucket does not exist" if "NoSuchBucket" in text else "does not exist"
        return NotFoundError(what, path=path, remedy="check the URL")
    if re.search("ETag (Header missing|required)", text):
        return unsafe_server(path, "gives objects no ETag")
    if kind == "PreconditionError":
        return _replaced(path)
    if kind == "NotSupportedError":
        return UnsupportedError(
            "the server does not answer requests for a part of a file",
            path=path,
            remedy="use a web server that does, such as nginx; or copy it to a disk",
        )
    if kind == "InvalidPathError":
        name = re.search('Path "(.*?)"(?: contained|: )', text, re.DOTALL)
        return UnsupportedError(
            f"cannot {action}: it holds the object {name[1] if name else 'of a name'!r:.200}, and names with an empty "
            "part, '.', '..' or a control character are not supported",
            path=path,
            remedy="rename or delete that object with the tool of the store",
        )
    refused = kind in ("PermissionDeniedError", "UnauthenticatedError") or _REFUSED.search(text) is not None
    # Without credentials, the metadata service of a cloud machine is asked for some.
    lacking = refused or any(mark in text for mark in (_METADATA_SERVICE, "must be specified"))
    remedy = _remedy(str(path).partition(":")[0], credentials=lacking)
    if _WRONG.search(text) and not lacking:
        remedy = "check the URL, the endpoint and the settings of the bucket"
    if any(code in text for code in _SKEWED):
        remedy = "set the clock of this machine"
    # Only then is it certain that the store has not carried out the request, and never will.
    number = errno.EACCES if refused and not was_repeated(error) else None
    return StoreError(f"cannot {action}: {_reason(text)}", path=path, remedy=remedy, errno=number)


def was_repeated(error: BaseException) -> bool:
    """Return whether the request was sent more than once: an earlier one may have been, or still be, carried out."""
    repeated = TRIED.search(str(error).partition(DETAILS)[0]) is not None
    return repeated or REPEATED in getattr(error, "__notes__", ())


def _replaced(path: "StorePath | str") -> StoreError:
    return StoreError("was replaced while it was read", path=path, remedy="read it again")


def unsafe_server(path: "StorePath | str", problem: str) -> UnsupportedError:
    return UnsupportedError(
        f"the server {problem}, so that a save could overwrite another one unnoticed",
        path=path,
        remedy="use a server with conditional requests, such as a current MinIO, or save to a disk",
    )


def _remedy(scheme: str, *, credentials: bool) -> str:
    if credentials:
        return f"check the credentials {_CREDENTIALS[scheme]}" if scheme in _CREDENTIALS else "check the URL"
    endpoint = " and the endpoint (AWS_ENDPOINT_URL)" if scheme == "s3" else ""
    return f"check the network{endpoint}; TENSORKEEP_STORE_TIMEOUT sets how long is tried"


def _reason(text: str) -> str:
    # Durations with ten digits hide the message.
    text = re.sub(r"\b(\d+\.\d)\d+(?=m?s\b)", r"\1", text.partition(DETAILS)[0])
    tried = TRIED.search(text)
    times = f" (repeated {counted(int(tried[2]), 'time')} in {tried[1]})" if tried else ""
    code = text.partition("<Code>")[2].partition("</Code>")[0]
    message = text.partition("<Message>")[2].partition("</Message>")[0]
    if code:
        code, message = redacted(code), redacted(message)
        return (f"{code}: {message}" if message else code) + times
    # The rest may quote the request with its signature.
    words = [without_secrets(word) if "://" in word else word for word in redacted(TRIED.sub("", text)).split()]
    return " ".join(words) + times


def redacted(text: str) -> str:
    """Return a text without credentials: the values of the environment, and fields of a request that it repeats."""
    plain = _plain(text)
    found = plain
    # Decoded as the text is: a server may quote a secret in JSON, XML or percent escapes.
    secrets = {_plain(value) for name, value in os.environ.items() if _SECRET_NAMES.fullmatch(name)}
    # The longest first: a secret may contain another one.
    for secret in sorted(secrets, key=len, reverse=True):
        # Values of up to three characters would redact ordinary words.
        if len(secret) > 3:
            found = found.replace(secret, "***")
    # An answer may have any length.
    cut = found[: 4 * _MOST_CHARACTERS]
    found = _SECRETS.sub(lambda match: f"{match['shown'] or match['words'] or ''}***", cut)
    text = text if found == plain else found
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _plain(text: str) -> str:
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)
    return unquote(unquote(unescape(text))).replace("\\", "").strip()


def _unusable(bucket: str, text: str) -> StoreError:
    """The error for settings that obstore refuses. Its own text quotes their values, which may be secret."""
    known = _SETTINGS_ERRORS.search(text)
    return StoreError(
        f"cannot use the store: {known[0] if known else 'obstore refuses its settings in the environment'}",
        path=bucket,
        remedy=_remedy(bucket.partition(":")[0], credentials=True),
    )


# Requests.

# A request is repeated until these seconds are over, or obstore has tried it so often, whichever comes first.
# ``TENSORKEEP_STORE_TIMEOUT`` replaces the seconds. `_repeated` continues after a lost answer only.
GIVE_UP_SECONDS = 60.0
MOST_RETRIES = 10
# Requests for a few bytes each that are made at once: they wait for answers, not for the network.
SMALL_REQUESTS = 32
_CUT_SHORT = "the answer was cut short"
_BROKEN_ANSWERS = ("error sending request", "request or response body error", "Got invalid list response", _CUT_SHORT)
_AGAIN_SECONDS = 0.1
_FIRST_PAUSE = 0.1
T = TypeVar("T")
# The id of the process where obstore started its threads; a forked child does not have them.
_used_in: set[int] = set()


class ObjectStatus(NamedTuple):
    """An object of a store.

    ``tag`` changes with the content; some stores compare ``version`` instead. ``links`` counts the checkpoints that
    name it, as far as known.
    """

    key: str
    size: int
    modified: datetime
    tag: str | None
    version: str | None = None
    links: int = 1

    def as_stat(self) -> os.stat_result:
        when = int(self.modified.timestamp())
        # Instead of an inode number, which a store does not have.
        number = hash(self.key) & (2**63 - 1)
        fields = (stat.S_IFREG | 0o600, number, 0, self.links, 0, 0, self.size, when, when, when)
        return os.stat_result(fields, {"st_blocks": -(-self.size // 512)})


@contextmanager
def _request(path: StorePath, action: str) -> Iterator[tuple[Any, "ObjectStore"]]:
    """Yield the module obstore and the store of a path; raises as `obstore_errors`."""
    store = _store_of(path)
    import obstore

    with obstore_errors(path, action):
        yield obstore, store


def head(path: StorePath) -> ObjectStatus:
    """Raises NotFoundError if the object does not exist."""
    with _request(path, "look at the object") as (obstore, store):
        return _status(obstore.head(store, path.key))


def get(path: StorePath, start: int = 0, stop: int | None = None, *, tag: str | None = None) -> memoryview:
    """As many of the bytes as exist. Raises NotFoundError; StoreError for another tag or a short answer."""
    return _get(path, start, stop, tag)[0]


def read(path: StorePath, stop: int | None = None) -> tuple[bytes, ObjectStatus]:
    """Return the first bytes, or all, and the status at that time; raises as `get`."""
    content, status = _get(path, 0, stop, None)
    return bytes(content), status


def _get(path: StorePath, start: int, stop: int | None, tag: str | None) -> tuple[memoryview, ObjectStatus]:
    # Always a range: the answer then states the size of the object beside the length of what it sends.
    options: dict[str, Any] = {"range": {"offset": start} if stop is None else (start, stop)}
    # A weak tag never matches in a condition (RFC 9110, 13.1.1), so the tag of the answer is compared.
    weak = tag is not None and tag.startswith("W/")
    if tag is not None and not weak:
        options["if_match"] = tag
    with _request(path, "read it") as (obstore, store):
        try:
            found = _repeated(lambda: _whole(obstore.get(store, path.key, options=options)))
        except Exception as error:
            if start or "InvalidRange" not in str(error):
                raise
            found = memoryview(b""), head(path)  # it is empty, and has no range
        if weak and found[1].tag != tag:
            raise _replaced(path)
        return found


def _whole(answer: Any) -> tuple[memoryview, ObjectStatus]:
    """Raises OSError if bytes are missing, which obstore does not notice."""
    content = memoryview(answer.bytes())
    start, stop = answer.range
    if len(content) != stop - start:
        raise OSError(f"{_CUT_SHORT}: {len(content):,} of {stop - start:,} bytes came")
    return content, _status(answer.meta)


def put(path: StorePath, content: bytes) -> None:
    with _request(path, "write it") as (obstore, store):
        obstore.put(store, path.key, content, use_multipart=False)


def put_unless_changed(path: StorePath, content: bytes, seen: ObjectStatus | None) -> bool | None:
    """Write an object if the store still has the object ``seen``, or none; return whether it did.

    None means unknown: an earlier, repeated request may have been carried out, or may still be. A StoreError has the
    errno EACCES only if the store has refused the only request.
    """
    mode: Any = "create"
    if seen is not None:
        known = {"e_tag": seen.tag, "version": seen.version}
        mode = {name: value for name, value in known.items() if value is not None}
    with _request(path, "write it") as (obstore, store):
        try:
            _repeated(lambda: obstore.put(store, path.key, content, mode=mode))
        except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError) as error:
            # After a repetition, the condition may fail because of our own earlier request.
            return None if was_repeated(error) else False
    return True


def put_pieces(path: StorePath, pieces: Iterator[Any], *, part_bytes: int | None, at_once: int) -> None:
    """Write an object from pieces of memory, which must not change while a piece is referenced."""
    several: dict[str, Any] = {} if part_bytes is None else {"chunk_size": part_bytes, "max_concurrency": at_once}
    with _request(path, "write it") as (obstore, store):
        obstore.put(store, path.key, pieces, use_multipart=part_bytes is not None, **several)


def delete(paths: Sequence[StorePath]) -> None:
    """Delete objects of one bucket; missing ones are no error."""
    if not paths:
        return
    keys = [path.key for path in paths]
    with _request(paths[0].parent, "delete its objects") as (obstore, store):
        try:
            _repeated(lambda: obstore.delete(store, keys))
        except FileNotFoundError:
            # Some stores stop at the first that is missing.
            for key in keys:
                with suppress(FileNotFoundError):
                    _repeated(partial(obstore.delete, store, key))


def begins_as(path: StorePath, start: bytes) -> bool:
    """Whether an object begins with these bytes; for servers without range requests."""
    with _request(path, "read it") as (obstore, store):
        # The first chunk of the stream only: the page may be long.
        return bytes(next(iter(obstore.get(store, path.key).stream()), b""))[: len(start)] == start


def children(path: StorePath) -> Iterator[tuple[str, ObjectStatus | None]]:
    """Yield the names below a prefix, one level deep; the status is None for a further prefix."""
    with _request(path, "list it") as (obstore, store):
        found = _repeated(lambda: obstore.list_with_delimiter(store, path.key or None))
    for prefix in found["common_prefixes"]:
        yield prefix.rstrip("/").rpartition("/")[2], None
    for each in found["objects"]:
        # The empty object that a console makes for a folder has the name of the folder.
        if each["path"] != path.key:
            yield each["path"].rpartition("/")[2], _status(each)


def objects(path: StorePath, *, after: str | None = None) -> list[ObjectStatus]:
    """Return every object below a prefix, with keys greater than ``after``. Raises UnsupportedError for a bad key."""
    with _request(path, "list it") as (obstore, store):
        found = _repeated(lambda: obstore.list(store, path.key or None, offset=after).collect())
        return [_status(each) for each in found]


def _repeated(request: Callable[[], T]) -> T:
    """Repeat a request if the answer was lost or cut short. The last error counts also what obstore has repeated."""
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
                # Errors that say what is wrong are not repeated.
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
    # obstore's threads do not exist in a forked child, and a request would wait for them for ever.
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
    # HTTP, signing, credentials and retries are obstore's (https://developmentseed.org/obstore). It reads the
    # environment variables of the stores' own tools, such as ``AWS_ACCESS_KEY_ID`` and ``AZURE_STORAGE_ACCOUNT_NAME``.
    from_url = import_extra("obstore.store", "tensorkeep[cloud]", f"{bucket} needs the package obstore").from_url
    limit, first, longest = (timedelta(seconds=each) for each in (seconds, first_pause, longest_pause))
    retry: Any = {
        "max_retries": MOST_RETRIES,
        "retry_timeout": limit,
        # The first pause must be the shorter one: obstore panics otherwise.
        "backoff": {"init_backoff": min(first, longest / 2), "max_backoff": longest, "base": 2},
    }
    # A plain endpoint is one that the user has named.
    client: Any = {"timeout": limit, "allow_http": f"{endpoint} {bucket}".count("http://") > 0}
    with obstore_errors(bucket, "use the store"):
        try:
            store: ObjectStore = from_url(bucket, client_options=client, retry_config=retry)
        except Exception as error:
            raise_alone(_unusable(bucket, str(error)))
    return store


def pauses(seconds: float) -> tuple[float, float]:
    """The first and the longest pause of a library that repeats a request for ``seconds``."""
    return clock().library_pause(_FIRST_PAUSE), clock().library_pause(seconds / 8)


def give_up_seconds() -> float:
    """Raises UsageError if ``TENSORKEEP_STORE_TIMEOUT`` is not a number of seconds."""
    given = read_variable("TENSORKEEP_STORE_TIMEOUT")
    try:
        seconds = float(given or GIVE_UP_SECONDS)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise UsageError(f"TENSORKEEP_STORE_TIMEOUT is {given!r}", remedy="give a number of seconds")
    return seconds
