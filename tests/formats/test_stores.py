"""Every format is read from object stores and web servers as from a disk, by requests for what is used."""

import math
import os
import re
import traceback
from functools import partial
from http.server import SimpleHTTPRequestHandler
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import tensorkeep
import tensorkeep.torch
import tensorstore
from array_files import foreign_group, write_array
from faults.injection import flip_bit
from formats.dcp.checkpoints import grid, trained, write_chunks
from formats.dcp.checkpoints import real_save as dcp_save
from store_servers import ACTIONS, SECRET, Fault, FaultAt, Proxy, always, serving, upload
from tensorkeep.cli.main import main
from tensorkeep.distributed.dcp import DcpReader
from tensorkeep.paths import StorePath
from tensorkeep.safetensors.torch import load_file
from tensorkeep.storage import store_requests
from tensorkeep.testing.cases import case as case_of
from tensorkeep.testing.equality import same
from tensorkeep_formats.tensorstore.library import kvstore_spec, retries
from tiers import exhaustive

pytestmark = pytest.mark.integration
obstore = pytest.importorskip("obstore")

BUCKET = "s3://formats"


def state() -> dict[str, Any]:
    w = torch.arange(60_000, dtype=torch.float32).reshape(300, 200)
    return {"model": {"w": w, "half": w.half() / 7, "b": torch.arange(10)}, "step": 5}


FORMATS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "native": ("native", {"compression": "none"}),
    "lossless": ("native", {"compression": "lossless"}),
    "c.safetensors": (None, {"force": True, "compression": "none"}),
    "d.safetensors": (None, {"force": True, "compression": "lossless"}),
    "torch": ("torch", {}),
    "dcp": ("dcp", {"thread_count": 2}),
    "zarr 3": ("tensorstore", {"chunk": "64KiB"}),
    "zarr 2": ("tensorstore", {"zarr": 2, "compressor": "zstd:1"}),
    "shards": ("tensorstore", {"chunk": "16KiB", "shard_bytes": "64KiB"}),
    "database": ("tensorstore", {"kvstore": "ocdbt"}),
    "t5x": ("t5x", {"dtype": "keep"}),
}
# Of those that are read by the same code, one; other tests here read a database and T5X.
OFTEN = ("native", "d.safetensors", "torch", "dcp", "zarr 3")


@pytest.fixture
def disk(case: str, tmp_path: Path) -> Path:
    """A checkpoint on a disk."""
    format, options = FORMATS[case]
    path = tmp_path / ("x.pt" if format == "torch" else "c" if format else case)
    tensorkeep.save(state(), path, format=format, **options)
    return path


@pytest.fixture
def url(disk: Path, bucket: Proxy) -> str:
    """Its copy in the bucket."""
    return upload(disk, f"{BUCKET}/{disk.parent.name}/{disk.name}")


@pytest.mark.parametrize("case", [*OFTEN, *exhaustive(*(each for each in FORMATS if each not in OFTEN))])
def test_a_checkpoint_is_read_as_from_a_disk(
    case: str, disk: Path, url: str, tmp_path: Path, bucket: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[int, int]] = []
    expected, info = tensorkeep.load(disk), tensorkeep.info(disk)
    assert same(tensorkeep.load(url, progress=lambda *counts: calls.append(counts)), expected)
    assert calls[-1][0] == calls[-1][1] == info.total.nbytes
    into = state()
    into["model"]["w"].zero_()
    tensorkeep.load(url, into=into)
    assert torch.equal(into["model"]["w"], state()["model"]["w"])
    report = tensorkeep.verify(url)
    assert report.ok and report.checked == tensorkeep.verify(disk).checked
    with tensorkeep.open(url) as opened:
        assert torch.equal(opened["model.w"][7:9, 1:3], state()["model"]["w"][7:9, 1:3])
    assert tensorkeep.info(url).entries == info.entries
    assert tensorkeep.diff(url, disk)
    tensorkeep.convert(url, tmp_path / "native", compression="none")
    assert same(tensorkeep.load(tmp_path / "native"), expected)
    assert main([("info", "ls")[[*FORMATS].index(case) % 2], url]) == 0
    assert "model.half" in capsys.readouterr().out
    with pytest.raises(tensorkeep.UnsupportedError):
        tensorkeep.load(url, mmap=True)
    # A web server does not list what it has.
    url = url.replace("s3:/", bucket.url)
    assert same(tensorkeep.load(url), expected)
    with pytest.raises((tensorkeep.NotFoundError, tensorkeep.NotACheckpointError)):
        tensorkeep.load(f"{url}-missing")


