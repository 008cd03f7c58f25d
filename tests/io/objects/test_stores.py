"""Checkpoints are read from object stores as they are from disks, and failures end in time with a clear error."""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from store_servers import SECRET, Fault, Proxy, give_up_after, on_every_server, upload
from tensorkeep.cli.main import main
from tensorkeep.io import parallel
from tensorkeep.io.objects import store_commit, store_directory, stores
from tensorkeep.paths import StorePath, as_path
from tensorkeep.testing.equality import same

obstore = pytest.importorskip("obstore")

BUCKET = "s3://bucket-one"


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((300, 1000), value), "b": torch.arange(10)}, "step": int(value), "x": np.ones(3)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    with tensorkeep.CheckpointManager(root, incremental=True) as manager:
        for number in (1, 2):
            manager.save(number, state(number), metrics={"loss": 3.0 - number}).wait()
    return root


@on_every_server
@pytest.mark.parametrize("compression", ["none", "lossless"])
@pytest.mark.parametrize("name", ["native", "file.safetensors"])
def test_a_checkpoint_is_read_as_from_a_disk(tmp_path: Path, bucket: Proxy, name: str, compression: str) -> None:
    plain: dict[str, Any] = {"force": True} if name != "native" else {}
    tensorkeep.save(state(5), tmp_path / name, compression=compression, **plain)
    upload(tmp_path / name, f"{BUCKET}/one/{compression}/{name}")
    url = f"{BUCKET}/one/{compression}/{name}"
    assert same(tensorkeep.load(url), state(5))
    into = state(0)
    tensorkeep.load(url, into=into)
    assert same(into["model"], state(5)["model"])
    assert tensorkeep.verify(url)
    with tensorkeep.open(url) as opened:
        assert torch.equal(opened["model.w"][7:9, 1:3], torch.full((2, 2), 5.0))
    assert tensorkeep.info(url).entries == tensorkeep.info(tmp_path / name).entries
    assert tensorkeep.diff(url, tmp_path / name)
    tensorkeep.convert(url, tmp_path / "again.safetensors", compression="none")
    assert same(tensorkeep.load(tmp_path / "again.safetensors"), state(5))


@on_every_server
def test_a_slice_moves_its_block_only(tmp_path: Path, bucket: Proxy) -> None:
    large = torch.arange(16 * 2**20, dtype=torch.float32)
    tensorkeep.save({"w": large}, tmp_path / "c")
    upload(tmp_path / "c", f"{BUCKET}/large")
    got: list[int] = []
    real = stores.get

    def counted(*arguments: Any, **named: Any) -> memoryview:
        found = real(*arguments, **named)
        got.append(len(found))
        return found

    with pytest.MonkeyPatch.context() as patches, tensorkeep.open(f"{BUCKET}/large") as opened:
        patches.setattr(stores, "get", counted)
        assert torch.equal(opened["w"][1000:1010], large[1000:1010])
    assert sum(got) <= 1.2 * 16 * 1024**2


@pytest.mark.parametrize(("budget", "count"), [("256MiB", 7), ("1GiB", 8)])
def test_few_processors_do_not_limit_the_requests_at_a_time(
    bucket: Proxy, monkeypatch: pytest.MonkeyPatch, budget: str, count: int
) -> None:
    monkeypatch.setattr(parallel, "usable_processors", lambda: [0])
    tensorkeep.save({"w": torch.zeros(2**20, 5)}, f"{BUCKET}/threads-{count}")
    used: list[int] = []
    real = parallel.run

    def run(tasks: Any, threads: int, *arguments: Any) -> None:
        used.append(threads)
        real(tasks, threads, *arguments)

    monkeypatch.setattr(parallel, "run", run)
    tensorkeep.load(f"{BUCKET}/threads-{count}", memory_budget=budget)
    assert used == [count]
    tensorkeep.load(f"{BUCKET}/threads-{count}", memory_budget=budget, threads=3)
    assert used[1:] == [3]


