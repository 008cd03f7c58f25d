"""Arrays that tests of the format write: ours, those of other programs, and hostile ones."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
import tensorstore as ts


def save(state: Any, path: Path, **options: Any) -> tensorkeep.SaveReport:
    return tensorkeep.save(state, path, format="tensorstore", **options)


def files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def damaged(tmp_path: Path, file: str, damage: Callable[[Path], object], **options: Any) -> Path:
    path = tmp_path / "c"
    save({"w": torch.arange(1.0, 401.0).reshape(20, 20)}, path, chunk=100, **options)
    damage(path / file)
    return path


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def write_array(path: Path, array: Any, driver: str = "zarr3", base: str | None = None) -> None:
    kvstore: Any = {"driver": "file", "path": f"{path}/"}
    if base:
        kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{base}/"}, "path": f"{path}/"}
    spec = {"driver": driver, "kvstore": kvstore}
    ts.open(spec, create=True, dtype=array.dtype, shape=array.shape).result().write(array).result()


def foreign_group(root: Path) -> Path:
    """Make a group of two arrays with zarr v3's metadata, the second in a group of its own."""
    for name in ("w", "deep/b"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_array(root / name, np.arange(4.0, dtype="f4"))
    for place in (root, root / "deep"):
        (place / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    return root


def forbid_listing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make folders of a name unreadable for every user; root ignores permissions."""
    original = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path).rstrip("/").rsplit("/", 1)[-1] == name:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
