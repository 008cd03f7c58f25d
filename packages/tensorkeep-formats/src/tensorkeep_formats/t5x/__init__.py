"""The format ``t5x``: a msgpack file ``checkpoint``, and a zarr v2 array for each parameter."""

import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError, UnsupportedError
from tensorkeep.ext.formats import (
    BLOCK_BYTES,
    Format,
    FormatOptions,
    Item,
    OpenSettings,
    Reader,
    StoredLeaf,
    Structure,
    WriteResult,
    WriteSettings,
    decoding,
    items_of,
    missing_as,
    sidecar,
)
from tensorkeep.ext.state import BY_NAME, DType, Flat, Source, allocate, flatten, of_numpy, state_leaves
from tensorkeep.ext.storage import (
    Bytes,
    Commit,
    Directory,
    LocalDirectory,
    Meter,
    file_mode,
    first_bytes,
    names_in,
    write_small,
)
from tensorkeep_formats.tensorstore import specs
from tensorkeep_formats.tensorstore.library import ArrayDirectory, list_tree, sync_directories, tensorstore
from tensorkeep_formats.tensorstore.reader import ArraysReader, KnownArray
from tensorkeep_formats.tensorstore.writer import ByteBudget, refuse_compression, write_arrays

# The encoding is defined in ``flax/serialization.py``. Three extension types hold values of numpy: an array (msgpack of
# shape, name of the dtype, and bytes in C order), a complex number, and a scalar, which is an array without dimensions.
# An array of more than 2**30 bytes is split: a dict with the key ``__msgpack_chunked_array__``, the shape, and flat
# arrays under ``chunks``; lists in it are dicts with the keys "0", "1"...
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
CHUNKED = "__msgpack_chunked_array__"
MAX_ARRAY_BYTES = 2**30  # a larger array is split


def encode(value: object) -> bytes:
    """Return the msgpack of a tree of dicts, lists, plain values and arrays; OverflowError beyond 64-bit integers."""
    return msgspec.msgpack.encode(value, enc_hook=_encode)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, _pack(value)) if value.nbytes <= MAX_ARRAY_BYTES else _split(value)
    if isinstance(value, np.generic):
        return msgspec.msgpack.Ext(_SCALAR, _pack(np.asarray(value)))
    raise NotImplementedError(f"msgpack cannot hold a {type(value).__name__}")


def _pack(array: npt.NDArray[Any]) -> bytes:
    return msgspec.msgpack.encode((array.shape, array.dtype.name, array.tobytes("C")))


def _split(array: npt.NDArray[Any]) -> dict[str, Any]:
    # Msgpack has 32-bit lengths, and Flax keeps away from the limit.
    flat = array.reshape(-1)
    step = max(1, MAX_ARRAY_BYTES // array.itemsize)
    pieces = [flat[start : start + step] for start in range(0, flat.size, step)]
    return {CHUNKED: True, "shape": _numbered(list(array.shape)), "chunks": _numbered(pieces)}


def _numbered(values: list[Any]) -> dict[str, Any]:
    return {str(index): value for index, value in enumerate(values)}


def decode(content: bytes) -> Any:
    """Decode the msgpack of `encode`; tuples become lists, split arrays remain dicts (see `join`)."""
    try:
        return msgspec.msgpack.decode(content, ext_hook=_decode)
    except TensorkeepError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError) as error:
        raise CorruptCheckpointError(f"is not msgpack as Flax writes it ({error})") from error


def _decode(code: int, data: memoryview) -> Any:
    if code == _COMPLEX:
        real, imaginary = msgspec.msgpack.decode(data, type=tuple[float, float])
        return complex(real, imaginary)
    if code not in (_ARRAY, _SCALAR):
        raise UnsupportedError(f"holds the msgpack extension type {code}, which Flax does not write")
    shape, name, content = msgspec.msgpack.decode(data, type=tuple[tuple[int, ...], str, bytes])
    dtype = BY_NAME.get(name)
    if dtype is None or not dtype.has_numpy:
        raise UnsupportedError(f"holds an array of dtype {name!r}, which is not supported")
    # The length must fit exactly: `frombuffer` would ignore a rest.
    if len(shape) > 32 or any(length < 0 for length in shape) or prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content):,} bytes for a {name} array of shape {list(shape)}")
    array = np.frombuffer(content, dtype.numpy).reshape(shape)
    if code == _SCALAR and shape:
        raise ValueError("a scalar has dimensions")
    # A copy, because the memory of bytes is read-only.
    return array[()] if code == _SCALAR else array.copy()