@pytest.mark.parametrize("name", ["native", "file.safetensors"])
@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_neighbours_are_read_by_one_request(tmp_path: Path, bucket: Proxy, name: str, compression: str) -> None:
    many = {f"w{number}": torch.full((50 + number,), float(number)) for number in range(200)}
    plain: dict[str, Any] = {"force": True} if name != "native" else {}
    tensorkeep.save(many, tmp_path / name, compression=compression, **plain)
    upload(tmp_path / name, f"{BUCKET}/many/{compression}/{name}")
    url = f"{BUCKET}/many/{compression}/{name}"
    with tensorkeep.open(url) as opened:
        bucket.start_again(None)
        assert torch.equal(opened["w7"].load(), many["w7"])
        assert len(bucket.requests) == 1
    bucket.start_again(None)
    assert same(tensorkeep.load(url), many)
    assert len(bucket.requests) < 20
    assert tensorkeep.verify(url)


def test_a_slice_of_a_block_is_one_request(bucket: Proxy) -> None:
    tensorkeep.save({"w": torch.arange(2**20)}, f"{BUCKET}/one-block")
    with tensorkeep.open(f"{BUCKET}/one-block") as opened:
        bucket.start_again(None)
        assert torch.equal(opened["w"][1000:1010], torch.arange(1000, 1010))
    assert len(bucket.requests) == 1


