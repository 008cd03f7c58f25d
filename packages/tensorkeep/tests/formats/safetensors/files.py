"""Safetensors files that tests write: ours, and headers made by hand."""

import json
from pathlib import Path
from typing import Any

from tensorkeep.formats.base import OpenSettings, WriteSettings
from tensorkeep.formats.safetensors import FORMAT
from tensorkeep.state.tree import flatten
from tensorkeep.testing.format_suite import load


def save(state: Any, path: Path, **settings: Any) -> None:
    FORMAT.write(flatten(state), path, WriteSettings(threads=2, **settings))


def read(path: Path) -> Any:
    with FORMAT.open(path, OpenSettings()) as reader:
        return load(reader)


def raw(path: Path, header: dict[str, Any], data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path
