"""What the errors of object stores say: those of obstore as errors of this package, without anything secret."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from typing import NoReturn
from urllib.parse import unquote

from tensorkeep.errors import NotFoundError, StoreError, TensorkeepError, UnsupportedError
from tensorkeep.paths import StorePath, without_secrets
from tensorkeep.units import counted

TRIED = re.compile(r" in (\d\S*), after (\d+) retries(?:, max_retries: \d+, retry_timeout: \S+)?")
"""In how much time obstore has repeated a request how often."""

DETAILS = "\n\nDebug source"
"""What begins the part of a text that is for developers of obstore."""

REPEATED = "the request was sent before, without an answer"
"""A note of an error: `stores` has repeated the request itself, and obstore's text does not say so."""

_SETTINGS_ERRORS = re.compile(
    r"\w+ must be specified|Unable to (open|decode) service account file|Invalid Access Key|Error reading pem file"
)
"""Parts of errors without values of settings."""

_REFUSED = re.compile(
    r"status code: (40[13]\b|400\b(?!.*<Code>)|400\b.*<Code>\w*(Token|Auth|Access|Security|Signature|Expired|Region))"
    r"|incorrectly configured region|\(code: AccessDenied\)",
    re.DOTALL,
)
"""Answers about credentials: stores give 400 for a token that has expired and for another region than theirs, and 200
for objects that they do not delete."""

_WRONG = re.compile(r"status code: 4(?!08|29)\d\d")
"""Answers about the request itself: to repeat it does not help."""

_SKEWED = ("RequestTimeTooSkewed", "RequestTimeTooFar")

_SECRET_NAMES = re.compile(r"(AWS|AZURE|GOOGLE|GCP)_.*(KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SAS)")
"""Environment variables whose values are printed nowhere."""

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
"""What is secret in an answer that repeats a request, or says what is wrong with it."""

_MOST_CHARACTERS = 500

_METADATA_SERVICE = "//169.254.169.254/"

_CREDENTIALS = {
    "s3": "and the region (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, ...)",
    "gs": "(GOOGLE_APPLICATION_CREDENTIALS)",
    "az": "and the account (AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, ...)",
}


@contextmanager
def store_request(path: "StorePath | str", action: str) -> Iterator[None]:
    """Raise errors of obstore as errors of this package: "cannot <action>", with what the store answered."""
    try:
        yield
    except TensorkeepError:
        raise
    except BaseException as error:
        ours = _error_for(error, path, action)
        if ours is None:
            raise
        raise_alone(ours)


def raise_alone(error: TensorkeepError) -> NoReturn:
    """Raise an error without the one that it replaces, which may quote credentials, as its context."""
    try:
        raise error from None
    finally:
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
    if isinstance(error, FileNotFoundError) or "NoSuchBucket" in text:
        return NotFoundError(_missing(text), path=path, remedy="check the URL")
    if re.search("ETag (Header missing|required)", text):
        return unsafe_server(path, "gives objects no ETag")
    if kind == "PreconditionError":
        return replaced(path)
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


def replaced(path: "StorePath | str") -> StoreError:
    """Return the error for an object that changes while it is read."""
    return StoreError("was replaced while it was read", path=path, remedy="read it again")


def unsafe_server(path: "StorePath | str", problem: str) -> UnsupportedError:
    """Return the error for a server that cannot write to an object on a condition."""
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


def _missing(text: str) -> str:
    return "its bucket does not exist" if "NoSuchBucket" in text else "does not exist"


def _reason(text: str) -> str:
    """Return the part of an error's text that a user can use, without the request, which may have signatures."""
    text = re.sub(r"\b(\d+\.\d)\d+(?=m?s\b)", r"\1", text.partition(DETAILS)[0])
    tried = TRIED.search(text)
    times = f" (repeated {counted(int(tried[2]), 'time')} in {tried[1]})" if tried else ""
    code = text.partition("<Code>")[2].partition("</Code>")[0]
    message = text.partition("<Message>")[2].partition("</Message>")[0]
    if code:
        code, message = redacted(code), redacted(message)
        return (f"{code}: {message}" if message else code) + times
    words = [without_secrets(word) if "://" in word else word for word in redacted(TRIED.sub("", text)).split()]
    return " ".join(words) + times


def redacted(text: str) -> str:
    """Return a text without credentials: the values of the environment, and fields of a request that it repeats.

    Examples
    --------
    >>> redacted("denied: X-Amz-Signature=0a1b, authorization: AWS4-HMAC-SHA256 Credential=AKIA/20250101")
    'denied: X-Amz-Signature=***'
    >>> redacted("the signature does not match the signature you provided; a Bearer token is missing")
    'the signature does not match the signature you provided; a Bearer token is missing'
    """
    plain = _plain(text)
    found = plain
    secrets = {_plain(value) for name, value in os.environ.items() if _SECRET_NAMES.fullmatch(name)}
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) > 3:
            found = found.replace(secret, "***")
    # An answer may have any length.
    cut = found[: 4 * _MOST_CHARACTERS]
    found = _SECRETS.sub(lambda match: f"{match['shown'] or match['words'] or ''}***", cut)
    text = text if found == plain else found
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _plain(text: str) -> str:
    """Return a text in which nothing is escaped as in JSON, XML or, once or twice, in a URL."""
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)
    return unquote(unquote(unescape(text))).replace("\\", "").strip()


def unusable(bucket: str, text: str) -> StoreError:
    """Return the error for settings that obstore refuses; it quotes their values, which may be secret."""
    known = _SETTINGS_ERRORS.search(text)
    return StoreError(
        f"cannot use the store: {known[0] if known else 'obstore refuses its settings in the environment'}",
        path=bucket,
        remedy=_remedy(bucket.partition(":")[0], credentials=True),
    )
