"""Native checkpoints are saved to object stores: complete or not at all, by any number of writers."""

import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from store_servers import SECRET, Fault, Proxy, always
from tensorkeep.cli.main import main
from tensorkeep.paths import StorePath, as_path
from tensorkeep.storage import store_requests
from tensorkeep.storage.store_commit import StoreCommit, save_of
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same

pytestmark = pytest.mark.integration
pytest.importorskip("obstore")

BUCKET = "s3://bucket-native"
MIB = 1024**2


def state(value: float) -> dict[str, Any]:
    weight = torch.full((300, 1000), value, dtype=torch.bfloat16)
    return {
        "model": {"w": weight, "tied": weight, "rows": weight[10:20], "none": torch.empty(0, 3)},
        "optimizer": {"m": torch.randn(100, 100, generator=torch.Generator().manual_seed(int(value)))},
        "step": int(value),
        "x": np.arange(3.0),
    }


def objects(url: str) -> dict[str, int]:
    """Return the sizes of the objects below a prefix, by name."""
    path = as_path(url)
    assert isinstance(path, StorePath)
    return {name: status.size for name, status in store_requests.children(path) if status is not None}


@pytest.mark.parametrize("compression", ["none", "lossless", "auto", "zstd"])
def test_round_trip(bucket: Proxy, compression: str) -> None:
    url = f"{BUCKET}/round/{compression}"
    files = {"config.json": "{}"}
    report = tensorkeep.save(state(5), url, compression=compression, metadata={"a": [1]}, files=files)
    assert (report.path, report.direct_io) == (url, False)
    loaded = tensorkeep.load(url)
    assert same(loaded, state(5))
    model = loaded["model"]
    assert model["tied"].data_ptr() == model["w"].data_ptr()
    assert model["rows"].data_ptr() == model["w"][10:].data_ptr()
    assert tensorkeep.verify(url)
    found = objects(url)
    assert sum(found.values()) == report.stored_bytes
    assert len({save_of(name) for name in found if name != "manifest.json"}) == 1
    assert tensorkeep.info(url).metadata == {"a": [1]}
    if compression == "auto":
        assert (report.compression, report.auto and report.auto["rates"]) == ("lossless", None)


@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_states_without_a_byte(bucket: Proxy, compression: str) -> None:
    states: list[dict[str, Any]] = [{}, {"step": 3}, {"w": torch.empty(0)}]
    for content in states:
        with case(content):
            tensorkeep.save(content, f"{BUCKET}/empty", compression=compression, overwrite=True)
            assert same(tensorkeep.load(f"{BUCKET}/empty"), content)
            assert tensorkeep.verify(f"{BUCKET}/empty")