def is_split(value: Any) -> bool:
    return isinstance(value, dict) and value.get(CHUNKED) is True


def join(value: dict[str, Any]) -> npt.NDArray[Any]:
    """Return a split array in one piece; ValueError if the pieces do not make up the shape."""
    shape, pieces = _listed(value.get("shape")), _listed(value.get("chunks"))
    if not all(type(length) is int and length >= 0 for length in shape) or len(shape) > 32:
        raise ValueError("a split array has no valid shape")
    if not pieces or not all(isinstance(piece, np.ndarray) and piece.ndim == 1 for piece in pieces):
        raise ValueError("a split array has no valid pieces")
    if len({piece.dtype for piece in pieces}) > 1 or sum(piece.size for piece in pieces) != prod(shape):
        raise ValueError("the pieces of a split array do not make up its shape")
    return np.concatenate(pieces).reshape(shape)


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, dict) or set(value) != {str(index) for index in range(len(value))}:
        raise ValueError("the pieces of a split array are not numbered")
    return [value[str(index)] for index in range(len(value))]


FILE_NAME = "checkpoint"
VERSION = 3
# A key beside ``version`` and ``optimizer``, which T5X ignores: a checkpoint with it must have a sidecar.
MARK = "tensorkeep"
_MAX_BYTES = 4 * 1024**3
_PLACEHOLDER = "PLACEHOLDER://"
Keys = tuple[str, ...]


def spec_of(key: str, layout: specs.ArrayLayout, compressor: dict[str, Any] | None) -> dict[str, Any]:
    return {
        # Readers use only the name of the array's directory: dtype, shape, chunks and compressor come from its
        # ``.zarray``.
        "driver": "zarr",
        "dtype": layout.types.stored.name,
        "kvstore": {"driver": "file", "path": key},
        "metadata": {"shape": list(layout.shape), "chunks": list(layout.chunk), "compressor": compressor},
    }


def is_spec(value: Any) -> bool:
    return isinstance(value, dict) and "driver" in value and ("kvstore" in value or "path" in value)


def key_of(spec: dict[str, Any]) -> str:
    """Return the name of an array's directory; ValueError if the spec names no directory beside the file."""
    if spec["driver"] != "zarr":
        raise UnsupportedError(f"is stored by TensorStore's driver {spec['driver']!r}; T5X writes 'zarr'")
    kvstore = spec.get("kvstore")
    path = kvstore.get("path") if isinstance(kvstore, dict) else None
    # Checkpoints on Google Cloud Storage have the path at the top, and a dummy for the bucket.
    path = path if path is not None else spec.get("path")
    if not isinstance(path, str):
        raise ValueError("its spec names no directory")
    key = path.removesuffix("/")
    # One plain name beside the file: no separator, no parent.
    if not re.fullmatch(r"(?!\.\.?$)[^/\\\0]{1,255}", key):
        raise ValueError(f"its spec names {path!r}, which is not in the checkpoint's directory")
    return key


def read_tree(directory: Directory) -> dict[str, Any]:
    path = directory.path / FILE_NAME
    missing = NotACheckpointError("is not a T5X checkpoint: it holds no file 'checkpoint'", path=directory.path)
    with missing_as(missing), directory.open(FILE_NAME) as file, decoding(path):
        if file.size > _MAX_BYTES:
            raise CorruptCheckpointError(f"{file.size:,} bytes of msgpack are too many")
        tree = decode(file.read(0, file.size))
        if not isinstance(tree, dict) or not isinstance(tree.get("optimizer"), dict):
            raise CorruptCheckpointError("holds no optimizer, so T5X did not write it")
        if is_spec(tree["optimizer"]) or is_split(tree["optimizer"]):
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
    """Yield the leaves of a tree (values, lists, specs and split arrays), each with its path of keys."""
    # A list instead of recursion, because a hostile file may nest very deep.
    waiting: list[tuple[Keys, Any]] = [((), tree)]
    while waiting:
        keys, value = waiting.pop()
        with decoding(path, ".".join(keys)):
            if isinstance(value, dict) and not is_spec(value) and not is_split(value):
                if not all(type(key) is str for key in value):
                    raise CorruptCheckpointError("has a key that is not text")
                waiting += [((*keys, key), child) for key, child in reversed(value.items())]
                continue
            _check_leaf(value)
        yield keys, value


