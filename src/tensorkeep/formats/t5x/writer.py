"""Writing a T5X checkpoint: the arrays, the msgpack file that points to them, the sidecar, then one rename."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.errors import UsageError
from tensorkeep.formats import sidecar
from tensorkeep.formats.base import WriteResult, WriteSettings
from tensorkeep.formats.path_items import Item, items_of
from tensorkeep.formats.sidecar import Sidecar
from tensorkeep.formats.structure import Structure
from tensorkeep.formats.t5x import flax_msgpack
from tensorkeep.formats.t5x.tree import FILE_NAME, MARK, VERSION, Keys, is_spec, spec
from tensorkeep.formats.tensorstore.budget import ByteBudget
from tensorkeep.formats.tensorstore.compressors import Compressor
from tensorkeep.formats.tensorstore.failures import tensorstore
from tensorkeep.formats.tensorstore.keys import array_keys
from tensorkeep.formats.tensorstore.places import held
from tensorkeep.formats.tensorstore.saving import sync_directories
from tensorkeep.formats.tensorstore.settings import ArraySettings, T5XOptions
from tensorkeep.formats.tensorstore.specs import Place
from tensorkeep.formats.tensorstore.stored_types import stored_type
from tensorkeep.formats.tensorstore.walking import files_below
from tensorkeep.formats.tensorstore.writer import WrittenArray, write_arrays
from tensorkeep.io.commit import Commit
from tensorkeep.io.files import write_small
from tensorkeep.io.parallel import Meter
from tensorkeep.state.leaf import Leaf, Source, allocate
from tensorkeep.state.tree import Flat

_DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "chunk": "64MiB",
    "chunking": "divisors",
    "compressor": "gzip",
    "concurrency": 128,
}
_TARGET = "target"
_RESERVED = frozenset(("driver", flax_msgpack.CHUNKED))
"""Keys by which a dict is taken for a pointer, or for an array in pieces."""
_INT64 = range(-(2**63), 2**64)


def write(
    flat: Flat[Source], destination: Path, settings: WriteSettings, replaceable: Callable[[Path], bool]
) -> WriteResult:
    """Write a state; see `tensorkeep.formats.base.Format.write`."""
    given = array_settings(settings.options_as(T5XOptions).given())
    if settings.compression != "none":
        raise UsageError(
            f"T5X checkpoints cannot be compressed with {settings.compression!r}",
            path=destination,
            remedy='leave `compression` out and give the option `compressor`, for example compressor="gzip:1"',
        )
    tensorstore()
    arrays = {name: leaf for name, leaf in flat.leaves.items() if not is_inline(leaf)}
    keys = dict(zip(arrays, array_keys([f"{_TARGET}.{name}" for name in arrays]).values(), strict=True))
    budget = ByteBudget(settings.pool.budget)
    meter = Meter(sum(leaf.nbytes for leaf in arrays.values()), settings.progress)
    with (
        Commit(destination, directory=True, overwrite=settings.overwrite, replaceable=replaceable) as commit,
        held(commit.path) as root,
    ):
        sources = {keys[name]: leaf for name, leaf in arrays.items()}
        written = _write_arrays(
            Place(root), sources, given, budget=budget, threads=settings.threads, meter=meter, directory=destination
        )
        leaves = _leaves(flat, keys, written, given)
        target, places = _target(flat, leaves)
        tree = {"version": VERSION, "optimizer": {_TARGET: target, "state": {"step": _step(flat)}}, MARK: 1}
        write_small(commit.path / FILE_NAME, flax_msgpack.encode(tree))
        if given.sync:
            sync_directories(commit.path)
        _write_sidecar(flat, commit.path, settings, list(keys.values()), places)
        stored_bytes = sum(files_below(commit.path).values())
        commit.publish()
    return WriteResult(stored_bytes=stored_bytes, new_bytes=stored_bytes, peak_buffer_bytes=budget.peak)


def array_settings(options: Mapping[str, Any]) -> ArraySettings:
    """Return how arrays are written: T5X's choices, but for the given ones.

    Raises
    ------
    UsageError
        If an option means nothing.
    """
    return ArraySettings.of({**_DEFAULTS, **options, "zarr": 2})


def is_inline(source: Source) -> bool:
    """Say whether a tensor lies in the msgpack file itself: a single number, or nothing."""
    return not source.shape or source.nbytes == 0


def _write_arrays(
    place: Place,
    sources: Mapping[str, Source],
    given: ArraySettings,
    *,
    budget: ByteBudget,
    threads: int,
    meter: Meter,
    directory: Path,
) -> dict[str, WrittenArray]:
    """Write each source under its key; what float32 would cut stays as it is."""
    wide = {
        key: source for key, source in sources.items() if source.dtype.kind == "float" and source.dtype.itemsize > 4
    }
    narrow = {key: source for key, source in sources.items() if key not in wide}
    written: dict[str, WrittenArray] = {}
    for group, settings in ((narrow, given), (wide, replace(given, dtype="keep"))):
        written |= write_arrays(
            place, group, settings, budget=budget, threads=threads, meter=meter, directory=directory
        )
    return written


def _leaves(
    flat: Flat[Source], keys: Mapping[str, str], written: Mapping[str, WrittenArray], given: ArraySettings
) -> dict[str, Any]:
    """Return what stands in the tree for each tensor."""
    compressor = given.compressor.zarr2() if isinstance(given.compressor, Compressor) else None
    found: dict[str, Any] = {}
    for name, source in flat.leaves.items():
        if name in keys:
            found[name] = spec(keys[name], written[keys[name]].layout, compressor)
        else:
            found[name] = _inline(source)
    for name, alias in flat.aliases.items():
        # Two names for one array; T5X has no word for a part of one.
        if alias.is_full(flat.leaves[alias.of].shape):
            found[name] = found[alias.of]
    return found


def _inline(source: Source) -> np.ndarray[Any, Any]:
    stored = stored_type(source.dtype).stored
    array: np.ndarray[Any, Any] = allocate("ndarray", stored, source.shape)
    leaf = Leaf.of(source.name, array)
    out = leaf.host_bytes() if leaf else None
    if out is not None and source.nbytes:
        source.read(0, source.nbytes, out)
    return array


def _target(flat: Flat[Source], leaves: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Keys]]:
    """Return the tree of tensors and plain values, and the keys that lead to each stored tensor."""
    target: dict[str, Any] = {}
    places: dict[str, Keys] = {}
    items = items_of(flat)
    for item in items:
        if item.leaf and item.name in leaves:
            keys = _put(target, tuple(map(str, item.path)), leaves[item.name]) or _put_aside(target, item, leaves)
            if item.name in flat.leaves:
                places[item.name] = (_TARGET, *keys)
    for item in items:
        if not item.leaf and _is_packable(item.value):
            _put(target, tuple(map(str, item.path)), item.value)
    return target, places


def _put(target: dict[str, Any], keys: Keys, value: Any) -> Keys | None:
    """Put a value at the end of its path and return the path; None if something else is in the way."""
    if not keys or not _RESERVED.isdisjoint(keys):
        return None
    container = target
    for key in keys[:-1]:
        container = container.setdefault(key, {})
        if not isinstance(container, dict) or is_spec(container):
            return None
    if keys[-1] in container:
        return None
    container[keys[-1]] = value
    return keys


def _put_aside(target: dict[str, Any], item: Item, leaves: Mapping[str, Any]) -> Keys:
    name = item.name
    while name in target or name in _RESERVED:
        name += "_"
    target[name] = leaves[item.name]
    return (name,)


def _is_packable(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_packable, value))
    if isinstance(value, str):
        return value.encode("utf-8", "ignore").decode() == value and not value.startswith("PLACEHOLDER://")
    return not isinstance(value, int) or value in _INT64


def _step(flat: Flat[Source]) -> np.ndarray[Any, Any]:
    """Return T5X's step: the state's own, if it has a number of that name at its top, else 0."""
    skeleton: Any = flat.skeleton
    entries = skeleton.get("dict") or skeleton.get("ordered") if isinstance(skeleton, dict) else None
    step = entries.get("step") if isinstance(entries, dict) else None
    if type(step) is not int or not 0 <= step < 2**63:
        step = 0
    return np.array(step, np.int32 if step < 2**31 else np.int64)


def _write_sidecar(
    flat: Flat[Source], directory: Path, settings: WriteSettings, keys: list[str], places: dict[str, Keys]
) -> None:
    names = [FILE_NAME, *(f"{key}/.zarray" for key in keys)]
    files = {name: sidecar.note_file(directory / name, hashed=True) for name in names}
    notes = Sidecar(
        format="t5x",
        structure=Structure.of_state(flat),
        tensors=sidecar.describe_tensors(flat, places),
        files=files,
        metadata=settings.metadata,
    )
    sidecar.write(directory, notes)