@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_several_files_in_parts(bucket: Proxy, compression: str) -> None:
    noise = torch.randint(0, 255, (9 * MIB,), dtype=torch.uint8)
    large = {"model": {str(i): noise[: 5 * MIB // 8 + i].clone() for i in range(9)} | {"big": noise}}
    url = f"{BUCKET}/several-{compression}"
    report = tensorkeep.save(large, url, compression=compression, shard_bytes="2MiB", memory_budget="64MiB")
    assert same(tensorkeep.load(url), large)
    assert report.peak_buffer_bytes <= 64 * MIB
    found = objects(url)
    assert sum(name.startswith("model-0000") for name in found) >= 4
    assert sum(".index.json" in name for name in found) == (compression == "none")
    assert any("partNumber=2" in request for request in bucket.requests)


def test_raw_objects_are_safetensors_files_and_coded_ones_have_no_header(bucket: Proxy) -> None:
    url = f"{BUCKET}/head"
    for compression in ("none", "lossless"):
        tensorkeep.save({"model": {"w": torch.arange(4000.0)}}, url, compression=compression, overwrite=True)
        (name,) = set(objects(url)) - {"manifest.json"}
        if compression == "none":
            assert torch.equal(tensorkeep.load(f"{url}/{name}")["w"], torch.arange(4000.0))
    assert name.endswith(".tensorkeep")
    assert tensorkeep.info(url).details["files"] == {name: objects(url)[name]}


def test_background_saves(bucket: Proxy) -> None:
    weight = torch.ones(MIB)
    delta: dict[str, Any] = {"compression": "lossless", "delta": True, "incremental": True, "threads": 1}
    kinds = enumerate(({"compression": "none"}, {"compression": "lossless"}, delta))
    pending = [tensorkeep.save_async({"w": weight, "n": n}, f"{BUCKET}/async-{n}", **kind) for n, kind in kinds]
    weight.zero_()
    for n, each in enumerate(pending):
        assert each.wait().path == f"{BUCKET}/async-{n}"
        assert same(tensorkeep.load(each.path), {"w": torch.ones(MIB), "n": n})
    with pytest.raises(tensorkeep.DestinationExistsError):
        tensorkeep.save_async({}, f"{BUCKET}/async-0")


def test_overwrite_replaces_and_removes_the_old_objects(bucket: Proxy) -> None:
    url = f"{BUCKET}/over"
    tensorkeep.save(state(1), url)
    with pytest.raises(tensorkeep.DestinationExistsError, match=r"exists already\n.*overwrite=True"):
        tensorkeep.save(state(2), url)
    before = objects(url)
    tensorkeep.save(state(2), url, overwrite=True)
    assert same(tensorkeep.load(url), state(2))
    assert set(objects(url)) & set(before) == {"manifest.json"}
    assert len(objects(url)) == len(before)


class InterruptAt(Fault):
    """Ctrl-C at the first request that contains a text, while all requests are slow."""

    def __init__(self, text: str) -> None:
        super().__init__("slow", always)
        self._text = text

    def strikes(self, number: int, request: str) -> bool:
        if self._text and self._text in request:
            self._text = ""
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return True


def test_a_failed_or_interrupted_save_removes_its_objects(bucket: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: StoreCommit, content: bytes) -> None:
        raise KeyboardInterrupt

    url = f"{BUCKET}/interrupted"
    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(StoreCommit, "publish", interrupted)
        tensorkeep.save(state(1), url)
    assert not objects(url)
    bucket.start_again(InterruptAt("partNumber=2"))
    with pytest.raises(KeyboardInterrupt):
        tensorkeep.save({"w": torch.zeros(20 * MIB, dtype=torch.uint8)}, url, memory_budget="64MiB")
    bucket.start_again(None)
    assert not objects(url)
    # One that was killed has left its objects.
    store_requests.put(StorePath(f"{url}/model-0123456789abcdef.safetensors"), b"x")
    with pytest.raises(tensorkeep.NotACheckpointError, match="is a folder, not a checkpoint"):
        tensorkeep.open(url)
    tensorkeep.save({"w": torch.ones(3)}, url)


def test_convert_between_disk_and_store(bucket: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensorkeep.save(state(7), tmp_path / "a")
    up, again, back = f"{BUCKET}/up", f"{BUCKET}/again", tmp_path / "back"
    assert main(["convert", str(tmp_path / "a"), up, "--compression", "lossless"]) == 0
    assert f"to {up} (native, lossless)" in capsys.readouterr().out
    assert main(["convert", up, again]) == 0
    assert main(["convert", again, str(back)]) == 0
    assert tensorkeep.diff(tmp_path / "a", back).equal
    assert main(["convert", up, again, f"{BUCKET}/folder/"]) == 0
    assert same(tensorkeep.load(f"{BUCKET}/folder/up"), state(7))
    assert main(["convert", str(tmp_path / "a"), up]) == 6
    assert main(["convert", up, f"{up}/inside"]) == 2


def test_one_safetensors_file(bucket: Proxy) -> None:
    url = f"{BUCKET}/w.safetensors"
    tensorkeep.save({"w": torch.ones(MIB)}, url)
    assert torch.equal(tensorkeep.load(url)["w"], torch.ones(MIB))
    with pytest.raises(tensorkeep.DestinationExistsError):
        tensorkeep.save({"w": torch.zeros(5)}, url)
    tensorkeep.save({"w": torch.zeros(5)}, url, overwrite=True)
    assert torch.equal(tensorkeep.load(url)["w"], torch.zeros(5))


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("https://host.example/c", {}, "https:// is only read from\nsave to s3://"),
        (f"{BUCKET}/x.pt", {}, "format 'torch' is not written to object stores\nsave in the native format"),
        (f"{BUCKET}/x.tensorkeep", {"compression": "lossless"}, "their header is known last"),
        (f"{BUCKET}/x", {"format": "safetensors"}, "do not become visible at once"),
        ("s3://no-such-bucket/x", {}, "bucket does not exist"),
        ("s3://", {}, "has no bucket"),
    ],
)
def test_what_is_not_written_is_refused(bucket: Proxy, path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(tensorkeep.TensorkeepError, match=message) as caught:
        tensorkeep.save({"w": torch.ones(3)}, path, **options)
    assert SECRET not in str(caught.value)
