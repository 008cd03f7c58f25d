"""The tree in T5X's ``checkpoint`` file: parameters by key, each a value or an array's spec.

A spec is a dict with TensorStore's ``driver``, ``kvstore`` and ``metadata``. Only the name of the array's directory is
used; dtype, shape, chunks and compressor are those in the directory's ``.zarray``.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.t5x import flax_msgpack
from tensorkeep.formats.tensorstore.specs import Layout
from tensorkeep.io.directory import Directory

FILE_NAME = "checkpoint"
VERSION = 3
MARK = "tensorkeep"
"""A key beside ``version`` and ``optimizer``, which T5X ignores: the checkpoint must have a sidecar."""

_MAX_BYTES = 4 * 1024**3
_PLACEHOLDER = "PLACEHOLDER://"

Keys = tuple[str, ...]


def spec_of(key: str, layout: Layout, compressor: dict[str, Any] | None) -> dict[str, Any]:
    """Return the spec of an array, as T5X writes it."""
    return {
        "driver": "zarr",
        "dtype": layout.types.stored.name,
        "kvstore": {"driver": "file", "path": key},
        "metadata": {"shape": list(layout.shape), "chunks": list(layout.chunk), "compressor": compressor},
    }


def is_spec(value: Any) -> bool:
    """Return whether a value is the spec of an array."""
    return isinstance(value, dict) and "driver" in value and ("kvstore" in value or "path" in value)


def key_of(spec: dict[str, Any]) -> str:
    """Return the name of an array's directory, which is beside the file.

    Raises UnsupportedError if it is not a zarr v2 array; ValueError if the spec names a directory elsewhere, or none.
    """
    if spec["driver"] != "zarr":
        raise UnsupportedError(f"is stored by TensorStore's driver {spec['driver']!r}; T5X writes 'zarr'")
    kvstore = spec.get("kvstore")
    path = kvstore.get("path") if isinstance(kvstore, dict) else None
    # Checkpoints on Google Cloud Storage have the path at the top. The bucket's name is a dummy.
    path = path if path is not None else spec.get("path")
    if not isinstance(path, str):
        raise ValueError("its spec names no directory")
    key = path.removesuffix("/")
    # One plain name beside the file: no separator, no parent.
    if not re.fullmatch(r"(?!\.\.?$)[^/\\\0]{1,255}", key):
        raise ValueError(f"its spec names {path!r}, which is not in the checkpoint's directory")
    return key


def read_tree(directory: Directory) -> dict[str, Any]:
    """Return the content of a directory's ``checkpoint`` file.

    Raises NotACheckpointError if the file is missing; CorruptCheckpointError if it is damaged; UnsupportedError if it
    is of another version than 3.
    """
    path = directory.path / FILE_NAME
    try:
        file = directory.open(FILE_NAME)
    except NotACheckpointError as error:
        raise NotACheckpointError(
            "is not a T5X checkpoint: it holds no file 'checkpoint'", path=directory.path
        ) from error
    with file, decoding(path):
        if file.size > _MAX_BYTES:
            raise CorruptCheckpointError(f"{file.size:,} bytes of msgpack are too many")
        tree = flax_msgpack.decode(file.read(0, file.size))
        if not isinstance(tree, dict) or not isinstance(tree.get("optimizer"), dict):
            raise CorruptCheckpointError("holds no optimizer, so T5X did not write it")
        if is_spec(tree["optimizer"]) or flax_msgpack.is_split(tree["optimizer"]):
            raise CorruptCheckpointError("its optimizer is a single array instead of a tree")
        _check_version(tree.get("version"))
    return tree


def _check_version(version: Any) -> None:
    if isinstance(version, np.integer):
        version = int(version)
    if type(version) is int and version == VERSION:
        return
    if not isinstance(version, int | str | None):
        raise UnsupportedError(f"its version is a {type(version).__name__}, not a number")
    if type(version) is int and version > VERSION:
        raise UnsupportedError(f"is of T5X's version {version}, this release reads {VERSION}")
    raise UnsupportedError(
        f"is of T5X's version {str(version)[:40]}, which stored bfloat16 as uint16; the two cannot be distinguished",
        remedy="restore it with T5X and save it again; it then is of version 3",
    )


def leaves_of(tree: dict[str, Any], path: Path) -> Iterator[tuple[Keys, Any]]:
    """Yield the leaves of a tree with the keys that lead to them: values, lists, specs and split arrays.

    Raises CorruptCheckpointError if a key is not text; UnsupportedError if a list holds an array, or a value is a
    placeholder of Orbax.
    """
    waiting: list[tuple[Keys, Any]] = [((), tree)]
    while waiting:
        keys, value = waiting.pop()
        with decoding(path, ".".join(keys)):
            if isinstance(value, dict) and not is_spec(value) and not flax_msgpack.is_split(value):
                if not all(type(key) is str for key in value):
                    raise CorruptCheckpointError("has a key that is not text")
                waiting += [((*keys, key), child) for key, child in reversed(value.items())]
                continue
            _check_leaf(value)
        yield keys, value


def _check_leaf(leaf: Any) -> None:
    """Refuse placeholders, and arrays in lists: they would come back as dicts."""
    waiting: list[Any] = [leaf]
    while waiting:
        value = waiting.pop()
        if value is not leaf and (is_spec(value) or flax_msgpack.is_split(value)):
            raise UnsupportedError("has an array in a list, where T5X writes a dict")
        if isinstance(value, str) and value.startswith(_PLACEHOLDER):
            raise UnsupportedError(
                f"is only a placeholder ({value}): Orbax wrote the array, beside T5X's file",
                remedy="load it with Orbax and save it again",
            )
        if isinstance(value, list) or (isinstance(value, dict) and value is not leaf):
            waiting += value.values() if isinstance(value, dict) else value
