"""What `info` shows of a native checkpoint besides its tensors: which step it is, what is new, what it occupies."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import msgspec

from tensorkeep.formats.blockfile.records import PLACES, Manifest
from tensorkeep.formats.native.space import space_of


def about(manifest: Manifest, statuses: list[os.stat_result]) -> dict[str, Any]:
    """Return plain values, each under the name that `info` shows it by.

    Parameters
    ----------
    manifest : Manifest
    statuses : list of os.stat_result
        Of its files, in their order, and of the manifest itself.
    """
    space = space_of(statuses)
    return {
        "version": manifest.version,
        "writer": manifest.writer,
        **_history(manifest, manifest_bytes=statuses[-1].st_size),
        "compression": manifest.compression,
        "block_bytes": manifest.block_bytes,
        "files": {file.name: file.bytes for file in manifest.files},
        "space": {**asdict(space), "occupied_bytes": space.occupied_bytes},
    }


def _history(manifest: Manifest, *, manifest_bytes: int) -> dict[str, Any]:
    """Return which step of a run it is, and what it shares with earlier checkpoints."""
    found: dict[str, Any] = {}
    if manifest.step is not None:
        found["step"] = msgspec.to_builtins(manifest.step)
    if PLACES in manifest.features:
        linked: dict[str, int] = {}
        for file in manifest.files:
            if file.origin:
                linked[file.origin] = linked.get(file.origin, 0) + file.bytes
        found["history"] = {
            "new_bytes": sum(file.bytes for file in manifest.files if not file.origin) + manifest_bytes,
            "linked_bytes": linked,
            "deepest_chain": max((len(place.bases) for leaf in manifest.leaves for place in leaf.places), default=0),
        }
    return found