def _check_leaf(leaf: Any) -> None:
    # Placeholders of Orbax have no values here. Arrays in lists would come back as dicts.
    waiting: list[Any] = [leaf]
    while waiting:
        value = waiting.pop()
        if value is not leaf and (is_spec(value) or is_split(value)):
            raise UnsupportedError("has an array in a list, where T5X writes a dict")
        if isinstance(value, str) and value.startswith(_PLACEHOLDER):
            raise UnsupportedError(
                f"is only a placeholder ({value}): Orbax wrote the array, beside T5X's file",
                remedy="load it with Orbax and save it again",
            )
        if isinstance(value, list) or (isinstance(value, dict) and value is not leaf):
            waiting += value.values() if isinstance(value, dict) else value


_ZARR = 2


class T5XReader(ArraysReader):
    """An open T5X checkpoint: the saved state, or the dict under ``optimizer`` if T5X wrote it."""

    format = "t5x"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        if re.search(r"\.tmp-\d+$", path.name):
            raise NotACheckpointError(
                "is unfinished: T5X writes under such a name and renames complete checkpoints",
                path=path,
                remedy="take an earlier step",
            )
        super().__init__(path, settings)

    def _open(self, directory: Directory) -> None:
        contents = read_contents(directory)
        notes = contents.notes
        # Zarr defines a missing chunk as full of zeros. In a checkpoint of Tensorkeep, it is an error.
        leaves = self._open_arrays(directory, contents.directory, contents.arrays, fill_missing=notes is None)
        for name, leaf in leaves.items():
            if notes is None and not leaf.dtype.has_torch:
                raise UnsupportedError(f"torch has no dtype {leaf.dtype}", path=self.path, name=name)
        self._inline = contents.inline
        for name, tensor in self._inline.items():
            size = len(tensor.content)
            leaves[name] = StoredLeaf(self, name, tensor.dtype, tensor.shape, stored_bytes=size, file=FILE_NAME)
        source = self.path / (FILE_NAME if notes is None else sidecar.FILE_NAME)
        self._set_state(contents.structure.flat(leaves), source, None if notes is None else notes.leaf_specs)
        self.metadata = {} if notes is None else notes.metadata
        self.details = {
            "t5x_version": int(contents.tree["version"]),
            "arrays": len(contents.arrays),
            "missing_chunks": "are read as zeros" if notes is None else "are errors",
        }

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        if name in self._inline:
            out[:] = self._inline[name].content[start:stop]
        else:
            super().read(name, start, stop, out)

    def block_bytes(self, name: str) -> int:
        return BLOCK_BYTES if name in self._inline else super().block_bytes(name)


@dataclass(frozen=True, slots=True)
class InlineTensor:
    dtype: DType
    shape: tuple[int, ...]
    content: Bytes


@dataclass(slots=True)
class T5XCheckpoint:
    """A checkpoint before its arrays are opened; ``notes`` is None if Tensorkeep did not write it."""

    directory: ArrayDirectory
    tree: dict[str, Any]
    notes: sidecar.Sidecar | None
    structure: Structure = field(init=False)
    arrays: dict[str, KnownArray] = field(default_factory=dict)
    inline: dict[str, InlineTensor] = field(default_factory=dict)


def read_contents(directory: Directory) -> T5XCheckpoint:
    has_sidecar = sidecar.FILE_NAME in names_in(directory.path)
    notes = sidecar.read(directory, "t5x", sidecar.Sidecar) if has_sidecar else None
    tree = read_tree(directory)
    if notes is None and MARK in tree:
        raise CorruptCheckpointError(
            "tensorkeep.json, which describes the state, is missing",
            path=directory.path,
            remedy="restore the missing file, or take another copy",
        )
    contents = T5XCheckpoint(ArrayDirectory.of(directory), tree, notes)
    if notes is None:
        _read_foreign(contents)
    else:
        contents.structure = notes.structure
        for name, note in notes.tensors.items():
            with decoding(directory.path / FILE_NAME, name, what="contradicts tensorkeep.json"):
                _read_own(contents, name, note)
    return contents


