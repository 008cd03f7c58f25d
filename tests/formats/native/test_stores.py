"""Native checkpoints are saved to object stores: complete or not at all, by any number of writers."""

import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from faults.injection import in_child
from store_servers import SECRET, Fault, Proxy
from tensorkeep.cli.main import main
from tensorkeep.io.objects import stores
from tensorkeep.io.objects.store_commit import StoreCommit, save_of
from tensorkeep.paths import StorePath, as_path
from tensorkeep.testing.equality import same

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
    return {name: status.size for name, status in stores.children(path) if status is not None}


@pytest.mark.parametrize("compression", ["none", "lossless", "auto", "zstd"])
def test_round_trip(bucket: Proxy, compression: str) -> None:
    url = f"{BUCKET}/round/{compression}"
    report = tensorkeep.save(state(5), url, compression=compression, metadata={"a": [1]})
    assert (report.path, report.direct_io) == (url, False)
    assert same(tensorkeep.load(url), state(5))
    assert tensorkeep.verify(url)
    found = objects(url)
    assert sum(found.values()) == report.stored_bytes
    assert len({save_of(name) for name in found if name != "manifest.json"}) == 1
    info = tensorkeep.info(url)
    assert info.metadata == {"a": [1]}
    if compression == "auto":
        assert (report.compression, report.auto and report.auto["rates"]) == ("lossless", None)


def test_tied_tensors_share_storage_again(bucket: Proxy) -> None:
    tensorkeep.save(state(1), f"{BUCKET}/tied")
    model = tensorkeep.load(f"{BUCKET}/tied")["model"]
    assert model["tied"].data_ptr() == model["w"].data_ptr()
    assert model["rows"].data_ptr() == model["w"][10:].data_ptr()


@pytest.mark.parametrize("states", [{}, {"step": 3}, {"w": torch.empty(0)}], ids=["empty", "no tensor", "no byte"])
@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_states_without_a_byte(bucket: Proxy, states: dict[str, Any], compression: str) -> None:
    url = f"{BUCKET}/empty-{len(states)}-{'w' in states}-{compression}"
    tensorkeep.save(states, url, compression=compression)
    assert same(tensorkeep.load(url), states)
    assert tensorkeep.verify(url)


