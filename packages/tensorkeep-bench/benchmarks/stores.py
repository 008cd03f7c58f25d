"""Saves to an object store and loads from it, beside what obstore alone moves: ``make bench-stores``.

The store is localbucket on this machine, which keeps objects as files; it and the client share the processors. Each
figure that must be reached is one line with PASS or MISS; raw samples and the environment go to a JSON file.

* A save and a load of raw weights, against uploads and ranged reads of as many bytes by obstore, in parts of that size.
* The most memory that a save and a load take besides the state, against the budget.
* The bytes that a slice of a large tensor moves, against those of its blocks.
* How much slower training steps are during an upload at 100 MB/s, against a save to the local disk.
"""

import argparse
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import obstore
import torch
from obstore.store import S3Store

import figures
import tensorkeep
from link import link_to
from peak_memory import COMPRESSIONS, INTERPRETER_ALLOWANCE, measure_peak
from tensorkeep.checkpoint.options import STORE_THREADS
from tensorkeep.paths import StorePath
from tensorkeep.storage.buffers import DEFAULT_BUDGET
from tensorkeep.storage.object_store import part_bytes
from tensorkeep_bench.checkpoint.files import check_capacity
from tensorkeep_bench.checkpoint.models import build, spec_of_size

SEED = 20_261_123
BUCKET = "bench"
BLOCK_BYTES = 16 * 1024**2
PART_BYTES = part_bytes(0)
PARTS_AT_ONCE = 8
"""Parts of one object that are on their way, for Tensorkeep as well as for obstore alone."""

LINK_RATE = 100e6


def main() -> int:
    place = "a folder on the disk for objects and local saves"
    options = figures.parser_of(__doc__, rounds=7, folder=place, size="1GB", parts=PARTS).parse_args()
    check_capacity(options.dir, disk=5 * options.size, memory=4 * options.size + 4 * DEFAULT_BUDGET)
    return figures.run_parts("stores.py", PARTS, options)


class Server(NamedTuple):
    """A running localbucket: its port, and the folder with its objects."""

    port: int
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def objects(self) -> Path:
        """The folder of the bucket."""
        return self.folder / "objects" / BUCKET

    def clear(self) -> None:
        """Remove all objects."""
        for path in self.objects.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """Run localbucket with an empty bucket, at the lowest priority; Tensorkeep and obstore use it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    store = Server(port, folder)
    store.objects.mkdir(parents=True)
    command = ["nice", "-n", "19", sys.executable, "-m", "localbucket", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, str(store.objects.parent)], stdout=log, stderr=log)
    use(store.url)
    os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench", AWS_REGION="us-east-1")
    try:
        end = time.monotonic() + 60
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"localbucket did not start: {(folder / 'log').read_text()}")
            time.sleep(0.05)
        yield store
    finally:
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def use(url: str) -> None:
    """Let Tensorkeep use a server from now on."""
    os.environ["AWS_ENDPOINT_URL"] = url


def client(url: str) -> S3Store:
    """Return obstore's client for the bucket at a server."""
    return S3Store(BUCKET, endpoint=url, client_options={"allow_http": True})


# Saves and loads