def _read_own(contents: T5XCheckpoint, name: str, note: sidecar.SidecarTensor) -> None:
    value: Any = contents.tree["optimizer"]
    for key in note.place:
        value = value.get(key) if isinstance(value, dict) else None
    if not is_spec(value):
        nbytes = prod(note.shape) * note.state_dtype.itemsize
        if not isinstance(value, np.ndarray) or value.shape != note.shape or value.nbytes != nbytes:
            raise ValueError("the value in its place is not the tensor")
        contents.inline[name] = InlineTensor(note.state_dtype, note.shape, _bytes_of(value))
        return
    stored = BY_NAME.get(str(value.get("dtype")))
    types = None if stored is None else specs.StoredType(note.state_dtype, stored)
    if types is None or not types.is_valid:
        raise ValueError(f"a {note.dtype} is not stored as {value.get('dtype')!r}")
    contents.arrays[name] = _known_array(contents.directory, value, types, note.shape)


def _read_foreign(contents: T5XCheckpoint) -> None:
    path = contents.directory.path / FILE_NAME
    state: dict[str, Any] = {}
    stand_ins: dict[int, tuple[Any, KnownArray]] = {}
    for keys, value in leaves_of(contents.tree["optimizer"], path):
        with decoding(path, ".".join(keys)):
            if is_spec(value):
                # An empty tensor stands for the array; its identity connects the name with the array.
                leaf = allocate("tensor", BY_NAME["uint8"], (0,))
                stand_ins[id(leaf)] = leaf, _known_array(contents.directory, value)
            else:
                leaf = _decode_value(value)
        container = state
        for key in keys[:-1]:
            container = container.setdefault(key, {})
        container[keys[-1]] = leaf
    with decoding(path):
        flat = flatten(state)
    for name, given in state_leaves(state).items():
        if id(given.value) in stand_ins:
            contents.arrays[name] = stand_ins[id(given.value)][1]
    for name, stored in flat.leaves.items():
        if name not in contents.arrays:
            content = np.empty(stored.nbytes, np.uint8)
            stored.read(0, stored.nbytes, content)
            contents.inline[name] = InlineTensor(stored.dtype, stored.shape, content)
    contents.structure = Structure.of_state(flat)


def _known_array(
    arrays: ArrayDirectory,
    spec: dict[str, Any],
    types: specs.StoredType | None = None,
    shape: tuple[int, ...] | None = None,
) -> KnownArray:
    key = key_of(spec)
    return KnownArray(key, _ZARR, arrays.stored_bytes(key), types, shape)


def _decode_value(value: Any) -> Any:
    if is_split(value):
        value = join(value)
    dtype = of_numpy(value.dtype) if isinstance(value, np.ndarray) else None
    if dtype is None or not dtype.has_torch:
        return value
    import torch

    return torch.from_numpy(_bytes_of(value)).view(dtype.torch).reshape(value.shape)


