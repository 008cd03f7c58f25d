"""Memory that a step frees is used again by the next one, instead of being returned to the kernel.

glibc returns large blocks to the kernel when they are freed, and a step frees all of its activations. The next step
gets fresh pages, and the first access to each of them is a page fault: for a tensor of 1.5 MB they can take several
times as long as the operation that writes it, above all in virtual machines. See mallopt(3), "M_MMAP_THRESHOLD" and
"M_TRIM_THRESHOLD". The resident memory of the process stays at its peak.
"""

import os

from tensorkeep.machine import libc

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST_THRESHOLD = 32 << 20
"""Bytes: glibc takes no larger threshold on 64 bits. Larger blocks are always returned."""
_ALL = 2**31 - 1

_CHOSEN_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> None:
    """Let this process keep what it frees, in blocks of up to 32 MiB; for as long as it lives.

    It does nothing with another C library, or if the user has chosen thresholds or an allocator.
    """
    # Not every C library has mallopt.
    if hasattr(libc(), "mallopt") and not any(name in os.environ for name in _CHOSEN_BY_USER):
        libc().mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        libc().mallopt(_TRIM_THRESHOLD, _ALL)
