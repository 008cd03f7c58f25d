"""Writes the files of ``torch.save``: torch makes the pickle and the zip container, the storages are written here."""

import ctypes
import functools
import io
import pickle
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pickle import PickleError
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from tensorkeep.closing import Closing
from tensorkeep.errors import UnsupportedError, UnsupportedLeafError, first_line
from tensorkeep.formats.base import BLOCK_BYTES, WriteResult, WriteSettings
from tensorkeep.state.aliases import make_view
from tensorkeep.state.leaf import Array, Bytes, Leaf, Source, allocate, is_lazy
from tensorkeep.state.skeleton import LeafSpec
from tensorkeep.state.tree import Flat, leaf_specs, unflatten
from tensorkeep.storage import parallel
from tensorkeep.storage.commit import Commit
from tensorkeep.storage.direct_io import DirectFile
from tensorkeep.storage.parallel import Cancellation, Meter

if TYPE_CHECKING:
    import torch


_PIECE_BYTES = 1024**2
# The data descriptor behind a record: these bytes, then the CRC-32.
_DESCRIPTOR = b"PK\x07\x08"
# An entry of the zip directory, with the offsets of its CRC-32, of the lengths of its three fields, and of its name.
_ENTRY, _ENTRY_CRC, _ENTRY_LENGTHS, _ENTRY_NAME = b"PK\x01\x02", 16, 28, 46
_STORAGES = b"/data/"


# Torch reads a storage twice, for its CRC-32 and to write it. If the tensor changes in between, the file is damaged. So
# torch leaves the storages out (`torch.serialization.skip_data`), and each is copied, hashed and written in pieces.
# Torch records 0 as their CRC-32, in the descriptor behind each storage and in the zip directory; the right value
# replaces it. The result has the bytes that torch alone writes, except for ``serialization_id``, a hash of all CRC-32.
class TorchStream(Closing):
    def __init__(self, path: Path, *, cancellation: Cancellation | None = None, meter: Meter | None = None) -> None:
        self._file = DirectFile(path, direct=False)
        self._cancellation = cancellation
        self._meter = meter
        # The zip container takes more bytes than the tensors, so the meter stops at its total.
        self._uncounted = meter.total if meter is not None else 0
        self._small = bytearray()
        # One piece is copied, hashed and written while it is in the cache of the core.
        self._piece = np.empty(_PIECE_BYTES, np.uint8)
        self._offset = 0

    def save(self, value: object) -> None:
        import torch

        container = _Container(self)
        try:
            # Inside, torch seeks over a storage instead of writing it: `_Container.seek` writes it then.
            with torch.serialization.skip_data():
                torch.save(value, cast(IO[bytes], container), pickle_module=container.pickle_module)
        except Exception:
            container.raise_failure()
            raise
        finally:
            container.forget_storages()
        # Torch did not see the errors of writes.
        container.raise_failure()
        if not container.complete:
            raise _unexpected()

    def append(self, data: Any) -> None:
        if self._cancellation is not None:
            self._cancellation.check()
        # Torch makes some forty writes of a few bytes for each tensor.
        if len(self._small) + len(data) > _PIECE_BYTES:
            self._flush_small()
        if len(data) < _PIECE_BYTES:
            self._small += data
        else:
            self._write(np.frombuffer(data, np.uint8))
        if self._meter is not None:
            counted = min(len(data), self._uncounted)
            self._uncounted -= counted
            self._meter.add(counted)

    def append_storage(self, storage: "torch.UntypedStorage") -> int:
        """Append the bytes of a storage, and return their CRC-32."""
        import torch

        # One storage at a time: the copies of a state on a GPU are never in memory together.
        if storage.device.type != "cpu":
            storage = cast(Any, storage).cpu()
        # By address: after a call of `Tensor.numpy`, torch would never again let the caller resize the tensor.
        content = np.frombuffer((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()), np.uint8)
        hashed = torch.serialization.get_crc32_options()
        crc = 0
        for start in range(0, len(content), _PIECE_BYTES):
            piece = self._piece[: len(content) - start]
            # Hash and file must see the same bytes, even if another thread changes the tensor now.
            np.copyto(piece, content[start : start + len(piece)])
            crc = zlib.crc32(piece, crc) if hashed else 0
            self.append(piece.data)
        return crc

    def _flush_small(self) -> None:
        small, self._small = self._small, bytearray()
        if small:
            self._write(np.frombuffer(small, np.uint8))

    def _write(self, content: Bytes) -> None:
        self._file.write(self._offset, content)
        self._offset += len(content)

    def tell(self) -> int:
        return self._offset + len(self._small)

    def finish(self) -> int:
        """Make the file durable and return its size."""
        self._flush_small()
        self._file.finish(self._offset)
        return self._offset

    def close(self) -> None:
        self._file.close()


