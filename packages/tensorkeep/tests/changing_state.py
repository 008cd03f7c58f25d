"""A state that other threads and processes change while it is saved; used by the tests of each package's formats."""

import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tensorkeep
from tensorkeep.state.leaf import Bytes


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


def check_beside_a_thread(tmp_path: Path, name: str, options: dict[str, Any], *, background: bool) -> None:
    """Check a save, at once or in the background, beside a thread that writes all the time."""
    state, memory = make_state()
    with changed_by_a_thread(memory):
        if background:
            tensorkeep.save_async(state, tmp_path / "c", **options).wait()
        else:
            tensorkeep.save(state, tmp_path / "c", **options)
    assert_intact(tmp_path / "c", name)


PROCESS = """
import sys, numpy
memory = numpy.memmap(sys.argv[1], numpy.uint8, "r+")
print("mapped", flush=True)
while True:
    numpy.add(memory, 1, out=memory)
"""


def check_beside_a_process(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Check a save of shared memory beside a process that writes there all the time."""
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

        tensorkeep.save({"shared": tensor}, tmp_path / "c", **options, progress=wait_for_change)
        process.kill()
    assert_intact(tmp_path / "c", name)
