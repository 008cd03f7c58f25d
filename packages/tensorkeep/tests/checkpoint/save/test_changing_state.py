"""A state that other threads and processes change while it is saved: the checkpoint mixes values and is not damaged."""

import subprocess
import sys
import threading
import time
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from tensorkeep.storage.direct_io import Bytes
from tiers import exhaustive

# Arguments of `save` by name. Every format, and everything that reads the state in a way of its own.
SAVES: dict[str, dict[str, Any]] = {
    "native": {},
    "native incremental": {"incremental": True},
    "native through the page cache": {"direct_io": False},
    **{f"native {name}": {"compression": name} for name in ("lossless", "raw", "planes", "zstd", "gzip")},
    "native lossless incremental": {"compression": "lossless", "incremental": True},
    **{name: {"format": name} for name in ("safetensors", "torch", "dcp", "tensorstore")},
    "safetensors lossless": {"format": "safetensors", "compression": "lossless", "force": True},
    "safetensors shards": {"format": "safetensors", "shard_bytes": "1MiB"},
    "tensorstore shards": {"format": "tensorstore", "chunk": "256KiB", "shard_bytes": "4MiB"},
    "tensorstore ocdbt": {"format": "tensorstore", "kvstore": "ocdbt"},
    "tensorstore float32": {"format": "tensorstore", "dtype": "float32"},
    "tensorstore one": {"format": "tensorstore", "in_flight": "one"},
    "tensorstore gzip": {"format": "tensorstore", "compressor": "gzip:1"},
    "tensorstore zstd": {"format": "tensorstore", "compressor": "zstd:1"},
    "tensorstore blosc": {"format": "tensorstore", "compressor": "blosc-lz4"},
    "tensorstore zarr 2": {"format": "tensorstore", "zarr": 2},
    "tensorstore zarr 2 gzip": {"format": "tensorstore", "zarr": 2, "compressor": "gzip:1"},
    "t5x": {"format": "t5x", "compressor": "gzip:1"},
    "t5x raw": {"format": "t5x", "compressor": None},
}