def _bytes_of(array: np.ndarray[Any, Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


_TARGET = "target"
# A dict with such a key would look like a spec or a split array.
_RESERVED = frozenset(("driver", CHUNKED))


def write(
    flat: Flat[Source], destination: Path, settings: WriteSettings, replaceable: Callable[[Path], bool]
) -> WriteResult:
    options = settings.options_as(specs.T5XOptions).as_arrays()
    refuse_compression(settings, destination, 'compressor="gzip:1"')
    tensorstore()
    # Single numbers and empty tensors are stored in the msgpack file.
    arrays = {name: leaf for name, leaf in flat.leaves.items() if leaf.shape and leaf.nbytes}
    # T5X names the directories of parameters so.
    keys = dict(zip(arrays, specs.array_keys([f"{_TARGET}.{name}" for name in arrays]).values(), strict=True))
    budget = ByteBudget(settings.pool.budget)
    meter = Meter(sum(leaf.nbytes for leaf in arrays.values()), settings.progress)
    with (
        Commit(destination, directory=True, overwrite=settings.overwrite, replaceable=replaceable) as commit,
        LocalDirectory(commit.path) as open_directory,
    ):
        directory = ArrayDirectory(destination, f"{open_directory.stable_path}/")
        written: dict[str, specs.ArrayLayout] = {}
        # Two calls share one budget, so both stay within the limit.
        for sources, chosen in _by_width({keys[name]: leaf for name, leaf in arrays.items()}, options):
            written |= write_arrays(directory, sources, chosen, budget=budget, threads=settings.threads, meter=meter)
        target, places = _build_target(flat, _tree_leaves(flat, keys, written, options))
        tree = {"version": VERSION, "optimizer": {_TARGET: target, "state": {"step": _step(flat)}}, MARK: 1}
        write_small(commit.path / FILE_NAME, encode(tree))
        if options.sync:
            sync_directories(commit.path)
        names = [FILE_NAME, *(f"{key}/.zarray" for key in keys.values())]
        notes = sidecar.Sidecar(
            format="t5x",
            structure=Structure.of_state(flat),
            tensors=sidecar.describe_tensors(flat, places),
            files={name: sidecar.describe_file(commit.path / name, hashed=True) for name in names},
            metadata=settings.metadata,
        )
        sidecar.write(commit.path, notes)
        stored_bytes = sum(list_tree(str(commit.path), commit.path)[0].values())
        commit.publish()
    return WriteResult(stored_bytes=stored_bytes, new_bytes=stored_bytes, peak_buffer_bytes=budget.peak)


def _by_width(
    sources: Mapping[str, Source], options: specs.TensorStoreOptions
) -> list[tuple[dict[str, Source], specs.TensorStoreOptions]]:
    # T5X stores parameters as float32 by default.
    # A conversion to float32 would truncate wider floats, so they keep their dtype.
    wide = {key: leaf for key, leaf in sources.items() if leaf.dtype.kind == "float" and leaf.dtype.itemsize > 4}
    narrow = {key: leaf for key, leaf in sources.items() if key not in wide}
    return [(narrow, options), (wide, msgspec.structs.replace(options, dtype="keep"))]


def _tree_leaves(
    flat: Flat[Source],
    keys: Mapping[str, str],
    written: Mapping[str, specs.ArrayLayout],
    options: specs.TensorStoreOptions,
) -> dict[str, Any]:
    parsed = specs.parse_compressor(options.compressor, 2)
    compressor = parsed.zarr2() if isinstance(parsed, specs.Compressor) else None
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
    return data.view(specs.stored_type(source.dtype).stored.numpy).reshape(source.shape)


def _build_target(flat: Flat[Source], leaves: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Keys]]:
    target: dict[str, Any] = {}
    places: dict[str, Keys] = {}
    items = items_of(flat)
    for item in items:
        if item.leaf and item.name in leaves:
            keys = _insert(target, tuple(map(str, item.path)), leaves[item.name])
            # T5X does not find it there, but `tensorkeep.json` has the place.
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
    if isinstance(value, list | tuple):
        return all(map(_is_packable, value))
    if isinstance(value, str):
        # Msgpack has no lone surrogates, and the prefix marks a placeholder of Orbax.
        return value.encode("utf-8", "ignore").decode() == value and not value.startswith("PLACEHOLDER://")
    # Msgpack has integers of 64 bits.
    return not isinstance(value, int) or -(2**63) <= value < 2**64


def _step(flat: Flat[Source]) -> npt.NDArray[Any]:
    """Return T5X's step: the number ``step`` at the top of the state, or 0 without one."""
    skeleton: Any = flat.skeleton
    entries = skeleton.get("dict") or skeleton.get("ordered") if isinstance(skeleton, dict) else None
    step = entries.get("step") if isinstance(entries, dict) else None
    if type(step) is not int or not 0 <= step < 2**63:
        step = 0
    return np.array(step, np.int32 if step < 2**31 else np.int64)


# First bytes of a msgpack map.
_MAPS = frozenset(bytes((code,)) for code in (*range(0x80, 0x90), 0xDE, 0xDF))


class T5XFormat(Format):
    """Checkpoints of T5X; see `tensorkeep.formats.base.Format`.

    The whole state is stored under ``optimizer.target``: T5X finds its parameters there, nested as in the state, and
    plain values beside them. What T5X has no place for is stored in ``tensorkeep.json``.
    """

    name: ClassVar[str] = "t5x"
    options: ClassVar[type[FormatOptions]] = specs.T5XOptions

    def recognises(self, path: Path) -> bool:
        start = first_bytes(path / FILE_NAME, 64)
        return start is not None and start[:1] in _MAPS and (b"version" in start or b"optimizer" in start)

    def open(self, path: Path, settings: OpenSettings) -> Reader:
        return T5XReader(path, settings)

    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
        return write(flat, destination, settings, replaceable=self._is_replaceable)

    def _is_replaceable(self, path: Path) -> bool:
        return self.recognises(path) and all(
            stat.S_ISDIR(file_mode(path / name, follow_links=False)) and first_bytes(path / name / ".zarray", 1) == b"{"
            for name in names_in(path)
            if name not in (FILE_NAME, sidecar.FILE_NAME)
        )


FORMAT = T5XFormat()
