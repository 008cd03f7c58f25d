"""Many writers race for one name in a store: one wins, and the error of the others names it."""

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from faults.stores.buckets import Bucket
from forked import ended, start
from store_servers import FaultAt
from tensorkeep import CheckpointManager
from tensorkeep.storage.store_commit import save_of
from tiers import exhaustive

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

PROCESSES = THREADS = 4


def state(number: int) -> dict[str, Any]:
    return {"w": torch.full((3000,), float(number)), "writer": number}


def save(url: str, number: int, *, overwrite: bool = False) -> None:
    tensorkeep.save(state(number), url, metadata={"writer": number}, overwrite=overwrite, threads=1)


def step(url: str, number: int) -> None:
    with CheckpointManager(url, asynchronous=False, threads=1) as manager:
        try:
            manager.save(5, state(number))
        except tensorkeep.DestinationExistsError:
            assert manager.restore()["writer"] != number
            raise


WAYS = {"save": save, "replace": partial(save, overwrite=True), "step": step}


def write_in_process(way: str, url: str, first: int, environment: Mapping[str, str], folder: Path) -> None:
    """Let some threads save at once, when all processes are ready; print how each save ended."""
    os.environ.update(environment)
    with suppress(tensorkeep.NotACheckpointError):
        tensorkeep.load(f"{url}-nothing")
    barrier = threading.Barrier(THREADS)

    def write(number: int) -> None:
        barrier.wait()
        error = None
        try:
            WAYS[way](url, number)
        except Exception as raised:
            error = (type(raised).__name__, str(raised))
        os.write(1, json.dumps([number, error]).encode() + b"\n")

    threads = [threading.Thread(target=write, args=(first + each,)) for each in range(THREADS)]
    (folder / f"ready-{first}").touch()
    while not (folder / "go").exists():
        time.sleep(0.001)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def race(bucket: Bucket, way: str, url: str, folder: Path, *, disturbed: bool) -> dict[int, tuple[str, str] | None]:
    """Run 16 writers, and return by their number how each ended: None, or the class and the text of its error."""
    folder.mkdir()
    environment = bucket.environment(disturbed=disturbed)
    output = folder / "output"
    processes = [
        start(write_in_process, way, url, first * THREADS, environment, folder, output=output)
        for first in range(PROCESSES)
    ]
    while len([*folder.glob("ready-*")]) < PROCESSES and all(process.is_alive() for process in processes):
        time.sleep(0.005)
    (folder / "go").touch()
    assert [ended(process) for process in processes] == [0] * PROCESSES, output.read_text()
    found = dict(map(json.loads, output.read_text().splitlines()))
    assert len(found) == PROCESSES * THREADS
    return found


@pytest.mark.parametrize(
    ("way", "lost", "rounds"),
    [
        *[("save", 4, 1), ("step", 0, 1), ("replace", 0, 1)],
        *exhaustive(("save", 0, 20), ("save", 4, 20), ("step", 0, 20), ("step", 4, 20), ("replace", 0, 20)),
    ],
)
def test_one_of_16_wins_and_the_others_name_it_and_replacements_leave_a_whole_checkpoint(
    tmp_path: Path, bucket: Bucket, way: str, lost: int, rounds: int, record_property: Any
) -> None:
    """The answers to the first ``lost`` commits are lost."""
    for number in range(rounds):
        url = f"{bucket.url}/{number}/ckpt"
        if way == "replace":
            save(url, 99)
        place = f"{url}/step-000005" if way == "step" else url
        fault = FaultAt("lost", f"PUT {place.removeprefix('s3:/')}/manifest.json", lost)
        bucket.proxy.start_again(fault)
        found = race(bucket, way, url, tmp_path / str(number), disturbed=bool(lost))
        winners = [writer for writer, error in found.items() if error is None]
        # A replacement that began after another had committed replaces it in turn.
        assert len(winners) == 1 or way == "replace", found
        assert fault.left == 0, "fewer answers were lost"
        assert tensorkeep.load(place)["writer"] in winners
        for kind, text in filter(None, found.values()):
            assert kind == "DestinationExistsError"
            assert text.startswith(place)
        # A manifest whose request was repeated may still appear, and keeps its objects.
        assert len({*map(save_of, bucket.leftovers())}) <= max(0, lost - 1)
        bucket.clear()
    record_property("cases", rounds)
