"""The tree in T5X's ``checkpoint`` file: parameters by the keys that lead to them, each a value or a pointer.

A parameter that TensorStore wrote is a dict with its ``driver``, ``kvstore`` and ``metadata``. Of these only the name
of the directory is believed; dtype, shape, chunks and compressor are what the directory's ``.zarray`` says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError
from tensorkeep.formats.t5x import flax_msgpack
from tensorkeep.formats.tensorstore.specs import Layout
from tensorkeep.io.directory import Directory

FILE_NAME = "checkpoint"
VERSION = 3
MARK = "tensorkeep"
"""A key beside ``version`` and ``optimizer``, which T5X does not look at: there must be a sidecar."""

_MOST_BYTES = 4 * 1024**3
_PLACEHOLDER = "PLACEHOLDER://"

Keys = tuple[str, ...]


def spec(key: str, layout: Layout, compressor: Any) -> dict[str, Any]:
    """Return the pointer to an array, as T5X writes it."""
    return {
        "driver": "zarr",
        "dtype": layout.dtype.name,
        "kvstore": {"driver": "file", "path": key},
        "metadata": {"shape": list(layout.shape), "chunks": list(layout.chunk), "compressor": compressor},
    }


def is_spec(value: Any) -> bool:
    """Say whether a dict points to an array."""
    return isinstance(value, dict) and "driver" in value and ("kvstore" in value or "path" in value)


def key_of(value: dict[str, Any]) -> str:
    """Return the directory that a pointer names, beside the file.

    Raises
    ------
    UnsupportedError
        If it is no zarr v2 array.
    ValueError
        If it leads elsewhere.
    """
    if value["driver"] != "zarr":
        raise UnsupportedError(f"is kept by TensorStore's driver {value['driver']!r}; T5X writes 'zarr'")
    store = value.get("kvstore")
    path = store.get("path") if isinstance(store, dict) else None
    # Checkpoints written to Google's storage keep it at the top.
    path = path if path is not None else value.get("path")
    if not isinstance(path, str):
        raise ValueError("its pointer names no directory")
    key = path.removesuffix("/")
    # One plain name beside the file: no separator, no parent. What the bucket is called means nothing here.
    if not re.fullmatch(r"(?!\.\.?$)[^/\\\0]{1,255}", key):
        raise ValueError(f"its pointer names {path!r}, which does not lie beside the checkpoint")
    return key


def read(directory: Directory) -> dict[str, Any]:
    """Return the content of a directory's ``checkpoint`` file.

    Raises
    ------
    NotACheckpointError
        If there is none.
    CorruptCheckpointError
        If it is damaged.
    UnsupportedError
        If its version is another.
    """
    path = directory.path / FILE_NAME
    try:
        with directory.open(FILE_NAME, follow_links=False) as file:
            if file.size > _MOST_BYTES:
                raise CorruptCheckpointError(f"{file.size:,} bytes of msgpack are too many", path=path)
            content = file.read(0, file.size)
    except NotACheckpointError as error:
        raise NotACheckpointError("is no T5X checkpoint: it holds no file 'checkpoint'", path=directory.path) from error
    try:
        tree = flax_msgpack.decode(content)
    except (CorruptCheckpointError, UnsupportedError) as error:
        error.path = str(path)
        raise type(error)(error.message, path=path) from error
    if not isinstance(tree, dict) or not isinstance(tree.get("optimizer"), dict):
        raise CorruptCheckpointError("holds no optimizer, so T5X did not write it", path=path)
    if is_spec(tree["optimizer"]) or flax_msgpack.is_chunked(tree["optimizer"]):
        raise CorruptCheckpointError("its optimizer is a single array, where T5X has a tree of them", path=path)
    return tree | {"version": _checked_version(tree.get("version"), path)}


def _checked_version(version: Any, path: Path) -> int:
    if isinstance(version, np.integer):
        version = int(version)
    if type(version) is int and version == VERSION:
        return version
    if not isinstance(version, int | str | None):
        raise UnsupportedError(f"its version is a {type(version).__name__}, not a number", path=path)
    if type(version) is int and version > VERSION:
        raise UnsupportedError(f"is of T5X's version {version}, this release reads {VERSION}", path=path)
    raise UnsupportedError(
        f"is of T5X's version {str(version)[:40]}, which kept bfloat16 as uint16; nobody can tell which is meant",
        path=path,
        remedy="restore it with T5X and save it again; it then is of version 3",
    )


def leaves(tree: dict[str, Any], path: Path) -> Iterator[tuple[Keys, Any]]:
    """Yield what is no dict, or points to an array, with the keys that lead to it; lists whole.

    Raises
    ------
    CorruptCheckpointError
        If a key is no text.
    UnsupportedError
        If a value lies elsewhere, or an array in a list, where T5X never puts one.
    """
    waiting: list[tuple[Keys, Any]] = [((), tree)]
    while waiting:
        keys, value = waiting.pop()
        if isinstance(value, dict) and not is_spec(value) and not flax_msgpack.is_chunked(value):
            if not all(type(key) is str for key in value):
                raise CorruptCheckpointError("has a key that is no text", path=path, name=".".join(keys))
            waiting += [((*keys, key), child) for key, child in reversed(value.items())]
            continue
        if isinstance(value, list):
            _check_list(value, ".".join(keys), path)
        _refuse_placeholder(value, ".".join(keys), path)
        yield keys, value


def _refuse_placeholder(value: Any, name: str, path: Path) -> None:
    if isinstance(value, str) and value.startswith(_PLACEHOLDER):
        raise UnsupportedError(
            f"is only a placeholder here ({value}): Orbax wrote the array, beside T5X's file",
            path=path,
            name=name,
            remedy="open the folder as an Orbax checkpoint (the format 'orbax')",
        )


def _check_list(found: list[Any], name: str, path: Path) -> None:
    """Refuse arrays that lie elsewhere, or in pieces, in a list: they would come back as dicts."""
    waiting: list[Any] = [found]
    while waiting:
        value = waiting.pop()
        if is_spec(value) or flax_msgpack.is_chunked(value):
            raise UnsupportedError("has an array in a list, where T5X writes a dict", path=path, name=name)
        _refuse_placeholder(value, name, path)
        if isinstance(value, list | dict):
            waiting += value.values() if isinstance(value, dict) else value
