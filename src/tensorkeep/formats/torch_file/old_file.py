"""Files as torch wrote before version 1.6: pickles, followed by the storages of tensors, without checksums."""

import pickle
from pathlib import Path
from typing import Any, BinaryIO

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.pickles.inert_pickle import Bounded, Global, Pairs, Recorder
from tensorkeep.formats.pickles.tensors import READ_WITH_TORCH, STORAGES
from tensorkeep.io.files import Bytes
from tensorkeep.state.dtypes import BY_NAME

_MAGIC_NUMBER, _START_BYTES = 0x1950A86A20F9469CFC6C.to_bytes(10, "little"), 32
_VERSION = 1001
_COUNT_BYTES = 8


class OldFile:
    """The pickles of a file of ``size`` bytes, and where its storages are; like `TorchZip`, without its checks.

    Raises CorruptCheckpointError if they are malformed or the file is too short; UnsupportedError if it is another
    pickle, comes from a big-endian machine, or holds more than one save.
    """

    checksummed = is_script = False
    constants = 0

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._size = size
        self.storages: set[tuple[int, int]] = set()
        self._counts: dict[str, int] = {}
        file.seek(0)
        recorder = Recorder(Bounded(file, size))
        try:
            first = file.read(_START_BYTES)
            if _MAGIC_NUMBER not in first and (size > _START_BYTES or first.endswith(pickle.STOP)):
                raise UnsupportedError(
                    "is a bare Python pickle, which torch.save did not write; loading it could run any code",
                    path=path,
                    remedy="if you trust it, load it with pickle, and save tensors and plain values",
                )
            file.seek(0)
            recorder.load()
            if recorder.load() != _VERSION:
                text = f"is of another version of torch's old format than {_VERSION}"
                raise UnsupportedError(text, path=path, remedy=f"{READ_WITH_TORCH} it again")
            system = recorder.load()
            if type(system) is Pairs and any(pair == ("little_endian", False) for pair in system):
                remedy = "save it again on a little-endian one"
                raise UnsupportedError("comes from a big-endian machine", path=path, remedy=remedy)
            recorder.globals.clear()
            self._state, self._recorder = recorder.load(), recorder
            keys = recorder.load()
            self.pickle_bytes = start = file.tell()
            self._starts = self._find_storages(keys, start)
            file.seek(self._stop)
            if rest := file.read(1):
                what = "another save" if rest == pickle.PROTO else "what no tensor uses"
                raise UnsupportedError(
                    f"holds {what} after the first save, {size - self._stop:,} bytes",
                    path=path,
                    remedy="save each value to a file of its own, or all in one dict",
                )
        except ValueError as error:
            if isinstance(error, UnsupportedError):
                raise
            raise CorruptCheckpointError(f"its pickle is damaged ({error})", path=path) from error

    def _find_storages(self, keys: Any, start: int) -> dict[str, int]:
        """Return where each storage begins: one lies behind the other, each with its number of elements before it."""
        sizes: dict[str, int] = {}
        for found in self._recorder.references:
            if type(found) is tuple and len(found) == 6 and found[0] == "storage" and type(found[1]) is Global:
                kind, key, _, count = found[1:5]
                dtype = BY_NAME.get(STORAGES.get(kind.name, ""))
                if type(count) is int and count >= 0 and type(key) is str:
                    self._counts[key] = count
                    sizes[key] = count * (dtype.itemsize if dtype else _QUANTISED.get(kind.name, 1))
        starts = {}
        for key in keys if type(keys) is list else ():
            if type(key) is not str or key not in sizes:
                raise ValueError("a storage belongs to no tensor")
            starts[key] = start + _COUNT_BYTES
            start += _COUNT_BYTES + sizes[key]
        if start > self._size:
            raise ValueError(f"its storages need {start:,} bytes, the file has {self._size:,}")
        self._stop = start
        return starts

    def pickled(self) -> tuple[Any, Recorder]:
        """Return what the pickle records, and the recorder."""
        return self._state, self._recorder

    def storage_at(self, key: str, content: Bytes) -> int:
        """Return where in the file a storage begins; ValueError if it does not exist, or is not as the pickle says."""
        if key not in self._starts:
            raise ValueError(f"it has no storage {key!r:.50}")
        start = self._starts[key]
        if int.from_bytes(content[start - _COUNT_BYTES : start].tobytes(), "little") != self._counts[key]:
            raise ValueError(f"the storage {key!r:.50} has another length than the pickle says")
        return start

    def local_headers(self) -> list[tuple[int, int]]:
        """Return where in the file the count before each storage is."""
        return [(start - _COUNT_BYTES, start) for start in self._starts.values()]


_QUANTISED = {"QInt32Storage": 4}
"""Bytes an element of storages of quantised tensors; the others have one."""
