"""What the errors of object stores say: those of obstore as errors of this package, without anything secret."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from tensorkeep.errors import NotFoundError, StoreError, TensorkeepError, UnsupportedError
from tensorkeep.paths import StorePath, without_secrets
from tensorkeep.units import counted

TRIED = re.compile(r" in (\d\S*), after (\d+) retries(?:, max_retries: \d+, retry_timeout: \S+)?")
"""In how much time obstore has repeated a request how often."""

DETAILS = "\n\nDebug source"
"""What begins the part of a text that is for developers of obstore."""

_SETTINGS_ERRORS = re.compile(
    r"\w+ must be specified|Unable to (open|decode) service account file|Invalid Access Key|Error reading pem file"
)
"""Parts of errors without values of settings."""

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
    except Exception as error:
        if isinstance(error, FileNotFoundError) or "NoSuchBucket" in str(error):
            raise NotFoundError(_missing(str(error)), path=path, remedy="check the URL") from None
        kind = type(error).__name__
        if type(error).__module__.partition(".")[0] != "obstore" and not isinstance(error, OSError):
            raise
        if re.search("ETag (Header missing|required)", str(error)):
            raise unsafe_server(path, "gives objects no ETag") from None
        if kind == "PreconditionError":
            raise replaced(path) from None
        if kind == "NotSupportedError":
            raise UnsupportedError(
                "the server does not answer requests for a part of a file",
                path=path,
                remedy="use a web server that does, such as nginx; or copy it to a disk",
            ) from None
        refused = kind in ("PermissionDeniedError", "UnauthenticatedError")
        # Without credentials, the metadata service of a cloud machine is asked for some.
        lacking = refused or any(mark in str(error) for mark in (_METADATA_SERVICE, "must be specified"))
        remedy = _remedy(str(path).partition(":")[0], credentials=lacking)
        number = errno.EACCES if refused else None
        raise StoreError(f"cannot {action}: {_reason(str(error))}", path=path, remedy=remedy, errno=number) from None
    except BaseException as error:
        # A class that obstore does not export; its text says nothing about the setting.
        if type(error).__name__ != "PanicException":
            raise
        raise StoreError(
            f"cannot {action}: obstore has failed",
            path=path,
            remedy="check the credentials and the endpoint in the environment: a line break at the end, or no host",
        ) from None


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
        return (f"{code}: {message}" if message else code) + times
    words = [without_secrets(word) if "://" in word else word for word in TRIED.sub("", text).split()]
    return " ".join(words) + times


def unusable(bucket: str, text: str) -> StoreError:
    """Return the error for settings that obstore refuses; it quotes their values, which may be secret."""
    known = _SETTINGS_ERRORS.search(text)
    return StoreError(
        f"cannot use the store: {known[0] if known else 'obstore refuses its settings in the environment'}",
        path=bucket,
        remedy=_remedy(bucket.partition(":")[0], credentials=True),
    )
