"""A child that was forked from a process that uses a store is refused, and does not hang; its parent continues."""

import os
import select
import signal
from collections.abc import Callable
from functools import partial

import pytest
import torch

import tensorkeep
from faults.stores.buckets import Bucket
from faults.stores.calls import NEW, OLD
from tensorkeep import CheckpointManager
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same

pytestmark = pytest.mark.integration


def manager_of(url: str) -> CheckpointManager:
    return CheckpointManager(f"{url}-run")


CALLS: dict[str, Callable[[str], object]] = {
    "save": lambda url: tensorkeep.save(NEW, url, overwrite=True),
    "save_async": lambda url: tensorkeep.save_async(NEW, url, overwrite=True).wait(),
    "manager": lambda url: manager_of(url).save(1, NEW).wait(),
    "steps": lambda url: manager_of(url).steps(),
    "restore": lambda url: manager_of(url).restore(),
    "load": tensorkeep.load,
    "verify": tensorkeep.verify,
}


def error_in_child(call: Callable[[], object]) -> str:
    """Do something in a forked child, which may take a minute; return its error of this package."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
        except tensorkeep.TensorkeepError as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        in_time = select.select([answer], [], [], 60)[0]
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert in_time, "the child hangs"
        return answer.read()


def test_it_is_refused(bucket: Bucket) -> None:
    url = f"{bucket.url}/ckpt"
    tensorkeep.save(OLD, url)
    for name, call in CALLS.items():
        with case(name):
            error = error_in_child(partial(call, url))
            assert error.startswith(f"UnsupportedError: {url}"), error
            assert "was forked from one that has used an object store" in error
    assert same(tensorkeep.load(url), OLD)


def test_a_background_save_continues_in_the_parent(bucket: Bucket) -> None:
    url = f"{bucket.url}/ckpt"
    state = {"w": torch.arange(2**20, dtype=torch.float32)}
    pending = tensorkeep.save_async(state, url)
    assert "was forked" in error_in_child(lambda: tensorkeep.save(NEW, url, overwrite=True))
    pending.wait()
    assert same(tensorkeep.load(url), state)
