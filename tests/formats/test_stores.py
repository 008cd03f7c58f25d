"""Every format is read from object stores and web servers as from a disk, by requests for what is used."""

import math
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import torch.distributed.checkpoint as dcp

import tensorkeep
import tensorkeep.torch
from formats.dcp.checkpoints import grid, trained, write_chunks
from formats.dcp.checkpoints import real_save as dcp_save
from formats.tensorstore.array_files import foreign_group, write_array
from store_servers import SECRET, Fault, FaultAt, Proxy, upload
from tensorkeep.cli.main import main
from tensorkeep.distributed import DcpReader
from tensorkeep.formats.tensorstore.in_store import kvstore_spec, retries
from tensorkeep.io.objects import stores
from tensorkeep.paths import StorePath
from tensorkeep.safetensors.torch import load_file
from tensorkeep.testing.equality import same

obstore = pytest.importorskip("obstore")

BUCKET = "s3://formats"


def web(bucket: Proxy, url: str) -> str:
    """Return the URL of a web server for that of an object."""
    return f"{bucket.url}/{url.removeprefix('s3://')}"


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each of our requests for content."""
    counts: list[int] = []
    real = stores.get

    def counted(*arguments: Any, **named: Any) -> memoryview:
        found = real(*arguments, **named)
        counts.append(len(found))
        return found

    monkeypatch.setattr(stores, "get", counted)
    return counts


def state() -> dict[str, Any]:
    w = torch.arange(300_000, dtype=torch.float32).reshape(300, 1000)
    return {"model": {"w": w, "half": w.half() / 7, "b": torch.arange(10)}, "step": 5}


FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": ("torch", {}),
    "dcp": ("dcp", {"thread_count": 2}),
    "zarr 3": ("tensorstore", {"chunk": "256KiB"}),
    "zarr 2": ("tensorstore", {"zarr": 2, "compressor": "zstd:1"}),
    "shards": ("tensorstore", {"chunk": "64KiB", "shard_bytes": "256KiB"}),
    "database": ("tensorstore", {"kvstore": "ocdbt"}),
    "t5x": ("t5x", {"dtype": "keep"}),
}
every_format = pytest.mark.parametrize("case", FORMATS)


def saved(case: str, folder: Path) -> Path:
    format, options = FORMATS[case]
    name = "x.pt" if format == "torch" else "c"
    tensorkeep.save(state(), folder / name, format=format, **options)
    return folder / name


@every_format
def test_a_checkpoint_is_read_as_from_a_disk(
    case: str, tmp_path: Path, bucket: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(case, tmp_path)
    url = upload(path, f"{BUCKET}/disk/{case.replace(' ', '-')}/{path.name}")
    calls: list[tuple[int, int]] = []
    assert same(tensorkeep.load(url, progress=lambda *counts: calls.append(counts)), tensorkeep.load(path))
    assert calls[-1][0] == calls[-1][1] == tensorkeep.info(path).total.nbytes
    into = state()
    into["model"]["w"].zero_()
    tensorkeep.load(url, into=into)
    assert torch.equal(into["model"]["w"], state()["model"]["w"])
    report = tensorkeep.verify(url)
    assert report.ok and report.checked == tensorkeep.verify(path).checked
    with tensorkeep.open(url) as opened:
        assert torch.equal(opened["model.w"][7:9, 1:3], state()["model"]["w"][7:9, 1:3])
    assert tensorkeep.info(url).entries == tensorkeep.info(path).entries
    assert tensorkeep.diff(url, path)
    tensorkeep.convert(url, tmp_path / "native")
    assert same(tensorkeep.load(tmp_path / "native"), tensorkeep.load(path))
    for command in ("info", "ls", "verify"):
        assert main([command, url]) == 0, command
    assert "model.half" in capsys.readouterr().out


@every_format
def test_a_web_server_is_read_without_listing(case: str, tmp_path: Path, bucket: Proxy) -> None:
    path = saved(case, tmp_path)
    url = web(bucket, upload(path, f"{BUCKET}/web/{case.replace(' ', '-')}/{path.name}"))
    assert same(tensorkeep.load(url), tensorkeep.load(path))


@pytest.fixture
def plain_server(tmp_path: Path) -> Iterator[str]:
    """The URL of a web server that shows folders as pages, and does not know ranges."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_web_server_without_ranges(tmp_path: Path, bucket: Proxy, plain_server: str) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    with pytest.raises(tensorkeep.UnsupportedError, match="does not answer requests for a part of a file"):
        tensorkeep.load(f"{plain_server}/x.pt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(tensorkeep.NotACheckpointError, match="is not a checkpoint of any known format"):
        tensorkeep.load(f"{plain_server}/folder")


def test_a_bucket_is_not_a_checkpoint(bucket: Proxy) -> None:
    obstore.put(stores._store_of(StorePath(BUCKET)), "some", b"thing")
    with pytest.raises(tensorkeep.NotACheckpointError):
        tensorkeep.info(BUCKET)


def test_torch_files_of_others(tmp_path: Path, bucket: Proxy) -> None:
    base = torch.arange(60.0)
    content = {
        "rows": base[:30].reshape(5, 6),
        "shared": base[10:20],
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "expanded": torch.ones(1, 4).expand(3, 4),
        "nothing": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "tiny": [torch.tensor(number) for number in range(50)],
        "text": {"a": (1, None, "b")},
    }
    torch.save(content, tmp_path / "x.pt")
    url = upload(tmp_path / "x.pt", f"{BUCKET}/others/x.pt")
    assert same(tensorkeep.load(url), tensorkeep.load(tmp_path / "x.pt"))
    assert same(tensorkeep.load(url), torch.load(tmp_path / "x.pt"))
    torch.save({"plain": 1}, tmp_path / "plain.pt")
    assert tensorkeep.load(upload(tmp_path / "plain.pt", f"{BUCKET}/others/plain.pt")) == {"plain": 1}
    # A zip file whose first record is another one.
    torch.save([torch.ones(3)], tmp_path / "y.pt")
    assert tensorkeep.info(upload(tmp_path / "y.pt", f"{BUCKET}/others/y")).format == "torch"


def test_code_in_a_torch_file_is_not_run(tmp_path: Path, bucket: Proxy) -> None:
    torch.save({"path": Path("x")}, tmp_path / "x.pt")
    with pytest.raises(tensorkeep.UnsupportedError, match="its pickle calls pathlib"):
        tensorkeep.load(upload(tmp_path / "x.pt", f"{BUCKET}/code/x.pt"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_of_others(tmp_path: Path, bucket: Proxy) -> None:
    dcp_save(trained(), tmp_path / "plain")
    url = upload(tmp_path / "plain", f"{BUCKET}/dcp/plain")
    assert same(tensorkeep.load(url), tensorkeep.load(tmp_path / "plain"))
    tensors = {"w": torch.arange(77.0).reshape(7, 11), "v": torch.arange(6.0).reshape(2, 3)}
    write_chunks(tmp_path / "cut", tensors, cut=grid)
    url = upload(tmp_path / "cut", f"{BUCKET}/dcp/cut")
    assert same(tensorkeep.load(url), tensors)
    assert tensorkeep.verify(url)


def test_arrays_of_others(tmp_path: Path, bucket: Proxy) -> None:
    group = foreign_group(tmp_path / "group")
    url = upload(group, f"{BUCKET}/arrays/group")
    assert same(tensorkeep.load(url), tensorkeep.load(group))
    assert tensorkeep.info(url).entries == tensorkeep.info(group).entries
    assert list(tensorkeep.load(web(bucket, f"{url}/w"))) == ["w"]
    with pytest.raises(tensorkeep.UnsupportedError, match="which a web server does not list"):
        tensorkeep.load(web(bucket, url))
    # Without the metadata of a group.
    for name in ("a", "b"):
        write_array(tmp_path / "loose" / name, np.arange(3.0), "zarr")
    url = upload(tmp_path / "loose", f"{BUCKET}/arrays/loose")
    assert list(tensorkeep.load(url)) == ["a", "b"]
    write_array(Path("a/b"), np.arange(5), base=str(tmp_path / "db"))
    assert tensorkeep.load(upload(tmp_path / "db", f"{BUCKET}/arrays/db"))["a.b"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_only_what_is_used_is_moved(format: str, tmp_path: Path, bucket: Proxy, moved: list[int]) -> None:
    content = {f"t{number}": torch.full((512, 1024), float(number)) for number in range(8)}
    path = tmp_path / "x.pt"
    tensorkeep.save(content, path, format=format)
    size = sum(leaf.nbytes for leaf in content.values())
    url = upload(path, f"{BUCKET}/moved/{format}")
    moved.clear()
    assert len(tensorkeep.info(url).entries) == 8
    assert sum(moved) < 0.2 * size
    moved.clear()
    with tensorkeep.open(url) as opened:
        before = sum(moved)
        assert opened["t3"][100].unique().tolist() == [3.0]
        # Its checksum is that of the full tensor.
        assert sum(moved) - before < 1.2 * size / 8
        assert opened["t3"][200].unique().tolist() == [3.0]
        assert sum(moved) - before < 1.2 * size / 8
    moved.clear()
    assert same(tensorkeep.load(url), content)
    assert sum(moved) < 1.2 * size


def test_a_slice_without_its_checksum_moves_the_slice(tmp_path: Path, bucket: Proxy, moved: list[int]) -> None:
    content = torch.arange(2**20, dtype=torch.float32).reshape(1024, 1024)
    torch.save({"w": content}, tmp_path / "x.pt")
    with tensorkeep.open(upload(tmp_path / "x.pt", f"{BUCKET}/moved/slice.pt"), verify=False) as opened:
        moved.clear()
        assert torch.equal(opened["w"][10:20], content[10:20])
    assert sum(moved) <= 10 * 4096 + 2 * 16 * 1024


@pytest.mark.parametrize(
    ("case", "message"), [("torch", "CRC-32"), ("dcp", "CRC-32"), ("zarr 3", "TensorStore cannot")]
)
def test_damage_is_named(case: str, message: str, tmp_path: Path, bucket: Proxy) -> None:
    path = saved(case, tmp_path)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    url = upload(path, f"{BUCKET}/damaged/{case.replace(' ', '-')}")
    with pytest.raises(tensorkeep.CorruptCheckpointError, match=message) as caught:
        tensorkeep.load(url)
    assert str(caught.value).startswith(url)
    assert not tensorkeep.verify(url)


@pytest.mark.parametrize("case", ["torch", "dcp"])
def test_a_replacement_while_it_is_read_is_noticed(case: str, tmp_path: Path, bucket: Proxy) -> None:
    path = saved(case, tmp_path)
    url = upload(path, f"{BUCKET}/replaced/{case}")
    with tensorkeep.open(url) as opened:
        other = saved(case, tmp_path / "other")
        for file in [other] if other.is_file() else [*other.glob("*.distcp")]:
            file.write_bytes(file.read_bytes() + b"\0")
        upload(other, f"{BUCKET}/replaced/{case}")
        with pytest.raises(tensorkeep.StoreError, match="was replaced while it was read"):
            opened["model.w"].load()


@pytest.mark.parametrize("case", ["torch", "dcp", "zarr 3"])
@pytest.mark.parametrize("action", ["503", "reset"])
def test_what_fails_for_ever_ends_in_time(
    case: str, action: str, tmp_path: Path, bucket: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(case, tmp_path)
    url = upload(path, f"{BUCKET}/ever/{case.replace(' ', '-')}")
    with tensorkeep.open(url) as opened:
        monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "0.5")
        bucket.start_again(Fault(action, lambda number: True))
        with pytest.raises(tensorkeep.StoreError, match="cannot read it") as caught:
            opened["model.half"].load()
        assert url in str(caught.value)
        assert "TENSORKEEP_STORE_TIMEOUT" in str(caught.value)
        assert SECRET not in str(caught.value)
        # What failed once is tried again.
        monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "20")
        bucket.start_again(None)
        assert torch.equal(opened["model.half"].load(), state()["model"]["half"])


ACTIONS = ["500", "503", "reset", "lost", "truncated", "short", "slow", "stalled"]


@pytest.mark.parametrize("case", ["torch", "dcp", "zarr 3", "database"])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_failing_requests_never_change_what_is_read(
    case: str, every: bool, tmp_path: Path, bucket: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(case, tmp_path)
    url = upload(path, f"{BUCKET}/broken/{case.replace(' ', '-')}")
    expected = tensorkeep.load(path)
    bucket.start_again(None)
    assert same(tensorkeep.load(url), expected)
    count = len(bucket.requests)
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "0.5")
    for position, action in enumerate(ACTIONS):
        # Of most formats, the first half of the requests is for finding out what it is.
        for number in range(count) if every else [count // 2 + (3 * position) % (count - count // 2)]:
            for times in (1, math.inf) if every else [(1, math.inf)[position % 2]]:
                bucket.start_again(FaultAt(action, number, times))
                begun = time.monotonic()
                try:
                    assert same(tensorkeep.load(url), expected)
                except tensorkeep.TensorkeepError as error:
                    assert BUCKET in str(error)
                    assert SECRET not in str(error)
                assert time.monotonic() - begun < 12


@pytest.mark.parametrize("case", ["torch", "dcp", "zarr 3", "t5x"])
def test_a_request_may_fail_once(case: str, tmp_path: Path, bucket: Proxy) -> None:
    path = saved(case, tmp_path)
    url = upload(path, f"{BUCKET}/once/{case.replace(' ', '-')}")
    bucket.start_again(Fault("503", lambda number: number % 5 == 2))
    assert same(tensorkeep.load(url), tensorkeep.load(path))


def test_specs_of_tensorstore(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    assert kvstore_spec(StorePath("s3://b/run"), "w/") == {"driver": "s3", "bucket": "b", "path": "run/w/"}
    assert kvstore_spec(StorePath("gs://b"), "w/") == {"driver": "gcs", "bucket": "b", "path": "w/"}
    expected = {"driver": "http", "base_url": "https://host:8443", "path": "/a/w/"}
    assert kvstore_spec(StorePath("https://host:8443/a"), "w/") == expected
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://host")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    spec = kvstore_spec(StorePath("s3://b/run"), "")
    assert spec == {
        "driver": "s3",
        "bucket": "b",
        "path": "run/",
        "endpoint": "http://host",
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "anonymous"},
    }
    for url in ("s3://bucket/run", "gs://bucket/run", "https://host/run"):
        # TensorStore accepts them.
        tensorstore.KvStore.Spec(kvstore_spec(StorePath(url), "w/"))
    assert tensorstore.Context(retries())
    with pytest.raises(tensorkeep.UnsupportedError, match="TensorStore does not read az://\ncopy it to a disk"):
        kvstore_spec(StorePath("az://b/run"), "")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_functions_of_torch_and_safetensors(tmp_path: Path, bucket: Proxy) -> None:
    content = {"w": torch.arange(5.0)}
    torch.save(content, tmp_path / "x.pt")
    tensorkeep.save(content, tmp_path / "x.safetensors")
    url = upload(tmp_path / "x.pt", f"{BUCKET}/like/x.pt")
    assert same(tensorkeep.torch.load(url), content)
    with pytest.raises(tensorkeep.UnsupportedError, match="map_location is not possible in an object store"):
        tensorkeep.torch.load(url, map_location={"cpu": "cpu"})
    assert same(load_file(upload(tmp_path / "x.safetensors", f"{BUCKET}/like/x.safetensors")), content)
    into = {"w": torch.zeros(5)}
    dcp.load(into, storage_reader=DcpReader(url), no_dist=True)
    assert same(into, content)
    assert DcpReader.validate_checkpoint_id(url) and not DcpReader.validate_checkpoint_id("ftp://host/c")


@pytest.mark.parametrize("case", ["torch", "dcp"])
def test_mapping_is_refused(case: str, tmp_path: Path, bucket: Proxy) -> None:
    url = upload(saved(case, tmp_path), f"{BUCKET}/mapped/{case}")
    with pytest.raises(tensorkeep.UnsupportedError):
        tensorkeep.load(url, mmap=True)


@pytest.mark.parametrize("command", ["info", "ls", "verify"])
def test_an_endpoint_is_that_of_one_command(
    command: str,
    tmp_path: Path,
    bucket: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = upload(saved("torch", tmp_path), f"{BUCKET}/endpoint/x.pt")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "0.5")
    before = dict(os.environ)
    assert main([command, url]) == 3
    assert dict(os.environ) == before
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "20")
    before = dict(os.environ)
    assert main([command, url, "--endpoint", f"{bucket.url}/"]) == 0
    assert dict(os.environ) == before
    monkeypatch.setenv("TENSORKEEP_ENDPOINT", bucket.url)
    assert main([command, url]) == 0
    capsys.readouterr()
    assert main([command, url, "--endpoint", f"http://user:{SECRET}@host"]) == 2
    assert SECRET not in capsys.readouterr().err
