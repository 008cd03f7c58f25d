"""What steps free is kept: no page of it is fetched again."""

import os
import subprocess
import sys

import pytest

from tensorkeep.machine import libc

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not hasattr(libc(), "mallopt"), reason="this C library has no mallopt"),
]

# glibc by itself keeps blocks that are no larger than one that was freed before, at some places of its heap.
PROGRAM = """
import resource, sys
from importlib import import_module
from chatgot.step.cpu import keep_freed_memory

library = import_module(sys.argv[1])
sizes = iter(range(400_000, 800_000, 1024))

def faults_per_array():
    for _ in range(10):
        library.ones(next(sizes), dtype=library.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        library.ones(next(sizes), dtype=library.float32)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 100

fresh = faults_per_array()
keep_freed_memory()
print(fresh, faults_per_array())
"""


def faults_per_array(library: str, **environment: str) -> list[float]:
    """Return how many page faults a new array of 1.6 MB takes, and how many after freed memory is kept."""
    kept_out = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
    own = {name: value for name, value in os.environ.items() if name not in kept_out}
    command = [sys.executable, "-c", PROGRAM, library]
    found = subprocess.run(command, env=own | environment, check=True, capture_output=True).stdout
    return [float(each) for each in found.split()]


# Both take memory from the C library; numpy is imported in a tenth of the time.
@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=pytest.mark.exhaustive)])
def test_freed_memory_is_used_again(library: str) -> None:
    fresh, kept = faults_per_array(library)
    assert fresh > 50, "this C library keeps freed memory by itself"
    assert kept < fresh / 10


def test_what_the_user_chose_remains() -> None:
    _, kept = faults_per_array("numpy", MALLOC_MMAP_THRESHOLD_="65536")
    assert kept > 50
