"""Writes T5X checkpoints: arrays, msgpack file, sidecar, then one rename."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tensorkeep.formats import sidecar
from tensorkeep.formats.base import Structure, WriteResult, WriteSettings
from tensorkeep.formats.path_items import Item, items_of
from tensorkeep.formats.sidecar import Sidecar
from tensorkeep.formats.t5x import reader
from tensorkeep.formats.t5x.reader import FILE_NAME, MARK, VERSION, Keys, is_spec, spec_of
from tensorkeep.formats.tensorstore.library import ArrayDirectory, tensorstore
from tensorkeep.formats.tensorstore.listing import list_tree, sync_directories
from tensorkeep.formats.tensorstore.specs import (
    ArrayLayout,
    Compressor,
    T5XOptions,
    TensorStoreOptions,
    array_keys,
    parse_compressor,
    stored_type,
)
from tensorkeep.formats.tensorstore.writer import ByteBudget, refuse_compression, write_arrays
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat
from tensorkeep.storage.commit import Commit
from tensorkeep.storage.direct_io import write_small
from tensorkeep.storage.local import LocalDirectory
from tensorkeep.storage.parallel import Meter

_TARGET = "target"
_RESERVED = frozenset(("driver", reader.CHUNKED))
"""A dict with one of these keys would look like a spec or a split array."""


def write(
    flat: Flat[Source], destination: Path, settings: WriteSettings, replaceable: Callable[[Path], bool]
) -> WriteResult:
    """Write a state; see `tensorkeep.formats.base.Format.write`."""
    options = settings.options_as(T5XOptions).as_arrays()
    refuse_compression(settings, destination, 'compressor="gzip:1"')
    tensorstore()
    # Single numbers and empty tensors are stored in the msgpack file.
    arrays = {name: leaf for name, leaf in flat.leaves.items() if leaf.shape and leaf.nbytes}
    keys = dict(zip(arrays, array_keys([f"{_TARGET}.{name}" for name in arrays]).values(), strict=True))
    budget = ByteBudget(settings.pool.budget)
    meter = Meter(sum(leaf.nbytes for leaf in arrays.values()), settings.progress)
    with (
        Commit(destination, directory=True, overwrite=settings.overwrite, replaceable=replaceable) as commit,
        LocalDirectory(commit.path) as open_directory,
    ):
        directory = ArrayDirectory(destination, f"{open_directory.fd_path}/")
        written: dict[str, ArrayLayout] = {}
        for sources, chosen in _by_width({keys[name]: leaf for name, leaf in arrays.items()}, options):
            written |= write_arrays(directory, sources, chosen, budget=budget, threads=settings.threads, meter=meter)
        target, places = _build_target(flat, _tree_leaves(flat, keys, written, options))
        tree = {"version": VERSION, "optimizer": {_TARGET: target, "state": {"step": _step(flat)}}, MARK: 1}
        write_small(commit.path / FILE_NAME, reader.encode(tree))
        if options.sync:
            sync_directories(commit.path)
        names = [FILE_NAME, *(f"{key}/.zarray" for key in keys.values())]
        notes = Sidecar(
            format="t5x",
            structure=Structure.of_state(flat),
            tensors=sidecar.describe_tensors(flat, places),
            files={name: sidecar.note_file(commit.path / name, hashed=True) for name in names},
            metadata=settings.metadata,
        )
        sidecar.write(commit.path, notes)
        stored_bytes = sum(list_tree(str(commit.path), commit.path)[0].values())
        commit.publish()
    return WriteResult(stored_bytes=stored_bytes, new_bytes=stored_bytes, peak_buffer_bytes=budget.peak)


def _by_width(
    sources: Mapping[str, Source], options: TensorStoreOptions
) -> list[tuple[dict[str, Source], TensorStoreOptions]]:
    """Separate floats wider than float32, which keep their dtype: a conversion to float32 would truncate them."""
    wide = {key: leaf for key, leaf in sources.items() if leaf.dtype.kind == "float" and leaf.dtype.itemsize > 4}
    narrow = {key: leaf for key, leaf in sources.items() if key not in wide}
    return [(narrow, options), (wide, msgspec.structs.replace(options, dtype="keep"))]


def _tree_leaves(
    flat: Flat[Source], keys: Mapping[str, str], written: Mapping[str, ArrayLayout], options: TensorStoreOptions
) -> dict[str, Any]:
    """Return the entries of all tensors in the tree: the specs of arrays, or values."""
    parsed = parse_compressor(options.compressor, 2)
    compressor = parsed.zarr2() if isinstance(parsed, Compressor) else None
    leaves = {
        name: spec_of(keys[name], written[keys[name]], compressor) if name in keys else _read(leaf)
        for name, leaf in flat.leaves.items()
    }
    # Two names of one tensor share an array. T5X has no other views.
    shared = {name: alias.of for name, alias in flat.aliases.items() if alias.is_full(flat.leaves[alias.of].shape)}
    return leaves | {name: leaves[of] for name, of in shared.items()}


def _read(source: Source) -> npt.NDArray[Any]:
    data = np.empty(source.nbytes, np.uint8)
    source.read(0, source.nbytes, data)
    return data.view(stored_type(source.dtype).stored.numpy).reshape(source.shape)


def _build_target(flat: Flat[Source], leaves: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Keys]]:
    """Return the tree of tensors and plain values, and the path of keys of each stored tensor."""
    target: dict[str, Any] = {}
    places: dict[str, Keys] = {}
    items = items_of(flat)
    for item in items:
        if item.leaf and item.name in leaves:
            keys = _insert(target, tuple(map(str, item.path)), leaves[item.name])
            keys = keys or _insert_at_top(target, item, leaves)
            if item.name in flat.leaves:
                places[item.name] = (_TARGET, *keys)
    for item in items:
        if not item.leaf and _is_packable(item.value):
            _insert(target, tuple(map(str, item.path)), item.value)
    return target, places


def _insert(target: dict[str, Any], keys: Keys, value: Any) -> Keys | None:
    """Insert a value at its path and return the path; None if another value is in the way."""
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


def _insert_at_top(target: dict[str, Any], item: Item, leaves: Mapping[str, Any]) -> Keys:
    name = item.name
    while name in target or name in _RESERVED:
        name += "_"
    target[name] = leaves[item.name]
    return (name,)


def _is_packable(value: Any) -> bool:
    """Return whether msgpack can hold a plain value, and the value does not look like a placeholder of Orbax."""
    if isinstance(value, list | tuple):
        return all(map(_is_packable, value))
    if isinstance(value, str):
        return value.encode("utf-8", "ignore").decode() == value and not value.startswith("PLACEHOLDER://")
    return not isinstance(value, int) or -(2**63) <= value < 2**64


def _step(flat: Flat[Source]) -> npt.NDArray[Any]:
    """Return T5X's step: the number ``step`` at the top of the state, or 0 without one."""
    skeleton: Any = flat.skeleton
    entries = skeleton.get("dict") or skeleton.get("ordered") if isinstance(skeleton, dict) else None
    step = entries.get("step") if isinstance(entries, dict) else None
    if type(step) is not int or not 0 <= step < 2**63:
        step = 0
    return np.array(step, np.int32 if step < 2**31 else np.int64)