def transfers(store: Server, options: argparse.Namespace) -> figures.Samples:
    """Return the seconds of saves and loads by kind and round; the first round is not counted."""
    state = build(spec_of_size(options.size), seed=SEED)
    content = np.concatenate([tensor.view(torch.uint8).flatten().numpy() for tensor in state.values()])
    alone = client(store.url)

    def put() -> None:
        parts = (content[start : start + PART_BYTES] for start in range(0, content.size, PART_BYTES))
        obstore.put(alone, "alone", parts, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def get() -> None:
        def read(start: int) -> int:
            return len(obstore.get_range(alone, "alone", start=start, length=min(BLOCK_BYTES, content.size - start)))

        with ThreadPoolExecutor(STORE_THREADS) as pool:
            assert sum(pool.map(read, range(0, content.size, BLOCK_BYTES))) == content.size

    arms: dict[str, Callable[[], object]] = {
        "obstore": put,
        "tensorkeep": lambda: tensorkeep.save(state, f"s3://{BUCKET}/raw"),
        "lossless": lambda: tensorkeep.save(state, f"s3://{BUCKET}/lossless", compression="lossless"),
    }
    loads: dict[str, Callable[[], object]] = {
        "obstore": get,
        "tensorkeep": lambda: tensorkeep.load(f"s3://{BUCKET}/raw", into=state),
        "lossless": lambda: tensorkeep.load(f"s3://{BUCKET}/lossless", into=state),
    }
    samples: figures.Samples = {f"{kind} {name}": [] for kind in ("save", "load") for name in arms}
    draw = random.Random(SEED)
    for number in range(options.rounds + 1):
        store.clear()
        for kind, calls in (("save", arms), ("load", loads)):
            for name in draw.sample([*calls], len(calls)):
                os.sync()
                seconds = figures.seconds_of(calls[name])
                if number:
                    samples[f"{kind} {name}"].append(seconds)
    return samples


def transfer_lines(samples: figures.Samples) -> Iterator[figures.Line]:
    """Return rates against those of obstore alone."""
    for kind, what in (("save", "a save, against uploads by obstore"), ("load", "a load, against reads by obstore")):
        yield figures.ratio_line(f"{what}, raw", 0.9, samples, f"{kind} obstore", f"{kind} tensorkeep")
        yield figures.ratio_line(f"{what}, lossless", None, samples, f"{kind} obstore", f"{kind} lossless")


# Memory


def memory(store: Server, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the most memory of saves and loads besides the state, by compression, in processes of their own."""
    found = {}
    for compression in COMPRESSIONS:
        place = StorePath(f"s3://{BUCKET}/memory-{compression}")
        size = max(options.size, 2 * DEFAULT_BUDGET)
        found[compression] = asdict(measure_peak(compression, "contiguous", DEFAULT_BUDGET, size, place))
    return found


def memory_lines(samples: dict[str, dict[str, Any]]) -> Iterator[figures.Line]:
    """Return megabytes against the budget."""
    for compression, found in samples.items():
        most = max(found[each] for each in ("save", "load", "load_into"))
        bound = (found["budget"] + INTERPRETER_ALLOWANCE) / 1e6
        what = f"peak memory beyond the state, {'raw' if compression == 'none' else compression}"
        yield figures.Line(what, bound, most / 1e6, unit="MB", at_most=True)


# Slices


def slices(store: Server, options: argparse.Namespace) -> figures.Samples:
    """Return the bytes that a slice moves, opening included, and those of its blocks, for slices of several sizes."""
    rows = torch.arange(64 * 1024**2, dtype=torch.float32).reshape(-1, 4096)  # 256 MiB
    tensorkeep.save({"w": rows}, f"s3://{BUCKET}/slices")
    per_block = BLOCK_BYTES // (4 * rows.shape[1])
    samples: figures.Samples = {"moved": [], "blocks": []}
    with link_to(store.port, float("inf")) as link:
        use(link.url)
        for blocks in (1, 2, 4):
            before = link.moved()[1]
            with tensorkeep.open(f"s3://{BUCKET}/slices") as checkpoint:
                chosen = slice(3 * per_block + 5, (3 + blocks) * per_block - 5)
                assert torch.equal(checkpoint["w"][chosen], rows[chosen])
            samples["moved"].append(link.moved()[1] - before)
            samples["blocks"].append(blocks * BLOCK_BYTES)
        use(store.url)
    return samples


def slice_lines(samples: figures.Samples) -> Iterator[figures.Line]:
    """Return moved bytes against those of the blocks."""
    yield figures.ratio_line(
        "bytes moved by a slice / bytes of its blocks", 1.2, samples, "moved", "blocks", at_most=True
    )


# Training beside an upload


def training(store: Server, options: argparse.Namespace) -> figures.Samples:
    """Return the median seconds of a training step: alone, and beside saves to the disk, to the store and elsewhere.

    ``tier`` is a save to the disk and the upload behind it.

    Training has one thread, so that a processor is left for the server, which in use is another machine.
    """
    torch.set_num_threads(1)
    state = build(spec_of_size(options.size), seed=SEED)
    step = figures.training_step(batch=128)
    samples: figures.Samples = {
        name: [] for name in ("alone", "local", "upload", "tier", "elsewhere", "upload seconds")
    }
    draw = random.Random(SEED)
    with link_to(store.port, LINK_RATE) as link, _uploads_elsewhere(link.url, options.size) as elsewhere:
        use(link.url)
        local = tensorkeep.CheckpointManager(store.folder / "run", keep_last=1)
        remote = tensorkeep.CheckpointManager(f"s3://{BUCKET}/run")
        tiered = tensorkeep.CheckpointManager(f"s3://{BUCKET}/tiered", local=store.folder / "tier", keep_local=1)

        def save_by(manager: tensorkeep.CheckpointManager) -> Callable[[int], Callable[[], bool]]:
            def begin(number: int) -> Callable[[], bool]:
                pending = manager.save(number, state)
                return lambda: not pending.done() or any(each.state != "failed" for each in manager.uploads())

            return begin

        managers = {"local": local, "upload": remote, "tier": tiered}
        arms = {
            "alone": lambda number: figures.for_seconds(2.0),
            **{name: save_by(each) for name, each in managers.items()},
            "elsewhere": elsewhere,
        }
        for number in range(options.rounds + 1):
            for name in draw.sample([*arms], len(arms)):
                busy = arms[name](number)
                begin = time.perf_counter()
                median = figures.median_step(step, busy)
                if number:
                    samples[name].append(median)
                    if name == "upload":
                        samples["upload seconds"].append(time.perf_counter() - begin)
            store.clear()
        for manager in managers.values():
            manager.close()
        use(store.url)
    return samples


_ELSEWHERE = """
import sys, numpy, obstore
from obstore.store import S3Store
url, bucket, size, part, at_once = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
store = S3Store(bucket, endpoint=url, client_options={"allow_http": True})
content = numpy.random.default_rng(1).bytes(part)
print("[]", flush=True)
for _ in sys.stdin:
    parts = (content for _ in range(0, size, part))
    obstore.put(store, "elsewhere", parts, use_multipart=True, chunk_size=part, max_concurrency=at_once)
    print("[]", flush=True)
"""


@contextmanager
def _uploads_elsewhere(url: str, size: int) -> Iterator[Callable[[int], Callable[[], bool]]]:
    """Run a process in which obstore uploads as many bytes; yield a function that begins an upload."""
    words = [url, BUCKET, str(size), str(PART_BYTES), str(PARTS_AT_ONCE)]
    worker = figures.Worker(sys.executable, "-c", _ELSEWHERE, *words)
    worker.answer()
    with ThreadPoolExecutor(1) as reader:

        def begin(number: int) -> Callable[[], bool]:
            worker.send()
            answer = reader.submit(worker.answer)
            return lambda: not answer.done()

        yield begin
    worker.close()


def training_lines(samples: figures.Samples) -> Iterator[figures.Line]:
    """Return ratios of the medians of steps."""
    what = {
        "local": "a local save",
        "upload": "an upload",
        "tier": "a local save and its upload",
        "elsewhere": "an upload by obstore in another process",
    }
    for name in ("upload", "tier"):
        ratio = figures.ratios(samples, name, "local")
        yield figures.Line(f"training step beside {what[name]} / beside a local save", 1.05, *ratio, at_most=True)
    for name, words in what.items():
        yield figures.ratio_line(f"training step beside {words} / alone", None, samples, name, "alone")


def served(part: Callable[[Server, argparse.Namespace], Any]) -> Callable[[Path, argparse.Namespace], Any]:
    """Return a part that starts a server for itself."""

    def measure(folder: Path, options: argparse.Namespace) -> Any:
        with server(folder) as store:
            return part(store, options)

    return measure


PARTS: dict[str, figures.Part] = {
    "transfers": (served(transfers), transfer_lines),
    "memory": (served(memory), memory_lines),
    "slices": (served(slices), slice_lines),
    "training": (served(training), training_lines),
}

if __name__ == "__main__":
    sys.exit(main())
