"""A bucket behind a proxy that fails requests."""

import secrets

import pytest

from faults.stores.buckets import Bucket
from store_servers import Proxy, make_bucket


@pytest.fixture
def bucket(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket; outside of `Bucket.disturbed`, requests reach it undisturbed."""
    bucket = Bucket(f"faults-{secrets.token_hex(4)}", server)
    make_bucket(server.target, bucket.name)
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    return bucket
