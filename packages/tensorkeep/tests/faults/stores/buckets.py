"""A bucket behind a proxy, and calls whose requests fail one after the other, in each way.

A request fails once, twice or for ever; or all requests fail from one on. Every such case is run by `sweep`, which
asserts what holds for all calls: they end in time, failures that pass are not noticed, the error names the place and a
remedy, and contains no credentials, and what the store holds is whole. The calls are in `faults.stores.calls`.
"""

import math
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from itertools import product
from typing import NamedTuple, Protocol

import obstore
import pytest

import tensorkeep
from store_servers import ACCESS_KEY, ACTIONS, SECRET, Fault, FaultAt, Proxy, environment_of
from tensorkeep.paths import StorePath
from tensorkeep.runs import pruned
from tensorkeep.storage import store_commit, store_requests
from tensorkeep.storage.store_commit import is_tombstone

STALLED_SECONDS = 0.3
"""For so long an answer that does not end is waited for, which no clock of the tests makes shorter."""

TIMES = {"once": 1, "twice": 2, "for ever": math.inf}

OUTAGE = "and all later ones"

_PASSING = {"500", "503", "reset", "short", "slow"}
"""Actions that a repetition of the request makes good; an answer that breaks off may also be that of a commit."""


class Bucket(NamedTuple):
    """A bucket, and the proxy before its server."""

    name: str
    proxy: Proxy

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def environment(self, *, disturbed: bool = False, seconds: float = 20) -> dict[str, str]:
        """Return the environment variables with which a process uses the bucket, through the proxy or directly."""
        url = self.proxy.url if disturbed else self.proxy.target
        return {**environment_of(url, seconds=seconds), "TENSORKEEP_STORE_GRACE": "0"}

    @contextmanager
    def disturbed(self, fault: Fault | None) -> Iterator[list[str]]:
        """In this context, requests go through the proxy, which fails some; yields the list of them."""
        self.proxy.start_again(fault)
        # Each call sees for itself whether the server refuses what it must.
        store_commit._refusing.clear()
        with pytest.MonkeyPatch.context() as patches:
            seconds = STALLED_SECONDS if fault is not None and fault.action == "stalled" else 20
            for name, value in self.environment(disturbed=True, seconds=seconds).items():
                patches.setenv(name, value)
            yield self.proxy.requests

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys of all objects, or of those below a prefix."""
        found = obstore.list(store_requests._store_of(StorePath(self.url)), prefix or None).collect()
        return sorted(each["path"] for each in found)

    def content(self, key: str) -> bytes:
        return bytes(store_requests.get(StorePath(f"{self.url}/{key}")))

    def leftovers(self) -> list[str]:
        """Return the keys of objects that no manifest of the bucket names, nor that of a deleted step."""
        names = {key: key.rpartition("/")[2] for key in self.keys() if not key.endswith(pruned.FILE_NAME)}
        manifests = [key for key, name in names.items() if name == "manifest.json" or is_tombstone(name)]
        named = b"".join(map(self.content, manifests))
        # The manifest of several ranks names a fragment of each, which names the objects of the rank.
        fragments = [key for key, name in names.items() if name.endswith(".json") and name.encode() in named]
        named += b"".join(map(self.content, fragments))
        return [key for key, name in names.items() if key not in manifests and name.encode() not in named]

    def clear(self) -> None:
        if keys := self.keys():
            obstore.delete(store_requests._store_of(StorePath(self.url)), keys)


class Call(Protocol):
    """A call on a store, whose requests are broken."""

    def prepare(self, url: str) -> None:
        """Write what is there before the call."""

    def run(self, url: str) -> None:
        """Do it; also again, if it was interrupted."""

    def check(self, url: str, *, returned: bool) -> str:
        """Fail the test unless what the store holds is whole, and new if the call returned; return what it is."""


class Case(NamedTuple):
    """A fault of the request with a number: what happens, and how often."""

    action: str
    often: str
    number: int

    def fault(self) -> Fault:
        if self.often == OUTAGE:
            return Fault(self.action, lambda number: number >= self.number)
        return FaultAt(self.action, self.number, TIMES[self.often])

    @property
    def passes(self) -> bool:
        """Whether the call must not notice it, because repeating the request helps."""
        return self.action == "slow" or (self.action in _PASSING and self.often in ("once", "twice"))


def requests_of(bucket: Bucket, call: Call) -> list[str]:
    url = f"{bucket.url}/counted"
    call.prepare(url)
    with bucket.disturbed(None) as requests:
        call.run(url)
    assert call.check(url, returned=True) == "new"
    assert not bucket.leftovers()
    bucket.clear()
    return requests


def cases_of(requests: Sequence[str], actions: Sequence[str] = ACTIONS) -> list[Case]:
    cases = [Case(*each) for each in product(actions, TIMES, range(len(requests)))]
    outages = [Case(*each) for each in product({*actions} & {"reset", "stalled"}, [OUTAGE], range(len(requests)))]
    return [case for case in cases + outages if case.action != "short" or requests[case.number].startswith("GET")]


def sampled(cases: Sequence[Case], start: int) -> list[Case]:
    """Return one of the cases; those of consecutive starts are spread over actions, frequencies and requests."""
    golden = (math.sqrt(5) - 1) / 2
    return [cases[int(start * golden % 1 * len(cases))]]


def every_sixth(cases: list[Case], start: int) -> list[Case]:
    """Return every sixth case, others for each ``start`` and day; all with ``STORE_FAULTS=all``, in an hour."""
    # A test whose turn is every 12th or 24th day in CI gets others each time, too.
    day = date.today().toordinal()
    return cases if os.environ.get("STORE_FAULTS") == "all" else cases[(start + day + day // 12) % 6 :: 6]


def sweep(bucket: Bucket, call: Call, cases: Sequence[Case]) -> int:
    """Break a call in each of the cases; return in how many of them a request was hit."""
    hit = 0
    for number, case in enumerate(cases):
        try:
            hit += _broken(bucket, call, case, f"{bucket.url}/{number}/ckpt")
        except BaseException as error:
            error.add_note(f"request {case.number}: {case.action}, {case.often}; the requests were")
            error.add_note("\n".join(bucket.proxy.requests))
            raise
        bucket.clear()
    return hit


def _broken(bucket: Bucket, call: Call, case: Case, url: str) -> bool:
    """Break a call and assert what holds for all; return whether a request was hit."""
    call.prepare(url)
    raised: Exception | None = None
    with bucket.disturbed(case.fault()) as requests:
        try:
            call.run(url)
        # What a manager cannot delete, or skips as damaged, is reported by a warning, which is an error here.
        except (tensorkeep.TensorkeepError, UserWarning) as error:
            raised = error
    if case.action == "late":
        bucket.proxy.carry_out_late()
    call.check(url, returned=raised is None)
    hit = case.number < len(requests)
    if raised is not None:
        assert not case.passes, f"a failure that passes was not repeated: {raised}"
        _check_error(raised, url)
        # A commit without an answer may be carried out later, and needs its objects then; so they remain.
        # On a busy machine, another request may have taken longer than the seconds, and the fault hit none.
        removes = not hit or any(word in requests[case.number] for word in ("DELETE", "?delete", "manifest.json"))
        removes |= case.action == "late"  # an object that arrives after the others were removed
        assert case.often == OUTAGE or removes or not bucket.leftovers()
    # What failed before does not prevent the next attempt.
    call.run(url)
    bucket.proxy.carry_out_late()
    call.check(url, returned=True)
    return hit


def _check_error(error: Exception, url: str) -> None:
    """Assert that an error names the place and a remedy, and contains no credentials, nor do its causes."""
    if isinstance(error, tensorkeep.TensorkeepError):
        assert (error.path or "").startswith(url), error
        assert error.remedy, error
    text = "".join(traceback.format_exception(error))
    while (error := error.__cause__ or error.__context__) is not None:  # type: ignore[assignment]
        text += str(error)
    for word in (SECRET, ACCESS_KEY, "X-Amz-", "AWS4-HMAC", "Signature"):
        assert word not in text
