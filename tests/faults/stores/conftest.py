"""A bucket of a real server, behind a proxy that fails requests."""

import secrets
from collections.abc import Callable, Iterator

import pytest

from faults.stores.buckets import Bucket
from store_servers import Proxy, make_bucket, proxy_for


@pytest.fixture(scope="module")
def proxy(s3_url_of: Callable[[str], str]) -> Iterator[Proxy]:
    with proxy_for(s3_url_of("ministack")) as proxy:
        yield proxy


@pytest.fixture
def bucket(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket; outside of `Bucket.disturbed`, requests reach it undisturbed."""
    bucket = Bucket(f"faults-{secrets.token_hex(4)}", proxy)
    make_bucket(proxy.target, bucket.name)
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    return bucket
