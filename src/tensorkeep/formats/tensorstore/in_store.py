"""Arrays in object stores: TensorStore's own drivers, with the endpoint and limits of `tensorkeep.io.objects.stores`.

TensorStore takes credentials from the same places, but neither an endpoint nor a limit of time.
"""

import os
from bisect import bisect_left
from typing import Any

from tensorkeep.errors import UnsupportedError
from tensorkeep.io.objects import stores
from tensorkeep.paths import StorePath, endpoint

_AFTER_SLASH = chr(ord("/") + 1)


class Listing:
    """The objects below a prefix, by their names relative to it; empty for a web server, which lists none."""

    def __init__(self, url: StorePath) -> None:
        found = stores.objects(url) if url.has_listing else []
        start = len(url.key) + 1 if url.key else 0
        self.sizes = {status.key[start:]: status.size for status in sorted(found)}
        self._names = list(self.sizes)

    def below(self, key: str) -> dict[str, int]:
        """Return the size of each object below a name; of all for an empty one."""
        if not key:
            return dict(self.sizes)
        first, last = (bisect_left(self._names, key + end) for end in ("/", _AFTER_SLASH))
        return {name: self.sizes[name] for name in self._names[first:last]}


def kvstore_spec(url: StorePath, prefix: str) -> dict[str, Any]:
    """Return the spec of a key-value store of what is below a URL and then a prefix, which ends with a slash.

    Raises UnsupportedError if TensorStore has no driver for the store.
    """
    scheme, _, name = url.bucket.partition("://")
    path = f"{url.key}/{prefix}" if url.key else prefix
    if scheme == "s3":
        return {"driver": "s3", "bucket": name, "path": path, **_settings_of_s3()}
    if scheme == "gs":
        return {"driver": "gcs", "bucket": name, "path": path}
    if scheme in ("http", "https"):
        return {"driver": "http", "base_url": url.bucket, "path": f"/{path}"}
    raise UnsupportedError(
        f"TensorStore does not read {scheme}://", path=url, remedy="copy it to a disk, or to s3:// or gs://"
    )


def _settings_of_s3() -> dict[str, Any]:
    server = endpoint()
    # Without a region, TensorStore asks for that of the bucket, which only Amazon's servers answer.
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or ("us-east-1" if server else None)
    given: dict[str, Any] = {"endpoint": server, "aws_region": region, "aws_credentials": _credentials_of_s3()}
    return {name: value for name, value in given.items() if value}


def _credentials_of_s3() -> dict[str, str] | None:
    """Return where TensorStore takes credentials from; None for all the places that it knows."""
    if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        return {"type": "anonymous"}
    # Looking at all places prints complaints about missing files of settings on stderr.
    return {"type": "environment"} if os.environ.get("AWS_ACCESS_KEY_ID") else None


def retries() -> dict[str, Any]:
    """Return the resources of a context that limit how often a request is repeated."""
    first, longest = stores.pauses(stores.give_up_seconds())
    limits = {"max_retries": stores.MOST_RETRIES, "initial_delay": f"{first}s", "max_delay": f"{max(first, longest)}s"}
    return {f"{driver}_request_retries": limits for driver in ("s3", "gcs", "http")}


def patience() -> float:
    """Return the seconds to wait for an answer of TensorStore, which has no limit of its own on a request."""
    return 2 * stores.give_up_seconds()