class _Container:
    """The file object that torch writes one zip container to; it inserts the storages and their CRC-32."""

    def __init__(self, stream: TorchStream) -> None:
        self.pickle_module, self._storages = _recording_pickle()
        self.complete = False
        self._stream = stream
        self._checksums: dict[int, int] = {}
        self._unwritten = self._storages_with_bytes()
        self._descriptor_crc: int | None = None
        self._failure: BaseException | None = None

    def write(self, data: Any) -> int:
        self._guarded(self._write_piece, data)
        return len(data)

    def seek(self, offset: int, whence: int) -> int:
        # Torch skips a storage with a seek over its bytes.
        self._guarded(self._write_storage, offset)
        return self.tell()

    def tell(self) -> int:
        return self._stream.tell()

    def flush(self) -> None:
        """Do nothing."""

    def _guarded(self, write: Callable[[Any], None], argument: Any) -> None:
        # Torch's zip writer does not survive an exception from a write: keep the first error, and write nothing after
        # it.
        if self._failure is None:
            try:
                write(argument)
            except BaseException as error:
                self._failure = error

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def forget_storages(self) -> None:
        # The class of the pickler lives until the next garbage collection, and would keep the tensors alive.
        self._storages.clear()

    def _storages_with_bytes(self) -> "Iterator[tuple[int, torch.UntypedStorage]]":
        for number, storage in enumerate(self._storages.values()):
            if storage.nbytes():
                yield number, storage

    def _write_storage(self, nbytes: int) -> None:
        number, storage = next(self._unwritten, (0, None))
        # The order of the storages is torch's own; a mismatch means that torch has changed.
        if storage is None or storage.nbytes() != nbytes:
            raise _unexpected()
        self._descriptor_crc = self._checksums[number] = self._stream.append_storage(storage)

    def _write_piece(self, data: Any) -> None:
        if self._descriptor_crc is not None:
            # The write after a storage is its data descriptor, with 0 for the CRC-32.
            if bytes(data[:8]) != _DESCRIPTOR + bytes(4):
                raise _unexpected()
            data = _DESCRIPTOR + struct.pack("<I", self._descriptor_crc) + bytes(data[8:])
            self._descriptor_crc = None
        elif data[:4] == _ENTRY:
            data = self._directory_with_checksums(bytearray(data))
            self.complete = True
        self._stream.append(data)

    def _directory_with_checksums(self, directory: bytearray) -> bytearray:
        # Torch writes the whole zip directory with one call.
        at = storages = 0
        while at < len(directory):
            lengths = struct.unpack_from("<HHH", directory, at + _ENTRY_LENGTHS)
            name = directory[at + _ENTRY_NAME : at + _ENTRY_NAME + lengths[0]]
            _, is_storage, number = name.rpartition(_STORAGES)
            if is_storage:
                struct.pack_into("<I", directory, at + _ENTRY_CRC, self._checksums.get(int(number), 0))
                storages += 1
            at += _ENTRY_NAME + sum(lengths)
        if storages != len(self._storages) or next(self._unwritten, None) is not None:
            raise _unexpected()
        return directory


def _unexpected() -> UnsupportedError:
    import torch

    return UnsupportedError(
        f"torch {torch.__version__} writes its files in another way than the versions that Tensorkeep supports",
        remedy='use format="native"',
    )


def _recording_pickle() -> "tuple[ModuleType, dict[int, torch.UntypedStorage]]":
    """Return a pickle module for ``torch.save``, and a dict that receives the storages in torch's order."""
    import torch

    storages: dict[int, torch.UntypedStorage] = {}

    # `reducer_override` meets the tensors in the order that torch numbers their storages in.
    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                storages.setdefault(storage._cdata, storage)
            return NotImplemented

    module = ModuleType("pickle")
    module.__dict__["Pickler"] = Pickler
    return module, storages


