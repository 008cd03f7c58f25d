"""Checkpoints are read from object stores as they are from disks, and failures end with a clear error."""

import errno
import json
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from html import escape
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import numpy as np
import pytest
import torch

import tensorkeep
from store_servers import ACCESS_KEY, SECRET, Fault, Proxy, always, serving, upload
from tensorkeep.cli.main import main
from tensorkeep.paths import StorePath, as_path
from tensorkeep.storage import object_store, parallel, store_commit, store_requests
from tensorkeep.storage.store_requests import obstore_errors, redacted
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same

pytestmark = pytest.mark.integration
obstore = pytest.importorskip("obstore")

BUCKET = "s3://bucket-one"


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((300, 1000), value), "b": torch.arange(10)}, "step": int(value), "x": np.ones(3)}


def uploaded(content: Any, folder: Path, name: str, **options: Any) -> str:
    """Save a state to a disk, and copy that into the bucket; return the URL."""
    plain: dict[str, Any] = {"force": True} if name.endswith(".safetensors") else {}
    tensorkeep.save(content, folder / name, **plain, **options)
    return upload(folder / name, f"{BUCKET}/{folder.name}/{name}")


def test_a_slice_is_one_request_for_its_block_only(tmp_path: Path, bucket: Proxy) -> None:
    large = torch.arange(6 * 2**20, dtype=torch.float32)
    with tensorkeep.open(uploaded({"w": large}, tmp_path, "c")) as opened:
        bucket.start_again(None)
        assert torch.equal(opened["w"][1000:1010], large[1000:1010])
    assert len(bucket.requests) == 1
    assert bucket.answered_bytes <= 1.2 * 16 * 1024**2


def test_few_processors_do_not_limit_the_requests_at_a_time(bucket: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "usable_processors", lambda: [0])
    tensorkeep.save({"w": torch.zeros(2**18, 5)}, f"{BUCKET}/threads")
    used: list[int] = []
    real = parallel.run

    def run(tasks: Any, threads: int, *arguments: Any) -> None:
        used.append(threads)
        real(tasks, threads, *arguments)

    monkeypatch.setattr(parallel, "run", run)
    for options in ({"memory_budget": "256MiB"}, {"memory_budget": "1GiB"}, {"threads": 3}):
        tensorkeep.load(f"{BUCKET}/threads", **options)
    assert used == [7, 8, 3]


@pytest.mark.parametrize(("name", "compression"), [("native", "lossless"), ("file.safetensors", "none")])
def test_neighbours_are_read_by_one_request(tmp_path: Path, bucket: Proxy, name: str, compression: str) -> None:
    many = {f"w{number}": torch.full((50 + number,), float(number)) for number in range(100)}
    url = uploaded(many, tmp_path, name, compression=compression)
    with tensorkeep.open(url) as opened:
        bucket.start_again(None)
        assert torch.equal(opened["w7"].load(), many["w7"])
        assert len(bucket.requests) == 1
    bucket.start_again(None)
    assert same(tensorkeep.load(url), many)
    assert len(bucket.requests) < 20
    assert tensorkeep.verify(url)


def test_addresses_of_runs(
    bucket: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tensorkeep.CheckpointManager(tmp_path / "run", incremental=True) as manager:
        for number in (1, 2):
            manager.save(number, state(number), metrics={"loss": 3.0 - number}).wait()
    url = upload(tmp_path / "run", f"{BUCKET}/run")
    for address, number in {url: 2, f"{url}@1": 1, f"{url}@best:loss": 2}.items():
        assert same(tensorkeep.load(address), state(number)), address
    assert not tensorkeep.diff(f"{url}@1", f"{url}@2")
    with pytest.raises(tensorkeep.NotFoundError, match="has no step 3\nthe nearest steps are 1, 2"):
        tensorkeep.load(f"{url}@3")
    monkeypatch.chdir(tmp_path)
    for command in ("info", "ls", "verify", "log", "show"):
        assert main([command, url]) == 0, command
    assert main(["show", f"{url}@1", f"{url}@2"]) == 0
    assert {path.name for path in tmp_path.glob("*.html")} == {"run.html", "run-1-and-run-2.html"}
    assert "loss" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["500", "503", "reset", "lost", "truncated", "short"])
def test_what_fails_for_ever_is_an_error_of_the_store(tmp_path: Path, bucket: Proxy, action: str) -> None:
    url = uploaded(state(3), tmp_path, "c")
    bucket.start_again(None)
    tensorkeep.load(url)
    for first in range(len(action) % 3, len(bucket.requests), 3):
        bucket.start_again(Fault(action, lambda number, first=first: number >= first))  # type: ignore[misc]
        # Never NotACheckpointError or CorruptCheckpointError, after which other steps are used or deleted.
        with pytest.raises(tensorkeep.StoreError) as caught:
            tensorkeep.load(url)
        assert BUCKET in str(caught.value)
        assert SECRET not in str(caught.value)
    assert len(bucket.requests) > 1


