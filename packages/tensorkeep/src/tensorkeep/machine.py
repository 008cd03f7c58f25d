"""This machine. Every function reads afresh, because limits and free memory change."""

import ctypes
import errno
import mmap
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from tensorkeep.errors import NotFoundError, UnsupportedError

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PACKAGES = ("tensorkeep", "torch", "numpy", "ml_dtypes", "safetensors", "zstandard", "xxhash", "msgspec")
_PEERS = ("tensorstore", "orbax-checkpoint", "jax", "zipnn")


def describe(path: Path) -> dict[str, Any]:
    """Describe this machine; a small file is written in ``path`` and removed. Raises the errors of `storage`."""
    return {
        "versions": versions(),
        "processor": processor(),
        "memory": memory(),
        "devices": devices(),
        "storage": storage(path),
    }


def versions() -> dict[str, str | None]:
    """None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "kernel": platform.release()}
    for package in (*_PACKAGES, *_PEERS):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


# Processors


def processor() -> dict[str, Any]:
    names = (line.partition(":")[2].strip() for line in _lines(_PROC / "cpuinfo") if line.startswith("model name"))
    return {
        "model": next(names, platform.machine()),
        "cores": os.cpu_count(),
        "usable_cores": len(usable_processors()),
    }


@cache
def multiplies_bfloat16_fast(*, proc: Path = _PROC) -> bool:
    """Whether matmuls in bfloat16 are faster than in float32, judged by the features that the CPU lists."""
    # Faster: AMX, bf16 of Arm, and avx512_bf16 of AMD. avx512_bf16 of Intel, without AMX, takes twice as long as
    # float32. Without such instructions bfloat16 is converted.
    fields = dict(line.split(":", 1) for line in _lines(proc / "cpuinfo") if ":" in line)
    found = {name.strip(): value.split() for name, value in fields.items()}
    features = {*found.get("flags", ()), *found.get("Features", ())}
    amd = found.get("vendor_id") == ["AuthenticAMD"]
    return "amx_bf16" in features or "bf16" in features or (amd and "avx512_bf16" in features)


def thread_wait_seconds(*, own: bool = False, proc: Path = _PROC) -> float:
    """Seconds that all threads, or only the caller, have waited for a processor; 0 if not counted."""
    tasks = [proc / "thread-self"] if own else (proc / "self" / "task").iterdir()
    waits = (next(iter(_lines(task / "schedstat")), "").split() for task in tasks)
    # The second field: nanoseconds on the run queue (Documentation/scheduler/sched-stats).
    return sum(int(fields[1]) for fields in waits if len(fields) == 3) / 1e9


def usable_processors() -> set[int]:
    # Not the number of cores: a container or `taskset` may allow fewer.
    return os.sched_getaffinity(0)


def physical_cores(processors: Iterable[int], *, cpus: Path = _CPUS) -> set[int]:
    """One of the given logical processors per physical core; the others are hyper-threads."""
    first_of_core: dict[str, int] = {}
    for number in sorted(processors):
        siblings = _lines(cpus / f"cpu{number}" / "topology" / "thread_siblings_list")
        first_of_core.setdefault(siblings[0] if siblings else str(number), number)
    return set(first_of_core.values())


def thread_ids() -> list[int]:
    """The kernel's ids of all threads of this process, with the threads of libraries."""
    return [int(task.name) for task in (_PROC / "self" / "task").iterdir()]


# Memory


def memory() -> dict[str, Any]:
    """``limit_bytes`` is the smallest limit of the process's control groups, None without a limit."""
    huge_pages = next(iter(_lines(_HUGE_PAGES)), "")
    return {
        "total_bytes": _sizes(_PROC / "meminfo").get("MemTotal"),
        "available_bytes": available_bytes(),
        "limit_bytes": min((limit for limit, _ in _group_limits(_PROC, _GROUPS)), default=None),
        "transparent_huge_pages": huge_pages.partition("[")[2].partition("]")[0] or None,
    }