def write(
    flat: Flat[Source], destination: Path, settings: WriteSettings, replaceable: Callable[[Path], bool]
) -> WriteResult:
    _check_settings(destination, settings)
    specs = leaf_specs(flat.skeleton)
    _check_readable(flat, specs)
    with Commit(destination, directory=False, overwrite=settings.overwrite, replaceable=replaceable) as commit:
        values, copied = _materialise(flat, specs, settings.threads)
        meter = parallel.Meter(sum(leaf.nbytes for leaf in flat.leaves.values()), settings.progress)
        with TorchStream(commit.path, meter=meter) as stream:
            stream.save(unflatten(flat.skeleton, values))
            size = stream.finish()
        commit.publish()
    return WriteResult(stored_bytes=size, new_bytes=size, peak_buffer_bytes=copied)


def _check_settings(destination: Path, settings: WriteSettings) -> None:
    if settings.compression != "none":
        remedy = 'use compression="none", or format="native"'
        text = f"torch files cannot be compressed with {settings.compression!r}"
        raise UnsupportedError(text, path=destination, remedy=remedy)
    if settings.metadata:
        remedy = "put it into the state, or leave it out (drop_metadata=True)"
        raise UnsupportedError("torch files cannot store metadata", path=destination, remedy=remedy)


def _check_readable(flat: Flat[Source], specs: Mapping[str, LeafSpec]) -> None:
    import torch

    # `torch.load(weights_only=True)` must read the file. Only a try can show it, because its rules differ by version.
    stand_ins: dict[tuple[str, str], Array] = {}
    values: dict[str, Array] = {}
    for name, spec in specs.items():
        if spec.kind not in ("tensor", "parameter"):
            raise UnsupportedLeafError(
                "a numpy array in a torch file cannot be loaded without running code from the file",
                name=name,
                remedy='save torch.from_numpy(x), or use format="native"',
            )
        source = flat.leaves[flat.aliases[name].of if name in flat.aliases else name]
        # One empty tensor per dtype: the check costs no memory, and hardly any time.
        empty = allocate(spec.kind, source.dtype, (0,))
        values[name] = stand_ins.setdefault((spec.kind, source.dtype.name), empty)
    state = unflatten(flat.skeleton, values)
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        with warnings.catch_warnings():
            # Torch warns about some exotic dtypes.
            warnings.simplefilter("ignore", UserWarning)
            torch.load(file, map_location="cpu", weights_only=True)
    except RuntimeError as error:
        # Torch cannot create tensors of some dtypes, such as float8, with gradients.
        raise UnsupportedError(
            f"torch.load would fail on the file that torch.save makes of this state ({first_line(error)})",
            remedy='detach its tensors from their gradients, or use format="native"',
        ) from error
    # Classes that cannot be imported raise AttributeError or TypeError.
    except (PickleError, AttributeError, TypeError) as error:
        found = re.search(r"GLOBAL ([^\s,]+)|<class '([^']+)'>", str(error))
        what = f"a {found[1] or found[2]}" if found else "a value of this state"
        raise UnsupportedError(
            f"{what} in a torch file cannot be loaded without running code from the file",
            remedy='save it as plain values, lists, dicts and tensors, or use format="native"',
        ) from error


def _materialise(flat: Flat[Source], specs: Mapping[str, LeafSpec], threads: int) -> tuple[dict[str, Array], int]:
    """Return the array of every leaf and alias, and the number of bytes that were copied."""
    values: dict[str, Array] = {}
    tasks: list[Callable[[], None]] = []
    copied = 0
    storages: set[int] = set()
    for name, source in flat.leaves.items():
        # Two tensors over one storage of the same bytes would be saved as views of each other.
        if isinstance(source, Leaf) and fills_its_storage(source) and source.array.data_ptr() not in storages:
            values[name] = source.array
            storages.add(source.array.data_ptr())
        else:
            # Torch saves full storages: for one row of a matrix it would save the matrix.
            values[name] = allocate(specs[name].kind, source.dtype, source.shape)
            tasks += _reads(source, values[name])
            copied += source.nbytes
    parallel.run(tasks, threads)
    # Views of one storage are saved as views, so aliases cost no bytes.
    for name, alias in flat.aliases.items():
        values[name] = make_view(values[alias.of], alias)
    return values, copied


def fills_its_storage(leaf: Leaf) -> bool:
    tensor = leaf.array
    return bool(not is_lazy(tensor) and tensor.is_contiguous() and tensor.untyped_storage().nbytes() == leaf.nbytes)


def _reads(source: Source, array: Array) -> Iterator[Callable[[], None]]:
    made = Leaf.of(source.name, array)
    out = made.host_bytes() if made else None
    assert out is not None
    for start in range(0, source.nbytes, BLOCK_BYTES):
        stop = min(start + BLOCK_BYTES, source.nbytes)
        yield functools.partial(source.read, start, stop, out[start:stop])
