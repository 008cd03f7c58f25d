"""Checkpoints are read from object stores as they are from disks, and failures end in time with a clear error."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from store_servers import Fault, Proxy, make_bucket, proxy_for, s3_server
from tensorkeep.cli.main import main
from tensorkeep.io import stores
from tensorkeep.paths import StorePath, as_path
from tensorkeep.testing.equality import same

obstore = pytest.importorskip("obstore")

SECRET = "do-not-print-this"
BUCKET = "s3://bucket-one"


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((300, 1000), value), "b": torch.arange(10)}, "step": int(value), "x": np.ones(3)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with s3_server(tmp_path_factory.mktemp("server")) as url, proxy_for(url) as proxy:
        make_bucket(url, "bucket-one")
        yield proxy


@pytest.fixture
def bucket(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    server.start_again(None)
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "TENSORKEEP_STORE_TIMEOUT": "20",
    }.items():
        monkeypatch.setenv(name, value)
    return server


def upload(folder: Path, prefix: str) -> None:
    """Copy a folder, or a file, below a prefix of the bucket."""
    store = stores._store_of(StorePath(BUCKET))
    for file in [folder] if folder.is_file() else folder.rglob("*"):
        if file.is_file():
            name = "" if file == folder else f"/{file.relative_to(folder)}"
            obstore.put(store, f"{prefix}{name}", file)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    with tensorkeep.CheckpointManager(root, incremental=True) as manager:
        for number in (1, 2):
            manager.save(number, state(number), metrics={"loss": 3.0 - number}).wait()
    return root


@pytest.mark.parametrize("compression", ["none", "lossless"])
@pytest.mark.parametrize("name", ["native", "file.safetensors"])
def test_a_checkpoint_is_read_as_from_a_disk(tmp_path: Path, bucket: Proxy, name: str, compression: str) -> None:
    plain: dict[str, Any] = {"force": True} if name != "native" else {}
    tensorkeep.save(state(5), tmp_path / name, compression=compression, **plain)
    upload(tmp_path / name, f"one/{compression}/{name}")
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


def test_a_slice_moves_its_block_only(tmp_path: Path, bucket: Proxy) -> None:
    large = torch.arange(16 * 2**20, dtype=torch.float32)
    tensorkeep.save({"w": large}, tmp_path / "c")
    upload(tmp_path / "c", "large")
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


def test_addresses_of_runs(bucket: Proxy, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upload(run, "run")
    url = f"{BUCKET}/run"
    assert same(tensorkeep.load(url), state(2))
    assert same(tensorkeep.load(f"{url}@1"), state(1))
    assert same(tensorkeep.load(f"{url}@best:loss"), state(2))
    assert not tensorkeep.diff(f"{url}@1", f"{url}@2")
    with pytest.raises(tensorkeep.NotFoundError, match="has no step 3\nthe nearest steps are 1, 2"):
        tensorkeep.load(f"{url}@3")
    for command in ("info", "ls", "verify", "log"):
        assert main([command, url]) == 0, command
    assert "loss" in capsys.readouterr().out


def test_a_web_server_is_read_without_listing(tmp_path: Path, bucket: Proxy) -> None:
    tensorkeep.save(state(4), tmp_path / "c")
    tensorkeep.save(state(4), tmp_path / "f.safetensors")
    upload(tmp_path, "web")
    assert same(tensorkeep.load(f"{bucket.url}/bucket-one/web/c"), state(4))
    assert same(tensorkeep.load(f"{bucket.url}/bucket-one/web/f.safetensors"), state(4))
    with pytest.raises(tensorkeep.NotFoundError, match="does not exist"):
        tensorkeep.load(f"{bucket.url}/bucket-one/web/d")


def damaged(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [(damaged, "its checksum is"), (lambda content: content[:-4], "was cut short"), (None, "is missing")],
    ids=["a flipped bit", "cut short", "missing"],
)
def test_damage_is_named(tmp_path: Path, bucket: Proxy, change: Any, message: str) -> None:
    tensorkeep.save(state(6), tmp_path / "c")
    upload(tmp_path / "c", "damaged")
    store = stores._store_of(StorePath(BUCKET))
    if change is None:
        obstore.delete(store, "damaged/model.safetensors")
    else:
        content = (tmp_path / "c" / "model.safetensors").read_bytes()
        obstore.put(store, "damaged/model.safetensors", change(content))
    with pytest.raises(tensorkeep.CorruptCheckpointError, match=message) as caught:
        tensorkeep.load(f"{BUCKET}/damaged")
    assert str(caught.value).startswith(f"{BUCKET}/damaged/model.safetensors")


def test_a_replacement_while_it_is_read_is_noticed(tmp_path: Path, bucket: Proxy) -> None:
    for number in (1, 2):
        tensorkeep.save(state(number), tmp_path / f"{number}.safetensors")
    upload(tmp_path / "1.safetensors", "changing.safetensors")
    with tensorkeep.open(f"{BUCKET}/changing.safetensors") as opened:
        upload(tmp_path / "2.safetensors", "changing.safetensors")
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


@pytest.mark.parametrize("action", [each for each in ACTIONS if each != "short"])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_any_request_may_fail_once(tmp_path: Path, bucket: Proxy, action: str, every: bool) -> None:
    url = f"{BUCKET}/once-{action}"
    tensorkeep.save(state(3), tmp_path / "c", compression="lossless")
    upload(tmp_path / "c", f"once-{action}")
    for number in sampled(requests_of_a_load(bucket, url), action, every=every):
        bucket.start_again(Fault(action, lambda each, number=number: each == number))  # type: ignore[misc]
        try:
            assert same(tensorkeep.load(url), state(3))
        except tensorkeep.StoreError as error:
            # The only requests that obstore does not repeat when the answer breaks off.
            assert action == "truncated" and "cannot list it" in str(error)


@pytest.mark.parametrize("action", [each for each in ACTIONS if each != "slow"])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_fails_for_ever_ends_in_time(
    tmp_path: Path, bucket: Proxy, action: str, every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{BUCKET}/ever-{action}"
    tensorkeep.save(state(3), tmp_path / "c")
    upload(tmp_path / "c", f"ever-{action}")
    count = requests_of_a_load(bucket, url)
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "0.5")
    for number in sampled(count, action, every=every):
        bucket.start_again(Fault(action, lambda each, number=number: each >= number))  # type: ignore[misc]
        begun = time.monotonic()
        with pytest.raises(tensorkeep.TensorkeepError) as caught:
            tensorkeep.load(url)
        assert BUCKET in str(caught.value)
        assert SECRET not in str(caught.value)
        assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("s3://no-such-bucket/c", tensorkeep.StoreError, "The specified bucket does not exist"),
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


def test_torch_files_and_mapping_are_refused(tmp_path: Path, bucket: Proxy) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    tensorkeep.save(state(1), tmp_path / "c")
    upload(tmp_path, "refused")
    with pytest.raises(tensorkeep.UnsupportedError, match=r"torch\.save are not read from object stores"):
        tensorkeep.load(f"{BUCKET}/refused/x.pt")
    with pytest.raises(tensorkeep.UnsupportedError, match="not possible in an object store"):
        tensorkeep.load(f"{BUCKET}/refused/c", mmap=True)


def test_an_unreachable_endpoint_ends_in_time(monkeypatch: pytest.MonkeyPatch, bucket: Proxy) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "0.5")
    with pytest.raises(tensorkeep.StoreError, match=r"retry_timeout: 500ms.*\ncheck the network and the endpoint"):
        tensorkeep.load(f"{BUCKET}/c")


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