@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_several_files_in_parts(bucket: Proxy, compression: str) -> None:
    large = {"model": {str(i): torch.randn(5 * MIB // 4 + i) for i in range(9)} | {"big": torch.randn(10 * MIB)}}
    url = f"{BUCKET}/several-{compression}"
    report = tensorkeep.save(large, url, compression=compression, shard_bytes="12MiB", memory_budget="64MiB")
    assert same(tensorkeep.load(url), large)
    assert report.peak_buffer_bytes <= 64 * MIB
    found = objects(url)
    assert sum(name.startswith("model-0000") for name in found) == 6
    assert sum(".index.json" in name for name in found) == (compression == "none")
    assert any("partNumber=2" in request for request in bucket.requests)


def test_raw_objects_are_safetensors_files_and_coded_ones_have_no_header(bucket: Proxy, tmp_path: Path) -> None:
    for compression in ("none", "lossless"):
        tensorkeep.save(
            {"model": {"w": torch.arange(4000.0)}}, f"{BUCKET}/head", compression=compression, overwrite=True
        )
        (name,) = set(objects(f"{BUCKET}/head")) - {"manifest.json"}
        url = f"{BUCKET}/head/{name}"
        if compression == "none":
            assert torch.equal(tensorkeep.load(url)["w"], torch.arange(4000.0))
        else:
            assert name.endswith(".tensorkeep")
            assert tensorkeep.info(f"{BUCKET}/head").details["files"] == {name: objects(f"{BUCKET}/head")[name]}


def test_background_saves(bucket: Proxy) -> None:
    weight = torch.ones(3 * MIB)
    kinds: list[dict[str, Any]] = [
        {"compression": "none"},
        {"compression": "lossless"},
        {"compression": "lossless", "delta": True, "incremental": True, "threads": 1},
    ]
    pending = [
        tensorkeep.save_async({"w": weight, "n": n}, f"{BUCKET}/async-{n}", **kind) for n, kind in enumerate(kinds)
    ]
    weight.zero_()
    for n, each in enumerate(pending):
        assert each.wait().path == f"{BUCKET}/async-{n}"
        assert same(tensorkeep.load(each.path), {"w": torch.ones(3 * MIB), "n": n})
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


def test_16_writers_for_one_destination(bucket: Proxy) -> None:
    url = f"{BUCKET}/race"

    def attempt(number: int) -> int | str:
        try:
            tensorkeep.save({"w": torch.full((1000,), float(number)), "n": number}, url)
        except tensorkeep.DestinationExistsError as error:
            return str(error)
        return number

    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(attempt, range(16)))
    (winner,) = [each for each in outcomes if isinstance(each, int)]
    assert tensorkeep.load(url)["n"] == winner
    assert tensorkeep.verify(url)
    found = objects(url)
    (save,) = {save_of(name) for name in found} - {None}
    assert len(found) == 2
    for each in outcomes:
        assert each == winner or "exists already" in str(each) or f"another save was first: save {save}" in str(each)


@pytest.mark.parametrize(
    ("action", "overwrite"),
    [
        ("lost", True),
        ("503", False),
        ("reset", True),
        pytest.param("lost", False, marks=pytest.mark.slow),
        pytest.param("503", True, marks=pytest.mark.slow),
        pytest.param("reset", False, marks=pytest.mark.slow),
    ],
)
def test_any_request_of_a_save_may_fail_once(bucket: Proxy, action: str, overwrite: bool) -> None:
    url = f"{BUCKET}/once-{action}-{overwrite}"

    def prepare() -> None:
        bucket.start_again(None)
        if overwrite:
            tensorkeep.save(state(1), url, overwrite=True)
        bucket.start_again(None)

    prepare()
    tensorkeep.save(state(2), url, overwrite=overwrite)
    count = len(bucket.requests)
    for number in range(count):
        if not overwrite:
            url = f"{BUCKET}/once-{action}-{number}"
        prepare()
        bucket.start_again(Fault(action, lambda each, number=number: each == number))  # type: ignore[misc]
        tensorkeep.save(state(3), url, overwrite=overwrite)
        bucket.start_again(None)
        assert same(tensorkeep.load(url), state(3)), number


def test_a_store_that_fails_for_ever_ends_in_time(bucket: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{BUCKET}/ever"
    tensorkeep.save(state(1), url)
    bucket.start_again(None)
    tensorkeep.save(state(2), url, overwrite=True)
    count = len(bucket.requests)
    for number in range(count):
        monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "0.5")
        bucket.start_again(Fault("503", lambda each, number=number: each >= number))  # type: ignore[misc]
        try:
            tensorkeep.save(state(3), url, overwrite=True)
        except tensorkeep.StoreError as error:
            assert url in str(error) and re.search(r"SlowDown|503", str(error))
        bucket.start_again(None)
        monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "20")
        assert tensorkeep.load(url)["step"] in (2, 3)
        assert tensorkeep.verify(url)


KILLED = """
import os, sys, torch, tensorkeep
from tensorkeep.io.objects.store_commit import StoreCommit
StoreCommit.publish = lambda self, content: os._exit(9)
tensorkeep.save({"w": torch.ones(10)}, sys.argv[1])
"""


def test_killed_before_the_commit(bucket: Proxy) -> None:
    url = f"{BUCKET}/killed"
    assert subprocess.run([sys.executable, "-c", KILLED, url], env=os.environ, check=False).returncode == 9
    assert len(objects(url)) == 1
    with pytest.raises(tensorkeep.NotACheckpointError, match="is a folder, not a checkpoint"):
        tensorkeep.open(url)
    tensorkeep.save(state(4), url)
    assert same(tensorkeep.load(url), state(4))


def test_a_failed_or_interrupted_save_removes_its_objects(bucket: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: StoreCommit, content: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StoreCommit, "publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tensorkeep.save(state(1), f"{BUCKET}/interrupted")
    assert not objects(f"{BUCKET}/interrupted")


def test_interrupted_while_parts_are_sent(bucket: Proxy) -> None:
    url = f"{BUCKET}/ctrl-c"
    bucket.start_again(Fault("slow", lambda number: True))

    ended = threading.Event()

    def interrupt() -> None:
        while not any("partNumber=3" in request for request in bucket.requests):
            if ended.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            tensorkeep.save({"w": torch.randn(40 * MIB)}, url, memory_budget="64MiB")
    finally:
        ended.set()
    thread.join()
    bucket.start_again(None)
    assert not objects(url)
    tensorkeep.save({"w": torch.ones(3)}, url)


def test_a_forked_child_is_refused(bucket: Proxy) -> None:
    tensorkeep.save({}, f"{BUCKET}/parent")
    reading, writing = os.pipe()

    def work() -> None:
        try:
            tensorkeep.save({}, f"{BUCKET}/child")
        except tensorkeep.TensorkeepError as error:
            os.write(writing, str(error).encode())

    assert in_child(work) == 0
    os.close(writing)
    with os.fdopen(reading) as answer:
        assert "was forked from one that has used an object store" in answer.read()


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
    tensorkeep.save({"w": torch.ones(3 * MIB)}, url)
    assert torch.equal(tensorkeep.load(url)["w"], torch.ones(3 * MIB))
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
