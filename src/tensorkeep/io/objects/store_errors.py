"""What the errors of object stores say: those of obstore as errors of this package, without anything secret."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import NoReturn
from urllib.parse import quote

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

_REFUSED = re.compile(r"status code: 40[013]\b|incorrectly configured region")
"""Answers about credentials: stores give 400 for a token that has expired and for another region than theirs."""

_SKEWED = ("RequestTimeTooSkewed", "RequestTimeTooFar")

_SECRET_NAMES = re.compile(r"(AWS|AZURE|GOOGLE|GCP)_.*(KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SAS)")
"""Environment variables whose values are printed nowhere."""

_SECRET_FIELDS = re.compile(
    r"""(x-amz-[\w-]+|\w*authorization|\w*credentials?|\w*signature\w*|\w*token|awsaccesskeyid|\bsig|stringtosign\w*|"""
    r"""canonicalrequest\w*)(["']?\s*[=:>,]+\s*["']?)[^<"'&]*""",
    re.IGNORECASE,
)
"""Fields of a request in an answer that repeats it: as a header, in a query, in JSON or in XML."""

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
    """
    secrets = {value for name, value in os.environ.items() if _SECRET_NAMES.fullmatch(name) and len(value) > 3}
    for secret in sorted(secrets, key=len, reverse=True):
        for written in {secret, quote(secret, safe=""), escape(secret), secret.strip()}:
            text = text.replace(written, "***")
    # An answer may have any length, and the pattern takes the square of it.
    text = _SECRET_FIELDS.sub(r"\1\2***", text[: 4 * _MOST_CHARACTERS])
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def unusable(bucket: str, text: str) -> StoreError:
    """Return the error for settings that obstore refuses; it quotes their values, which may be secret."""
    known = _SETTINGS_ERRORS.search(text)
    return StoreError(
        f"cannot use the store: {known[0] if known else 'obstore refuses its settings in the environment'}",
        path=bucket,
        remedy=_remedy(bucket.partition(":")[0], credentials=True),
    )
