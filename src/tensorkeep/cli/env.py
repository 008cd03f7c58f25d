"""``tensorkeep env``: versions, hardware and file system, for a bug report or before a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorkeep import machine
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import printable
from tensorkeep.units import format_bytes


def env(*, path: Path = Path(), output: Output = DEFAULT) -> int:
    """Show versions, hardware and file system, for a bug report.

    Parameters
    ----------
    path
        The folder whose file system is shown; a small file is written there and removed.
    """
    document = machine.describe(path)
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
    phrases = [
        f"{format_bytes(found[key])} {what}"
        for key, what in (("total_bytes", "in all"), ("available_bytes", "available"), ("limit_bytes", "at most here"))
        if found[key] is not None
    ]
    return ", ".join(phrases) or "unknown"


def _storage(found: dict[str, Any]) -> list[tuple[str, str]]:
    direct = {True: "yes", False: "no: checkpoints go through the page cache"}.get(
        found["direct_io"], f"unknown: {found['problem']}"
    )
    return [
        ("folder", found["path"]),
        ("file system", f"{found['file_system'] or 'unknown'}, mounted at {found['mount_point'] or '?'}"),
        ("free space", f"{format_bytes(found['free_bytes'])} of {format_bytes(found['total_bytes'])}"),
        ("direct I/O", direct),
    ]