def available_bytes(*, proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Memory that this process can still allocate: ``MemAvailable``, or what a control group has left."""
    unused = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
    left = [max(0, limit - used) for limit, used in _group_limits(proc, groups)]
    return min([_sizes(proc / "meminfo").get("MemAvailable", unused), *left])


def memory_limit(*, proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """The most memory that this process can ever have: the machine's, or a control group's limit."""
    physical = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    return min([physical, *(limit for limit, _ in _group_limits(proc, groups))])


def resident_bytes() -> int:
    """Raises UnsupportedError if the kernel does not report ``VmRSS``."""
    sizes = _sizes(_PROC / "self" / "status")
    if "VmRSS" not in sizes:
        raise UnsupportedError("the kernel does not report VmRSS", path=_PROC / "self" / "status")
    return sizes["VmRSS"]


def peak_resident_bytes(*, proc: Path = _PROC) -> int:
    """The most resident memory since the start or the last `reset_peak_resident` (``VmHWM``)."""
    # getrusage is the second choice: it begins with the peak of the parent process.
    rusage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return _sizes(proc / "self" / "status").get("VmHWM", rusage)


def reset_peak_resident() -> None:
    """Let `peak_resident_bytes` start again from the present; UnsupportedError if refused."""
    try:
        # Writing 5 resets the peak resident size (proc(5)).
        (_PROC / "self" / "clear_refs").write_text("5")
    except OSError as error:
        raise UnsupportedError(f"peak memory cannot be measured here: {error.strerror}") from error


def family(process: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for place in _PROC.iterdir():
        if place.name.isdecimal():
            # The name of the program is in brackets, and may contain brackets and blanks.
            fields = "".join(_lines(place / "stat")).rpartition(")")[2].split()
            if len(fields) > 1:
                children.setdefault(int(fields[1]), []).append(int(place.name))
    # The list grows while it is read, until no process has further children.
    found = [process]
    for each in found:
        found += children.get(each, [])
    return found


def private_bytes(process: int) -> int:
    """The memory of a process without mapped files; 0 if the process has ended."""
    sizes = _sizes(_PROC / str(process) / "status")
    return sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0)


def written_bytes(pid: int | None = None) -> int:
    """Bytes that a process, by default this one, has written; UnsupportedError if the kernel counts none."""
    path = _PROC / ("self" if pid is None else str(pid)) / "io"
    for line in _lines(path):
        name, _, count = line.partition(": ")
        if name == "write_bytes":
            return int(count)
    raise UnsupportedError("the kernel does not count what is written", path=path)


# Limits above this mean no limit: version 1 of control groups reports a number just below 2**63.
_NO_LIMIT = 2**60

# Control groups version 2, then version 1: the limit, the usage, and the page cache in it that the kernel can drop.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _group_limits(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used bytes) of the process's control groups that have a limit."""
    for folder in _group_folders(proc, groups):
        for limit_file, usage_file, cache_name in _GROUP_FILES:
            limit, usage = (next(iter(_lines(folder / name)), "") for name in (limit_file, usage_file))
            if limit.isdigit() and usage.isdigit() and int(limit) < _NO_LIMIT:
                statistics = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat"))
                # The kernel drops inactive cache before it refuses memory, so the cache is not used up.
                yield int(limit), int(usage) - int(statistics.get(cache_name, 0))


def _group_folders(proc: Path, groups: Path) -> Iterator[Path]:
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        # Version 2 has no controllers in this file; in version 1, other controllers have other groups.
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        place = PurePosixPath(path.lstrip("/"))
        # In a container, the root is the group's own folder.
        # Path.is_dir() would raise PermissionError for a folder without search permission.
        yield from (root / group for group in (place, *place.parents) if os.path.isdir(root / group))


# GPUs and file systems


def devices() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": device.name, "total_bytes": device.total_memory} for device in found]


def storage(path: Path) -> dict[str, Any]:
    """A folder's file system; ``direct_io`` is None, with a ``problem``, if writing fails. Raises NotFoundError."""
    if not path.is_dir():
        raise NotFoundError("there is no such folder", path=path, remedy="give an existing folder with --path")
    usage = shutil.disk_usage(path)
    file_system, mount_point = _mount(path.resolve())
    direct, problem = _direct_io(path)
    return {
        "path": str(path.resolve()),
        "file_system": file_system,
        "mount_point": mount_point,
        "total_bytes": usage.total,
        "free_bytes": usage.free,
        "direct_io": direct,
        "problem": problem,
    }


def lock_holder(fd: int) -> int | None:
    """The process that holds the ``flock`` of an open file; None if the kernel does not list it."""
    status = os.fstat(fd)
    # The kernel writes the device in hexadecimal, and the inode in decimal.
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    locks = (line.split() for line in _lines(_PROC / "locks"))
    return next((int(lock[4]) for lock in locks if len(lock) > 5 and lock[1] == "FLOCK" and lock[5] == file), None)


def _direct_io(folder: Path) -> tuple[bool | None, str | None]:
    # Opening is not enough: some file systems accept the flag and refuse the first write.
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tensorkeep-env-") as scratch:
            fd = os.open(Path(scratch) / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            try:
                # A mapping is page-aligned, as direct writes need.
                os.pwrite(fd, mmap.mmap(-1, mmap.PAGESIZE), 0)
            finally:
                os.close(fd)
    except OSError as error:
        return (False, None) if error.errno == errno.EINVAL else (None, error.strerror)
    return True, None


def _mount(path: Path) -> tuple[str | None, str | None]:
    best: tuple[str | None, str | None] = (None, None)
    longest = -1
    for line in _lines(_PROC / "self" / "mountinfo"):
        left, _, right = line.partition(" - ")
        # The kernel escapes blanks and backslashes in octal.
        point = left.split()[4].encode("latin-1", "backslashreplace").decode("unicode_escape")
        # A later mount at the same place hides the earlier one.
        if path.is_relative_to(point) and len(point) >= longest:
            longest, best = len(point), (right.split()[0], point)
    return best


_MFD_CLOEXEC = 1


@cache
def libc() -> ctypes.CDLL:
    """``ctypes.get_errno()`` has the error of a call."""
    return ctypes.CDLL(None, use_errno=True)


def memory_file() -> int:
    """A new, unnamed file in memory; OSError if the kernel refuses."""
    # Not os.memfd_create: a Python built for an older C library, such as conda's and uv's, does not have it.
    fd: int = libc().memfd_create(b"tensorkeep", _MFD_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def _sizes(path: Path) -> dict[str, int]:
    """The sizes that a file of the proc file system lists in kB, as bytes by name."""
    lines = (line.replace(":", " ").split() for line in _lines(path))
    return {words[0]: int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}


def _lines(path: Path) -> list[str]:
    # Some of these files are missing in old kernels and in containers.
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
