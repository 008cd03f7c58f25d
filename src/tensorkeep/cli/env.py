"""``tensorkeep env``: versions, hardware and file system."""

from pathlib import Path
from typing import Any

from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import printable
from tensorkeep.machine import describe
from tensorkeep.units import format_bytes


def env(*, path: Path = Path(), output: Output = DEFAULT) -> int:
    """Show versions, hardware and file system, for a bug report.

    Parameters
    ----------
    path
        The folder whose file system is shown; a small file is written there and removed.
    """
    document = describe(path)
    output.show(document, lambda: _print_environment(document))
    return 0


def _print_environment(document: dict[str, Any]) -> None:
    lines = [(name, version or "not installed") for name, version in document["versions"].items()]
    lines += [
        ("cpu", _processor(document["processor"])),
        ("memory", _memory(document["memory"])),
        ("huge pages", document["memory"]["transparent_huge_pages"] or "unknown"),
    ]
    lines += [("device", f"{d['name']}, {format_bytes(d['total_bytes'])}") for d in document["devices"]] or [
        ("device", "no CUDA device")
    ]
    lines += _storage(document["storage"])
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        print(f"{label.ljust(width)}  {printable(text)}")


def _processor(found: dict[str, Any]) -> str:
    return f"{found['model']}, {found['usable_cores']} of {found['cores']} cores usable"


def _memory(found: dict[str, Any]) -> str:
    sizes = {
        "in all": found["total_bytes"],
        "available": found["available_bytes"],
        "at most here": found["limit_bytes"],
    }
    return ", ".join(f"{format_bytes(size)} {meaning}" for meaning, size in sizes.items() if size is not None)


def _storage(found: dict[str, Any]) -> list[tuple[str, str]]:
    if found["direct_io"] is None:
        direct = f"unknown: {found['problem']}"
    else:
        direct = "yes" if found["direct_io"] else "no: checkpoints go through the page cache"
    return [
        ("folder", found["path"]),
        ("file system", f"{found['file_system'] or 'unknown'}, mounted at {found['mount_point'] or '?'}"),
        ("free space", f"{format_bytes(found['free_bytes'])} of {format_bytes(found['total_bytes'])}"),
        ("direct I/O", direct),
    ]