def make_state() -> tuple[dict[str, Any], Bytes]:
    """Return tensors of several dtypes and layouts, the largest of 20 bytes times the scale, and the memory of all."""
    scale, draw = 1 << 16, torch.Generator().manual_seed(0)
    memory = np.zeros(80 * scale, np.uint8)
    used = 0

    def put(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal used
        begin, used = used, used + -(-tensor.nbytes // 64) * 64
        place = torch.from_numpy(memory[begin : begin + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor)

    weights = put(torch.randn(scale, generator=draw))
    state = {
        "model": {
            "bf16": put(torch.randn(10 * scale, generator=draw).bfloat16()),
            "fp32": weights,
            "transposed": put(torch.randn(scale // 64, 64, generator=draw)).t(),
            "rows": put(torch.randn(scale // 32, 64, generator=draw))[::2],
            "zeros": put(torch.zeros(5 * scale, dtype=torch.int32)),
            "repeated": put(torch.randn(64, generator=draw).repeat(scale // 64)),
            "view": weights[: scale // 2],
        },
        "data": {
            "tokens": put(torch.randint(0, 50_000, (scale,), generator=draw)),
            "mask": put(torch.rand(scale, generator=draw) < 0.1),
            "noise": put(torch.randint(0, 256, (scale,), generator=draw).to(torch.uint8)),
            "numbers": [put(torch.tensor(1.0)), put(torch.tensor(2, dtype=torch.int64))],
        },
    }
    return state, memory[:used]


@contextmanager
def changed_between_calls(memory: Bytes) -> Iterator[None]:
    """Change a byte in every 16 KiB of the state whenever a thread calls a function of Python or C, or returns."""
    count = 0

    def change(*_: object) -> None:
        nonlocal count
        count += 1
        memory[count * 61 % (16 << 10) :: 16 << 10] ^= 1

    threading.setprofile(change)
    sys.setprofile(change)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert count > 100


@contextmanager
def changed_by_a_thread(memory: Bytes) -> Iterator[None]:
    """Write all memory in another thread all the time, other values and zeros."""
    over, begun = threading.Event(), threading.Event()
    original = memory.copy()
    ones = np.random.default_rng(0).integers(0, 2, len(memory), np.uint8)

    def write() -> None:
        while not over.is_set():
            np.bitwise_xor(original, ones, out=memory)
            np.copyto(memory, original)
            memory.fill(0)
            begun.set()

    thread = threading.Thread(target=write)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def assert_intact(path: Path, name: str = "native") -> None:
    """Check a checkpoint with Tensorkeep, and its checksums with the standard library where that can."""
    report = tensorkeep.verify(path)
    assert report, report.problems
    if name == "torch":
        with zipfile.ZipFile(path) as file:
            assert file.testzip() is None


# TensorStore reads the state in threads of its own, which call no function of Python.
IN_PYTHON = [name for name in SAVES if not name.startswith(("tensorstore", "t5x"))]
# The others read as one of these, or as a save in the test of incremental ones.
BETWEEN = ("native", "native incremental", "native lossless", "native zstd", "safetensors shards", "torch", "dcp")


@pytest.mark.parametrize("name", [*BETWEEN, *exhaustive(*(name for name in IN_PYTHON if name not in BETWEEN))])
def test_a_save_verifies_if_the_state_changes_between_any_two_calls(name: str, tmp_path: Path) -> None:
    state, memory = make_state()
    tensorkeep.save({}, tmp_path / "imports what it needs", **SAVES[name])
    with changed_between_calls(memory):
        tensorkeep.save(state, tmp_path / "c", **SAVES[name])
    assert_intact(tmp_path / "c", name)


# One of each format and compression, but those that a save in the background shows as well.
SOME = ["safetensors lossless", "tensorstore ocdbt", "tensorstore zarr 2 gzip", "t5x"]
OTHERS = [name for name in SAVES if name not in SOME]
IN_THE_BACKGROUND = ["native", "native lossless", "safetensors", "torch", "dcp", "tensorstore"]


@pytest.mark.parametrize(
    ("name", "background"),
    [*product(SOME, [False]), *product(IN_THE_BACKGROUND, [True]), *exhaustive(*product(OTHERS, [False]))],
)
def test_a_save_verifies_if_a_thread_writes_all_the_time(name: str, background: bool, tmp_path: Path) -> None:
    state, memory = make_state()
    with changed_by_a_thread(memory):
        if background:
            tensorkeep.save_async(state, tmp_path / "c", **SAVES[name]).wait()
        else:
            tensorkeep.save(state, tmp_path / "c", **SAVES[name])
    assert_intact(tmp_path / "c", name)


@pytest.mark.parametrize(
    ("changing", "options"),
    [
        (changed_between_calls, {}),
        (changed_between_calls, {"compression": "lossless", "delta": True}),
        (changed_by_a_thread, {"compression": "lossless"}),
        *exhaustive((changed_between_calls, {"compression": "lossless"}), (changed_by_a_thread, {})),
        *exhaustive((changed_by_a_thread, {"compression": "lossless", "delta": True})),
    ],
)
def test_an_incremental_save_of_a_changing_state_verifies(changing: Any, options: Any, tmp_path: Path) -> None:
    state, memory = make_state()
    tensorkeep.save(state, tmp_path / "base", incremental=True, **options)
    with changing(memory):
        tensorkeep.save(state, tmp_path / "c", base=tmp_path / "base", **options)
    assert_intact(tmp_path / "base")
    assert_intact(tmp_path / "c")


def test_containers_may_change_during_a_save(tmp_path: Path) -> None:
    state: dict[str, Any] = {"set": set(range(20)), "list": list(range(20)), "ordered": OrderedDict(a=1, b=2)}
    state |= {"dict": {f"key {number}": number for number in range(20)}, "numbers": dict.fromkeys(range(20), 0.5)}
    count = 0

    def change(*_: object) -> None:
        nonlocal count
        count += 1
        for name, key in (("dict", f"new {count % 7}"), ("numbers", -(count % 7)), ("ordered", f"new {count % 7}")):
            if state[name].pop(key, None) is None:
                state[name][key] = 1
        state["set"] ^= {count % 20}
        state["list"].insert(0, state["list"].pop())

    sys.setprofile(change)
    try:
        tensorkeep.save(state, tmp_path / "c")
    finally:
        sys.setprofile(None)
    assert count > 100
    loaded = tensorkeep.load(tmp_path / "c")
    assert {"key 0", "key 1"} <= loaded["dict"].keys()
    assert sorted(loaded["list"]) == list(range(20))


PROCESS = """
import sys, numpy
memory = numpy.memmap(sys.argv[1], numpy.uint8, "r+")
print("mapped", flush=True)
while True:
    numpy.add(memory, 1, out=memory)
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", ["native", "tensorstore", *exhaustive("native lossless", "safetensors", "torch", "dcp")]
)
def test_a_save_verifies_if_another_process_writes_all_the_time(name: str, tmp_path: Path) -> None:
    size = 1 << 20
    (tmp_path / "shared").write_bytes(bytes(4 * size))
    tensor = torch.from_file(str(tmp_path / "shared"), shared=True, size=size)
    memory = tensor.view(torch.uint8).numpy()
    with subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path / "shared")], stdout=subprocess.PIPE) as process:
        process.stdout.readline()

        def wait_for_change(*_: object) -> None:
            before = memory[0]
            while memory[0] == before:
                time.sleep(0.001)

        tensorkeep.save({"shared": tensor}, tmp_path / "c", **SAVES[name], progress=wait_for_change)
        process.kill()
    assert_intact(tmp_path / "c", name)