def test_a_request_and_its_repetitions_take_the_time_that_the_user_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = mock.Mock(side_effect=OSError)
    monkeypatch.setattr("obstore.store.from_url", connected)
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "7")
    with pytest.raises(tensorkeep.StoreError, match="cannot use the store"):
        store_requests.objects(StorePath("s3://never-used/"))
    options = connected.call_args.kwargs
    assert options["client_options"]["timeout"] == options["retry_config"]["retry_timeout"] == timedelta(seconds=7)


def test_an_answer_that_is_too_short_is_asked_for_again_and_named(bucket: Proxy) -> None:
    path = StorePath(f"{BUCKET}/short")
    store_requests.put(path, b"0123456789")
    for call in (
        lambda: store_requests.get(path, 2, 7),
        lambda: store_requests.get(path, 2),
        lambda: store_requests.read(path),
    ):
        bucket.start_again(Fault("short", lambda number: number == 0))
        call()
        assert len(bucket.requests) == 2
        bucket.start_again(Fault("short", always))
        with pytest.raises(tensorkeep.StoreError, match=r"cannot read it: the answer was cut short: \d+ of \d+ bytes"):
            call()
    bucket.start_again(None)
    # A range that ends after the object is not too short.
    assert bytes(store_requests.get(path, 7, 99)) == b"789"
    assert store_requests.read(path, 99)[0] == b"0123456789"
    assert len(bucket.requests) == 2
    # The error has the number of all repetitions.
    for action in ("short", "reset"):
        bucket.start_again(Fault(action, always))
        with case(action), pytest.raises(tensorkeep.StoreError) as caught:
            store_requests.read(path)
        assert f"(repeated {len(bucket.requests) - 1} times in 25.0s)\n" in str(caught.value)
        assert "max_retries" not in str(caught.value)


def test_a_write_that_was_repeated_may_still_be_carried_out(bucket: Proxy) -> None:
    path = StorePath(f"{BUCKET}/repeated")
    store_requests.put(path, b"x")
    tag = store_requests.head(path)._replace(tag='"another"')
    for seen in (None, tag):
        for action, expected in {"slow": False, "500": None, "reset": None}.items():
            bucket.start_again(Fault(action, lambda number: number == 0))
            with case(action):
                assert store_requests.put_unless_changed(path, b"y", seen) is expected
        for action, number in {"403": errno.EACCES, "late": None}.items():
            bucket.start_again(Fault(action, always))
            with case(action), pytest.raises(tensorkeep.StoreError, match="AccessDenied") as refused:
                store_requests.put_unless_changed(path, b"y", seen)
            assert refused.value.errno == number


PLACE = StorePath(f"{BUCKET}/refused")

REQUESTS: dict[str, Callable[[], object]] = {
    "list": lambda: store_requests.objects(PLACE),
    "list one level": lambda: [*store_requests.children(PLACE)],
    "look": lambda: store_requests.head(PLACE),
    "read": lambda: store_requests.read(PLACE),
    "write": lambda: store_requests.put(PLACE, b"x"),
    "write in parts": lambda: store_requests.put_pieces(PLACE, iter([b"x"]), part_bytes=2**20, at_once=1),
    "create": lambda: store_requests.put_unless_changed(PLACE, b"x", None),
    "delete": lambda: store_requests.delete([PLACE, PLACE / "x"]),
}