@on_every_server
def test_addresses_of_runs(
    bucket: Proxy, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(run, f"{BUCKET}/run")
    url = f"{BUCKET}/run"
    assert same(tensorkeep.load(url), state(2))
    assert same(tensorkeep.load(f"{url}@1"), state(1))
    assert same(tensorkeep.load(f"{url}@best:loss"), state(2))
    assert not tensorkeep.diff(f"{url}@1", f"{url}@2")
    with pytest.raises(tensorkeep.NotFoundError, match="has no step 3\nthe nearest steps are 1, 2"):
        tensorkeep.load(f"{url}@3")
    monkeypatch.chdir(tmp_path)
    for command in ("info", "ls", "verify", "log", "show"):
        assert main([command, url]) == 0, command
    assert main(["show", f"{url}@1", f"{url}@2"]) == 0
    assert {path.name for path in tmp_path.glob("*.html")} == {"run.html", "run-1-and-run-2.html"}
    assert "loss" in capsys.readouterr().out


def test_a_web_server_is_read_without_listing(tmp_path: Path, bucket: Proxy) -> None:
    tensorkeep.save(state(4), tmp_path / "c")
    tensorkeep.save(state(4), tmp_path / "f.safetensors")
    upload(tmp_path, f"{BUCKET}/web")
    assert same(tensorkeep.load(f"{bucket.url}/bucket-one/web/c"), state(4))
    assert same(tensorkeep.load(f"{bucket.url}/bucket-one/web/f.safetensors"), state(4))
    with pytest.raises(tensorkeep.NotFoundError, match="does not exist"):
        tensorkeep.load(f"{bucket.url}/bucket-one/web/d")


def damaged(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@on_every_server
@pytest.mark.parametrize(
    ("change", "message"),
    [(damaged, "its checksum is"), (lambda content: content[:-4], "was cut short"), (None, "is missing")],
    ids=["a flipped bit", "cut short", "missing"],
)
def test_damage_is_named(tmp_path: Path, bucket: Proxy, change: Any, message: str) -> None:
    tensorkeep.save(state(6), tmp_path / "c")
    upload(tmp_path / "c", f"{BUCKET}/damaged")
    store = stores._store_of(StorePath(BUCKET))
    if change is None:
        obstore.delete(store, "damaged/model.safetensors")
    else:
        content = (tmp_path / "c" / "model.safetensors").read_bytes()
        obstore.put(store, "damaged/model.safetensors", change(content))
    with pytest.raises(tensorkeep.CorruptCheckpointError, match=message) as caught:
        tensorkeep.load(f"{BUCKET}/damaged")
    assert str(caught.value).startswith(f"{BUCKET}/damaged/model.safetensors")


@on_every_server
def test_a_replacement_while_it_is_read_is_noticed(tmp_path: Path, bucket: Proxy) -> None:
    for number in (1, 2):
        tensorkeep.save(state(number), tmp_path / f"{number}.safetensors")
    upload(tmp_path / "1.safetensors", f"{BUCKET}/changing.safetensors")
    with tensorkeep.open(f"{BUCKET}/changing.safetensors") as opened:
        upload(tmp_path / "2.safetensors", f"{BUCKET}/changing.safetensors")
        with pytest.raises(tensorkeep.StoreError, match="was replaced while it was read"):
            opened["model.w"].load()


ACTIONS = ["500", "503", "reset", "lost", "truncated", "short", "slow"]


def requests_of_a_load(bucket: Proxy, url: str) -> int:
    bucket.start_again(None)
    assert same(tensorkeep.load(url), state(3))
    return len(bucket.requests)


def sampled(count: int, action: str, *, every: bool) -> list[int]:
    """Return numbers of requests: all, or one for each action, another one each."""
    return list(range(count)) if every else [ACTIONS.index(action) % count]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_any_request_may_fail_once(tmp_path: Path, bucket: Proxy, action: str, every: bool) -> None:
    url = f"{BUCKET}/once-{action}"
    tensorkeep.save(state(3), tmp_path / "c", compression="lossless")
    upload(tmp_path / "c", f"{BUCKET}/once-{action}")
    for number in sampled(requests_of_a_load(bucket, url), action, every=every):
        bucket.start_again(Fault(action, lambda each, number=number: each == number))  # type: ignore[misc]
        assert same(tensorkeep.load(url), state(3))


@pytest.mark.parametrize("action", [each for each in ACTIONS if each != "slow"])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_fails_for_ever_ends_in_time(
    tmp_path: Path, bucket: Proxy, action: str, every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{BUCKET}/ever-{action}"
    tensorkeep.save(state(3), tmp_path / "c")
    upload(tmp_path / "c", f"{BUCKET}/ever-{action}")
    count = requests_of_a_load(bucket, url)
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "0.5")
    for number in sampled(count, action, every=every):
        bucket.start_again(Fault(action, lambda each, number=number: each >= number))  # type: ignore[misc]
        begun = time.monotonic()
        # Never NotACheckpointError or CorruptCheckpointError, after which other steps are used or deleted.
        with pytest.raises(tensorkeep.StoreError) as caught:
            tensorkeep.load(url)
        assert BUCKET in str(caught.value)
        assert SECRET not in str(caught.value)
        assert time.monotonic() - begun < 10


def test_an_answer_that_stays_too_short_is_named(bucket: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    path = StorePath(f"{BUCKET}/short")
    stores.put(path, b"0123456789")
    for call in (lambda: stores.get(path, 2, 7), lambda: stores.get(path, 2), lambda: stores.read(path)):
        bucket.start_again(Fault("short", lambda number: number == 0))
        give_up_after(monkeypatch, 20)
        call()
        assert len(bucket.requests) == 2
        bucket.start_again(Fault("short", lambda number: True))
        give_up_after(monkeypatch, 0.3)
        with pytest.raises(tensorkeep.StoreError, match=r"cannot read it: the answer was cut short: \d+ of \d+ bytes"):
            call()


@pytest.mark.parametrize("action", ["short", "reset"])
def test_the_error_has_the_number_of_all_repetitions(
    bucket: Proxy, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    path = StorePath(f"{BUCKET}/counted")
    stores.put(path, b"0123456789")
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "2.5")
    bucket.start_again(Fault(action, lambda number: True))
    with pytest.raises(tensorkeep.StoreError) as caught:
        stores.read(path)
    found = re.search(r"\(repeated (\d+) times in \d+\.\ds\)\n", str(caught.value))
    assert found is not None, caught.value
    assert int(found[1]) == len(bucket.requests) - 1
    assert "max_retries" not in str(caught.value)


def test_ranges_that_end_after_the_object_are_no_short_answers(bucket: Proxy) -> None:
    path = StorePath(f"{BUCKET}/ten")
    stores.put(path, b"0123456789")
    bucket.start_again(None)
    assert bytes(stores.get(path, 7, 99)) == b"789"
    assert stores.read(path, 99)[0] == b"0123456789"
    assert len(bucket.requests) == 2


@pytest.mark.parametrize("content", [b"", b"x"])
def test_an_object_that_is_no_manifest(bucket: Proxy, content: bytes) -> None:
    stores.put(StorePath(f"{BUCKET}/foreign-{len(content)}/manifest.json"), content)
    with pytest.raises(tensorkeep.NotACheckpointError):
        tensorkeep.load(f"{BUCKET}/foreign-{len(content)}")
    with pytest.raises(tensorkeep.DestinationExistsError, match="is not a checkpoint of this format"):
        tensorkeep.save(state(1), f"{BUCKET}/foreign-{len(content)}", overwrite=True)


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
        stores.put(path, b"x")
    monkeypatch.setattr(obstore, "delete", delete)
    stores.delete(paths)
    assert len(lost) == 3
    assert not stores.objects(paths[0].parent)


def test_a_server_without_conditional_requests_is_refused(bucket: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_commit, "_refusing", set())
    bucket.start_again(Fault("unconditional", lambda number: True))
    with pytest.raises(tensorkeep.UnsupportedError, match=r"although asked not to \(If-None-Match\).*\nuse a server"):
        tensorkeep.save(state(1), f"{BUCKET}/unconditional")
    assert not stores.objects(StorePath(f"{BUCKET}/unconditional"))


def test_whether_a_server_refuses_is_asked_once(bucket: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_commit, "_refusing", set())
    counts = []
    for number in range(3):
        bucket.start_again(None)
        tensorkeep.save(state(1), f"{BUCKET}/asked-{number}")
        counts.append(len(bucket.requests))
    assert counts[0] - 1 == counts[1] == counts[2]


def test_a_server_without_tags_is_refused(bucket: Proxy) -> None:
    bucket.start_again(Fault("untagged", lambda number: True))
    with pytest.raises(tensorkeep.UnsupportedError, match=r"the server gives objects no ETag.*\nuse a server"):
        tensorkeep.save(state(1), f"{BUCKET}/untagged")
    bucket.start_again(None)
    assert not stores.objects(StorePath(f"{BUCKET}/untagged"))


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("s3://no-such-bucket/c", tensorkeep.NotFoundError, "its bucket does not exist"),
        ("s3://", tensorkeep.UsageError, "no bucket"),
        ("https://user:pass@host.example/c", tensorkeep.UsageError, "has a query, a fragment or a user"),
        ("https://host.example/c?signature=x", tensorkeep.UsageError, "has a query"),
        ("ftp://host/c", tensorkeep.UnsupportedError, "ftp:// is not supported"),
    ],
)
def test_wrong_urls(bucket: Proxy, url: str, error: type[tensorkeep.TensorkeepError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        tensorkeep.load(url)
    assert "pass" not in str(caught.value) and "signature" not in str(caught.value)


def test_mapping_is_refused(tmp_path: Path, bucket: Proxy) -> None:
    tensorkeep.save(state(1), tmp_path / "c")
    upload(tmp_path, f"{BUCKET}/refused")
    with pytest.raises(tensorkeep.UnsupportedError, match="not possible in an object store"):
        tensorkeep.load(f"{BUCKET}/refused/c", mmap=True)


def test_an_unreachable_endpoint_ends_in_time(monkeypatch: pytest.MonkeyPatch, bucket: Proxy) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "0.5")
    with pytest.raises(tensorkeep.StoreError, match=r"\(repeated \d+ times.*\ncheck the network and the endpoint"):
        tensorkeep.load(f"{BUCKET}/c")


def test_the_remedy_is_that_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(
        tensorkeep.StoreError, match=r"Account must be specified\ncheck .* \(AZURE_STORAGE_ACCOUNT_NAME"
    ):
        tensorkeep.load("az://container/c")


@pytest.mark.parametrize(
    ("name", "value"), [("AWS_SESSION_TOKEN", f"{SECRET}\n"), ("AWS_ENDPOINT_URL", f"http://user:{SECRET}@@:xx/")]
)
def test_settings_on_which_obstore_panics(
    bucket: Proxy, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "17.5")  # so that no connection of another test is used
    monkeypatch.setenv(name, value)
    with pytest.raises(
        tensorkeep.StoreError, match="obstore has failed\ncheck the credentials and the endpoint"
    ) as caught:
        tensorkeep.load(f"{BUCKET}/c")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GOOGLE_SERVICE_ACCOUNT_KEY", f'"{SECRET}"'),
        ("GOOGLE_APPLICATION_CREDENTIALS", f'{{"private_key": "{SECRET}"}}'),
    ],
)
def test_settings_that_are_refused_are_not_printed(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(tensorkeep.StoreError, match="service account file\ncheck the credentials") as caught:
        tensorkeep.load("gs://bucket/c")
    assert SECRET not in str(caught.value)


def test_the_user_of_an_endpoint_is_not_printed(bucket: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_commit, "_refusing", set())
    bucket.start_again(Fault("unconditional", lambda number: True))
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.url.replace("//", f"//user:{SECRET}@"))
    with pytest.raises(tensorkeep.UnsupportedError, match=r"at http://127\.0\.0\.1:") as refused:
        tensorkeep.save(state(1), f"{BUCKET}/with-user")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:{SECRET}@127.0.0.1:9")
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "0.5")
    with pytest.raises(tensorkeep.StoreError, match=r"GET http://127\.0\.0\.1:9/") as unreachable:
        tensorkeep.load(f"{BUCKET}/c")
    assert SECRET not in f"{refused.value}{unreachable.value}"


