"""What steps free is kept: no page of it is fetched again."""

import os
import subprocess
import sys

import pytest

from tensorkeep.machine import libc

PROGRAM = """
import resource, sys
import torch
from tensorkeep.train.memory.freed import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

# glibc by itself keeps blocks that are no larger than one that was freed before, at some places of its heap.
sizes = iter(range(400_000, 800_000, 1024))
for _ in range(10):
    torch.ones(next(sizes))
before = faults()
for _ in range(100):
    torch.ones(next(sizes))
print((faults() - before) / 100)
"""


def faults_per_tensor(way: str, **environment: str) -> float:
    """Return how many page faults a new tensor of 1.6 MB takes."""
    command = [sys.executable, "-c", PROGRAM, way]
    kept_out = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
    own = {name: value for name, value in os.environ.items() if name not in kept_out}
    return float(subprocess.run(command, env=own | environment, check=True, capture_output=True).stdout)


@pytest.mark.skipif(not hasattr(libc(), "mallopt"), reason="this C library has no mallopt")
def test_freed_memory_is_used_again() -> None:
    fresh = faults_per_tensor("fresh")
    assert fresh > 50, "this C library keeps freed memory by itself"
    assert faults_per_tensor("kept") < fresh / 10


@pytest.mark.skipif(not hasattr(libc(), "mallopt"), reason="this C library has no mallopt")
def test_what_the_user_chose_remains() -> None:
    assert faults_per_tensor("kept", MALLOC_MMAP_THRESHOLD_="65536") > 50
