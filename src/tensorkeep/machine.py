"""What of a machine matters to checkpoints: versions, processors, memory, devices, and a folder's file system."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.errors import NotFoundError, StoreError
from tensorkeep.io.buffers import ALIGNMENT, BufferPool
from tensorkeep.io.files import DirectFile

_PACKAGES = ("tensorkeep", "torch", "numpy", "ml_dtypes", "safetensors", "zstandard", "xxhash", "msgspec")
_PEERS = ("tensorstore", "orbax-checkpoint", "jax", "zipnn")


def describe(path: Path) -> dict[str, Any]:
    """Return everything that this module knows, for a bug report or a results file; ``path`` is a folder to write in.

    Raises
    ------
    NotACheckpointError
        If there is no such folder.
    """
    return {
        "versions": versions(),
        "processor": processor(),
        "memory": memory(),
        "devices": devices(),
        "storage": storage(path),
    }


def versions() -> dict[str, str | None]:
    """Return the version of Python, of the kernel and of each package; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "kernel": platform.release()}
    for package in (*_PACKAGES, *_PEERS):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def processor() -> dict[str, Any]:
    """Return the model of the CPU, its cores, and how many of them this process may use."""
    model = platform.machine()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {"model": model, "cores": os.cpu_count(), "usable_cores": len(os.sched_getaffinity(0))}


def memory() -> dict[str, Any]:
    """Return bytes of memory, those available, the control group's limit (None without one), and the THP setting."""
    sizes = {}
    for line in _lines("/proc/meminfo"):
        key, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            sizes[key] = int(rest.removesuffix(" kB")) * 1024
    limit = next(iter(_lines("/sys/fs/cgroup/memory.max")), "max")
    huge = next(iter(_lines("/sys/kernel/mm/transparent_hugepage/enabled")), "")
    return {
        "total_bytes": sizes.get("MemTotal"),
        "available_bytes": sizes.get("MemAvailable"),
        "limit_bytes": int(limit) if limit.isdigit() else None,
        "transparent_huge_pages": huge.partition("[")[2].partition("]")[0] or None,
    }


def devices() -> list[dict[str, Any]]:
    """Return the name and the memory in bytes of each CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": device.name, "total_bytes": device.total_memory} for device in found]


def storage(path: Path) -> dict[str, Any]:
    """Return a folder's file system, its free bytes, and whether it takes direct I/O.

    Attributes of the answer: ``direct_io`` is None, and ``problem`` says why, where nothing can be written.

    Raises
    ------
    NotACheckpointError
        If there is no such folder.
    """
    if not path.is_dir():
        raise NotFoundError("there is no such folder", path=path, remedy="give an existing folder with --path")
    usage = shutil.disk_usage(path)
    direct, problem = _direct_io(path)
    return {
        "path": str(path.resolve()),
        **_mount(path.resolve()),
        "total_bytes": usage.total,
        "free_bytes": usage.free,
        "direct_io": direct,
        "problem": problem,
    }


def _direct_io(path: Path) -> tuple[bool | None, str | None]:
    """Try it: some file systems accept the flag and refuse the first write."""
    try:
        with tempfile.TemporaryDirectory(dir=path, prefix=".tensorkeep-env-") as folder:
            file = DirectFile(Path(folder) / "probe")
            try:
                with BufferPool().acquire(ALIGNMENT) as buffer:
                    buffer[:ALIGNMENT] = np.uint8(0)
                    file.write(0, buffer[:ALIGNMENT])
                return file.direct, None
            finally:
                file.close()
    except (OSError, StoreError) as error:
        return None, error.message if isinstance(error, StoreError) else error.strerror


def _mount(path: Path) -> dict[str, str | None]:
    """Return the type and the mount point of the file system that holds a path."""
    best: dict[str, str | None] = {"file_system": None, "mount_point": None}
    longest = -1
    for line in _lines("/proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        # The kernel writes blanks and backslashes in octal.
        point = left.split()[4].encode().decode("unicode_escape")
        # Of two mounts at one place the later one hides the earlier.
        if path.is_relative_to(point) and len(point) >= longest:
            longest = len(point)
            best = {"file_system": right.split()[0], "mount_point": point}
    return best


def _lines(path: str) -> list[str]:
    # Not every kernel and container has each of these files.
    with suppress(OSError):
        return Path(path).read_text(errors="replace").splitlines()
    return []