class WeakServer(BaseHTTPRequestHandler):
    """A web server with one file, whose tag is weak."""

    content = b"first"

    def do_GET(self) -> None:
        tag = f'W/"{self.content.decode()}"'
        refused = "If-Match" in self.headers
        self.send_response(412 if refused else 206)
        self.send_header("ETag", tag)
        self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
        self.send_header("Content-Range", f"bytes 0-{len(self.content) - 1}/{len(self.content)}")
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.content)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def weak_file() -> Iterator[StorePath]:
    with ThreadingHTTPServer(("127.0.0.1", 0), WeakServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield StorePath(f"http://127.0.0.1:{server.server_address[1]}/file")
        server.shutdown()


def test_a_weak_tag_is_compared_here(weak_file: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    tag = stores.head(weak_file).tag
    assert bytes(stores.get(weak_file, 0, 5, tag=tag)) == b"first"
    monkeypatch.setattr(WeakServer, "content", b"other")
    with pytest.raises(tensorkeep.StoreError, match="was replaced while it was read"):
        stores.get(weak_file, 0, 5, tag=tag)


def test_first_bytes_are_read_by_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[BaseException] = []

    def read(path: StorePath, stop: int | None = None) -> tuple[bytes, Any]:
        return b"0123456789", stores.ObjectStatus(path.key, 10, None, "tag")  # type: ignore[arg-type]

    def work(thread: int) -> None:
        try:
            for number in range(1000):
                store_directory.first_bytes(StorePath(f"s3://b/{thread}-{number}"), 5)
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(stores, "read", read)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert len(store_directory._first) <= 8 + 16


def test_a_forked_child_is_refused(bucket: Proxy) -> None:
    stores._store_of(StorePath(BUCKET))
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            tensorkeep.load(f"{BUCKET}/c")
        except tensorkeep.TensorkeepError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        assert "was forked from one that has used an object store" in answer.read()


def test_paths_of_stores() -> None:
    path = as_path("s3://bucket/a/b")
    assert isinstance(path, StorePath)
    assert [str(path.parent), str(path / "c"), path.name, os.fspath(path)] == [
        "s3://bucket/a",
        "s3://bucket/a/b/c",
        "b",
        "s3://bucket/a/b",
    ]
    assert as_path(Path("s3://bucket/a")) == StorePath("s3://bucket/a")
    assert not isinstance(as_path("./s3://bucket/a"), StorePath)
