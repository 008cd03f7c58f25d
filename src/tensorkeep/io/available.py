"""How much memory there is to take: what the kernel gives without swapping, within the limits of control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def available_bytes(*, proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Return the bytes of memory that this process can still take.

    The smaller of ``MemAvailable`` and of what each control group above the process has left, of version 1 or 2; page
    cache that a group would give up counts as left.

    Parameters
    ----------
    proc, groups : Path
        Where the kernel tells of them.
    """
    found = [_fields(proc / "meminfo")["MemAvailable"] * 1024]
    for folder in _folders_of_groups(proc, groups):
        for most, used, cache in _FILES:
            limit, taken = _number(folder / most), _number(folder / used)
            if limit is not None and taken is not None:
                found.append(max(0, limit - taken + _fields(folder / "memory.stat").get(cache, 0)))
    return min(found)


_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _folders_of_groups(proc: Path, groups: Path) -> Iterator[Path]:
    """Yield the folders of the process's groups for memory, and of those above them, as far as they are visible."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        place = PurePosixPath(path.lstrip("/"))
        # In a container the group's own folder is what is mounted as the root.
        for each in (place, *place.parents):
            if (root / each).is_dir():
                yield root / each


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    try:
        words = (line.replace(":", " ").split() for line in path.read_text().splitlines())
        return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdigit()}
    except OSError:
        return {}