@pytest.mark.parametrize("action", ["400", "403", "echo"])
def test_what_a_store_refuses_has_a_remedy_and_no_secrets(
    bucket: Proxy, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """Nor have the errors that it replaces."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"{SECRET}/+session")
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "16")  # a connection of its own
    for name, request in REQUESTS.items():
        bucket.start_again(Fault(action, always))
        with case(name), pytest.raises(tensorkeep.StoreError, match="check the credentials and the region") as caught:
            request()
        assert len(bucket.requests) == 1
        error: BaseException | None = caught.value
        while error is not None:
            assert not re.search(f"{SECRET}|{ACCESS_KEY}|AWS4-HMAC|[0-9a-f]{{64}}|%2Bsession", str(error))
            error = error.__cause__ or error.__context__


ANSWERS = r"""
%s {"k": "%s"} <K>%s</K>
?X-Amz-Security-Token=hidden&a=b&X-Goog-Signature=hidden&client_secret=hidden&refresh_token=hidden&password=hidden
http://user:hidden@host/x?u=https%%3A%%2F%%2Fh%%2F%%3Fsv%%3D1%%26sig%%3Dhidden%%253D&AccountKey=hidden==
{"a": "Basic hidden", "authorization": ["Bearer hidden"], "private_key": "hidden"} or "{\"authorization\": \"hidden\"}"
denied: bearer hidden, no user eyJhidden.hidden; authorization: Digest u="hidden"
The MAC signature in it 'hidden=' is not <StringToSign>hidden hidden</StringToSign> Cookie: s=hidden
"""


@pytest.mark.parametrize("answer", [*ANSWERS.strip().splitlines(), "string to sign:\nhidden", f"token={'x' * 3000}hid"])
def test_no_error_repeats_a_secret(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """However it is escaped: as in JSON, in XML or in a URL, once or twice."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", secret := 'hid/den+=&<">')
    forms = [secret, json.dumps(secret)[1:-1], secret.replace("/", r"\/"), escape(secret), escape(secret, quote=False)]
    forms += [quote(secret), quote(secret, ""), quote(quote(secret, "")), r"hid\u002fden+=\u0026\u003c\">"]
    for form in forms:
        shown = redacted(answer.replace("%s", form).replace("%%", "%"))
        assert "***" in shown
        assert "hid" not in shown


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        ("400: <Code>KeyTooLongError</Code>", "check the URL, the endpoint and the settings of the bucket"),
        ("413: ", "check the URL, the endpoint and the settings of the bucket"),
        ("400: <Code>InvalidToken</Code>", "check the credentials and the region"),
        ("400: ", "check the credentials and the region"),
        ("200: failed for key x: no (code: AccessDenied)", "check the credentials and the region"),
        ("403: <Code>RequestTimeTooSkewed</Code>", "set the clock of this machine"),
        ("429: slow", "check the network and the endpoint"),
    ],
)
def test_the_remedy_fits_the_answer(answer: str, remedy: str) -> None:
    with pytest.raises(tensorkeep.StoreError, match=remedy), obstore_errors(f"{BUCKET}/x", "read it"):
        raise OSError(f"Generic S3 error: Server returned non-2xx status code: {answer}")


@pytest.mark.parametrize("name", ["a\tb", "a\nb", "a\x7fb", "\udcff"])
def test_a_url_that_no_store_knows_is_refused(name: str) -> None:
    for call in (tensorkeep.load, lambda url: tensorkeep.save(state(1), url), tensorkeep.CheckpointManager):
        with pytest.raises(tensorkeep.UsageError, match="which no store knows\ncheck the URL"):
            call(f"{BUCKET}/{name}")


def test_an_object_that_is_no_manifest(bucket: Proxy) -> None:
    for content in (b"", b"x"):
        with case(content):
            store_requests.put(StorePath(f"{BUCKET}/foreign/manifest.json"), content)
            with pytest.raises(tensorkeep.NotACheckpointError):
                tensorkeep.load(f"{BUCKET}/foreign")
            with pytest.raises(tensorkeep.DestinationExistsError, match="is not a checkpoint of this format"):
                tensorkeep.save(state(1), f"{BUCKET}/foreign", overwrite=True)


def test_a_deletion_whose_answer_was_lost_is_repeated(bucket: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [StorePath(f"{BUCKET}/deleted/{number}") for number in range(3)]
    real = obstore.delete

    def delete(store: Any, keys: str | list[str]) -> None:
        """Delete as stores do that know no deletion of several objects: the first that is missing is an error."""
        for key in [keys] if isinstance(keys, str) else keys:
            obstore.head(store, key)
            real(store, key)
            if key not in lost:
                lost.add(key)
                raise obstore.exceptions.GenericError("error sending request")

    lost: set[str] = set()
    for path in paths:
        store_requests.put(path, b"x")
    monkeypatch.setattr(obstore, "delete", delete)
    store_requests.delete(paths)
    assert len(lost) == 3
    assert not store_requests.objects(paths[0].parent)


def test_a_server_without_conditions_or_tags_is_refused(bucket: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_commit, "_refusing", set())
    url = f"{BUCKET}/refused"
    messages = {
        "unconditional": r"although asked not to \(If-None-Match\).*\nuse a server",
        "untagged": r"the server gives objects no ETag.*\nuse a server",
    }
    for action, message in messages.items():
        bucket.start_again(Fault(action, always))
        with case(action), pytest.raises(tensorkeep.UnsupportedError, match=message):
            tensorkeep.save(state(1), url)
        bucket.start_again(None)
        assert not store_requests.objects(StorePath(url))
    bucket.start_again(Fault("unconditional", always))
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.url.replace("//", f"//user:{SECRET}@"))
    with pytest.raises(tensorkeep.UnsupportedError, match=r"at http://127\.0\.0\.1:") as refused:
        tensorkeep.save(state(1), url)
    assert SECRET not in str(refused.value)
    # Whether a server refuses is asked once.
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.url)
    counts = []
    for number in range(3):
        bucket.start_again(None)
        tensorkeep.save(state(1), f"{BUCKET}/asked-{number}")
        counts.append(len(bucket.requests))
    assert counts[0] - 1 == counts[1] == counts[2]


