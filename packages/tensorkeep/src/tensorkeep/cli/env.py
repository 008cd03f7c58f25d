"""``tensorkeep env``: versions, the coder in use, hardware and file system."""

from pathlib import Path
from typing import Any

from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import print_lines
from tensorkeep.codecs import coder
from tensorkeep.machine import describe
from tensorkeep.units import format_bytes


def env(*, path: Path = Path(), output: Output = DEFAULT) -> None:
    """Show versions, the coder in use, hardware and file system, for a bug report.

    Parameters
    ----------
    path
        A folder of the file system to show; a small file is written there and removed.
    """
    # The coder is compiled or Python, which explains most reports of slow saves.
    document = {**describe(path), "coder": coder.describe()}
    output.show(document, lambda: _print_environment(document))


def _print_environment(document: dict[str, Any]) -> None:
    processor, memory, storage = document["processor"], document["memory"], document["storage"]
    devices = [f"{each['name']}, {format_bytes(each['total_bytes'])}" for each in document["devices"]]
    sizes = {
        "in all": memory["total_bytes"],
        "available": memory["available_bytes"],
        "at most here": memory["limit_bytes"],
    }
    # A page cache hides the speed of the disk, and takes memory.
    direct = "yes" if storage["direct_io"] else "no: checkpoints go through the page cache"
    lines = [
        *((name, version or "not installed") for name, version in document["versions"].items()),
        ("coder", document["coder"]),
        ("cpu", f"{processor['model']}, {processor['usable_cores']} of {processor['cores']} cores usable"),
        ("memory", ", ".join(f"{format_bytes(size)} {what}" for what, size in sizes.items() if size is not None)),
        ("huge pages", memory["transparent_huge_pages"] or "unknown"),
        *(("device", device) for device in devices or ["no CUDA device"]),
        ("folder", storage["path"]),
        ("file system", f"{storage['file_system'] or 'unknown'}, mounted at {storage['mount_point'] or '?'}"),
        ("free space", f"{format_bytes(storage['free_bytes'])} of {format_bytes(storage['total_bytes'])}"),
        ("direct I/O", f"unknown: {storage['problem']}" if storage["direct_io"] is None else direct),
    ]
    width = max(len(label) for label, _ in lines)
    print_lines(*(f"{label.ljust(width)}  {text}" for label, text in lines))