def test_places_without_a_checkpoint_and_servers_without_ranges(tmp_path: Path, bucket: Proxy) -> None:
    store_requests.put(StorePath(f"{BUCKET}/some"), b"thing")
    with pytest.raises(tensorkeep.NotACheckpointError):
        tensorkeep.info(BUCKET)
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    (tmp_path / "folder").mkdir()
    # It shows folders as pages, and does not know ranges.
    with serving(partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as url:
        with pytest.raises(tensorkeep.UnsupportedError, match="does not answer requests for a part of a file"):
            tensorkeep.load(f"{url}/x.pt")
        with pytest.raises(tensorkeep.NotACheckpointError, match="is not a checkpoint of any known format"):
            tensorkeep.load(f"{url}/folder")


def test_torch_files_of_others(tmp_path: Path, bucket: Proxy) -> None:
    base = torch.arange(60.0)
    content = {"rows": base[:30].reshape(5, 6), "shared": base[10:20], "nothing": torch.empty(0, 3)}
    content |= {"transposed": torch.arange(12.0).reshape(3, 4).T, "expanded": torch.ones(1, 4).expand(3, 4)}
    content |= {"parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), "text": {"a": (1, None, "b")}}
    content["tiny"] = [torch.tensor(number) for number in range(50)]
    torch.save(content, tmp_path / "x.pt")
    url = upload(tmp_path / "x.pt", f"{BUCKET}/others/x.pt")
    assert same(tensorkeep.load(url), tensorkeep.load(tmp_path / "x.pt"))
    assert same(tensorkeep.load(url), torch.load(tmp_path / "x.pt"))
    torch.save({"plain": 1}, tmp_path / "plain.pt")
    assert tensorkeep.load(upload(tmp_path / "plain.pt", f"{BUCKET}/others/plain.pt")) == {"plain": 1}
    # A zip file whose first record is another one.
    torch.save([torch.ones(3)], tmp_path / "y.pt")
    assert tensorkeep.info(upload(tmp_path / "y.pt", f"{BUCKET}/others/y")).format == "torch"
    # Code in a file is not run.
    torch.save({"path": Path("x")}, tmp_path / "code.pt")
    with pytest.raises(tensorkeep.UnsupportedError, match="its pickle calls pathlib"):
        tensorkeep.load(upload(tmp_path / "code.pt", f"{BUCKET}/others/code.pt"))


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
    assert list(tensorkeep.load(f"{url}/w".replace("s3:/", bucket.url))) == ["w"]
    with pytest.raises(tensorkeep.UnsupportedError, match="which a web server does not list"):
        tensorkeep.load(url.replace("s3:/", bucket.url))
    # Without the metadata of a group.
    for name in ("a", "b"):
        write_array(tmp_path / "loose" / name, np.arange(3.0), "zarr")
    url = upload(tmp_path / "loose", f"{BUCKET}/arrays/loose")
    assert list(tensorkeep.load(url)) == ["a", "b"]
    write_array(Path("a/b"), np.arange(5), base=str(tmp_path / "db"))
    assert tensorkeep.load(upload(tmp_path / "db", f"{BUCKET}/arrays/db"))["a.b"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_only_what_is_used_is_moved(format: str, tmp_path: Path, bucket: Proxy) -> None:
    content = {f"t{number}": torch.full((128, 1024), float(number)) for number in range(8)}
    path = tmp_path / "x.pt"
    tensorkeep.save(content, path, format=format)
    size = sum(leaf.nbytes for leaf in content.values())
    url = upload(path, f"{BUCKET}/moved/{format}")
    bucket.start_again(None)
    assert len(tensorkeep.info(url).entries) == 8
    assert bucket.answered_bytes < 0.2 * size
    with tensorkeep.open(url) as opened:
        bucket.start_again(None)
        for row in (100, 120):  # the checksum is that of the full tensor, which is read once
            assert opened["t3"][row].unique().tolist() == [3.0]
            assert bucket.answered_bytes < 1.2 * size / 8
    with tensorkeep.open(url, verify=False) as opened:
        bucket.start_again(None)
        assert torch.equal(opened["t3"][10:20], content["t3"][10:20])
        assert format == "dcp" or bucket.answered_bytes <= 10 * 4096 + 2 * 16 * 1024
    bucket.start_again(None)
    assert same(tensorkeep.load(url), content)
    assert bucket.answered_bytes < 1.2 * size


@pytest.mark.parametrize(
    ("case", "how", "message"),
    [
        *(("torch", "flipped", "CRC-32"), ("dcp", "flipped", "CRC-32"), ("zarr 3", "flipped", "TensorStore cannot")),
        ("native", "flipped", "its checksum is"),
        *(("native", "cut short", "was cut short"), ("native", "missing", "is missing")),
    ],
)
def test_damage_is_named(how: str, message: str, disk: Path, bucket: Proxy) -> None:
    files = [disk] if disk.is_file() else [file for file in disk.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    if how == "flipped":
        flip_bit(largest, largest.stat().st_size // 2)
    elif how == "cut short":
        os.truncate(largest, largest.stat().st_size - 4)
    else:
        largest.unlink()
    url = upload(disk, f"{BUCKET}/damaged/{disk.parent.name}")
    with pytest.raises(tensorkeep.CorruptCheckpointError, match=message) as caught:
        tensorkeep.load(url)
    assert str(caught.value).startswith(url)
    assert not tensorkeep.verify(url)


@pytest.mark.parametrize("case", ["torch", "dcp", "c.safetensors"])
def test_a_replacement_while_it_is_read_is_noticed(case: str, disk: Path, url: str) -> None:
    with tensorkeep.open(url) as opened:
        for file in [disk] if disk.is_file() else [*disk.glob("*.distcp")]:
            file.write_bytes(file.read_bytes() + b"\0")
        upload(disk, url)
        with pytest.raises(tensorkeep.StoreError, match="was replaced while it was read"):
            opened["model.w"].load()


@pytest.mark.parametrize("case", ["torch", "t5x", *exhaustive("dcp", "zarr 3")])
def test_what_fails_for_ever_is_an_error_and_once_is_not(case: str, disk: Path, url: str, bucket: Proxy) -> None:
    bucket.start_again(Fault("503", lambda number: number % 5 == 2))
    assert same(tensorkeep.load(url), tensorkeep.load(disk))
    for action in ("503", "reset"):
        bucket.start_again(None)
        with case_of(action), tensorkeep.open(url) as opened:
            bucket.start_again(Fault(action, always))
            with pytest.raises(tensorkeep.StoreError, match="cannot read it") as caught:
                opened["model.half"].load()
            assert url in str(caught.value)
            assert "TENSORKEEP_STORE_TIMEOUT" in str(caught.value)
            assert SECRET not in str(caught.value)
            # What failed once is tried again.
            bucket.start_again(None)
            assert torch.equal(opened["model.half"].load(), state()["model"]["half"])


@pytest.mark.parametrize(
    ("case", "every"),
    [
        ("zarr 3", False),
        *exhaustive(("torch", False), *product(("torch", "dcp", "zarr 3", "database"), (True,))),
    ],
)
def test_failing_requests_never_change_what_is_read(
    case: str, every: bool, disk: Path, url: str, bucket: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tensorkeep.load(disk)
    bucket.start_again(None)
    assert same(tensorkeep.load(url), expected)
    count = len(bucket.requests)
    for position, action in enumerate(("echo", *ACTIONS)):
        # No clock of the tests makes the time shorter for which an answer that does not end is waited for.
        monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "0.3" if action == "stalled" else "20")
        # Of most formats, the first half of the requests is for finding out what it is.
        for number in range(count) if every else [count - 1 - (3 * position) % (count - count // 2)]:
            for times in (1, math.inf) if every else [(math.inf, 1)[position % 2]]:
                bucket.start_again(FaultAt(action, number, times))
                try:
                    assert same(tensorkeep.load(url), expected)
                except tensorkeep.TensorkeepError as error:
                    assert BUCKET in str(error)
                    assert not re.search(f"{SECRET}|AWS4-HMAC", "".join(traceback.format_exception(error)))


def test_specs_of_tensorstore(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    assert kvstore_spec(StorePath("s3://b/run"), "w/") == {"driver": "s3", "bucket": "b", "path": "run/w/"}
    assert kvstore_spec(StorePath("gs://b"), "w/") == {"driver": "gcs", "bucket": "b", "path": "w/"}
    expected = {"driver": "http", "base_url": "https://host:8443", "path": "/a/w/"}
    assert kvstore_spec(StorePath("https://host:8443/a"), "w/") == expected
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://host")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    endpoint = {"endpoint": "http://host", "aws_region": "us-east-1", "aws_credentials": {"type": "anonymous"}}
    assert kvstore_spec(StorePath("s3://b/run"), "") == {"driver": "s3", "bucket": "b", "path": "run/", **endpoint}
    for url in ("s3://bucket/run", "gs://bucket/run", "https://host/run"):  # TensorStore accepts them
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


@pytest.mark.parametrize("case", ["torch"])
def test_an_endpoint_is_that_of_one_command(
    url: str, bucket: Proxy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    before = dict(os.environ)
    assert main(["info", url]) == 3
    for command in ("info", "ls", "verify"):
        assert main([command, url, "--endpoint", f"{bucket.url}/"]) == 0, command
    assert dict(os.environ) == before
    monkeypatch.setenv("TENSORKEEP_ENDPOINT", bucket.url)
    assert main(["info", url]) == 0
    assert main(["info", url, "--endpoint", f"http://user:{SECRET}@host"]) == 2
    assert SECRET not in capsys.readouterr().err