LATER = f"http://user:{SECRET}@127.0.0.1:9"
"""Where nothing listens."""

GOOGLE = "service account file\ncheck the credentials"


@pytest.mark.parametrize(
    ("environment", "url", "error", "message"),
    [
        ({}, "s3://no-such-bucket/c", "NotFoundError", "its bucket does not exist"),
        # Each store has a remedy of its own.
        ({}, "az://container/c", "StoreError", r"Account must be specified\ncheck .* \(AZURE_STORAGE_ACCOUNT_NAME"),
        (
            {"AWS_ENDPOINT_URL": LATER},
            "s3://b/c",
            "StoreError",
            r"GET http://127\.0\.0\.1:9/.*repeated \d+ times(.|\n)*\ncheck the network and the endpoint",
        ),
        # obstore panics on these settings.
        ({"AWS_SESSION_TOKEN": f"{SECRET}\n"}, f"{BUCKET}/c", "StoreError", "obstore has failed\ncheck the credential"),
        ({"AWS_ENDPOINT_URL": f"http://user:{SECRET}@@:xx/"}, "s3://b/c", "StoreError", "failed\n.* and the endpoint"),
        # It refuses these, and quotes them.
        ({"GOOGLE_SERVICE_ACCOUNT_KEY": f'"{SECRET}"'}, "gs://bucket/c", "StoreError", GOOGLE),
        ({"GOOGLE_APPLICATION_CREDENTIALS": f'{{"private_key": "{SECRET}"}}'}, "gs://bucket/c", "StoreError", GOOGLE),
    ],
)
def test_wrong_settings_are_named_without_their_secrets(
    bucket: Proxy, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], url: str, error: str, message: str
) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    # No connection of another test is used.
    for name, value in {**environment, "TENSORKEEP_STORE_TIMEOUT": "17.5"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(getattr(tensorkeep, error), match=message) as caught:
        tensorkeep.load(url)
    assert SECRET not in str(caught.value)


class WeakServer(BaseHTTPRequestHandler):
    """A web server with one file, whose tag is weak."""

    content = b"first"

    def do_GET(self) -> None:
        self.send_response(412 if "If-Match" in self.headers else 206)
        self.send_header("ETag", f'W/"{self.content.decode()}"')
        self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
        self.send_header("Content-Range", f"bytes 0-{len(self.content) - 1}/{len(self.content)}")
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.content)

    def do_HEAD(self) -> None:
        self.do_GET()


def test_a_weak_tag_is_compared_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(WeakServer) as url:
        path = StorePath(f"{url}/file")
        tag = store_requests.head(path).tag
        assert bytes(store_requests.get(path, 0, 5, tag=tag)) == b"first"
        monkeypatch.setattr(WeakServer, "content", b"other")
        with pytest.raises(tensorkeep.StoreError, match="was replaced while it was read"):
            store_requests.get(path, 0, 5, tag=tag)


def test_first_bytes_are_read_by_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: StorePath, stop: int | None = None) -> tuple[bytes, Any]:
        return b"0123456789", store_requests.ObjectStatus(path.key, 10, None, "tag")  # type: ignore[arg-type]

    def work(thread: int) -> None:
        for number in range(300):
            object_store.first_bytes(StorePath(f"s3://b/{thread}-{number}"), 5)

    monkeypatch.setattr(store_requests, "read", read)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(16) as threads:
            assert list(threads.map(work, range(16))) == [None] * 16
    finally:
        sys.setswitchinterval(interval)
    assert len(object_store._first) <= 8 + 16


def test_paths_of_stores() -> None:
    path = as_path("s3://bucket/a/b")
    assert isinstance(path, StorePath)
    found = [str(path.parent), str(path / "c"), path.name, os.fspath(path)]
    assert found == ["s3://bucket/a", "s3://bucket/a/b/c", "b", "s3://bucket/a/b"]
    assert as_path(Path("s3://bucket/a")) == StorePath("s3://bucket/a")
    assert not isinstance(as_path("./s3://bucket/a"), StorePath)
