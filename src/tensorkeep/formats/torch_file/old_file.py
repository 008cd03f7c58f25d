"""Files as torch wrote before version 1.6: pickles, followed by the storages of tensors, without checksums."""

from pathlib import Path
from typing import Any, BinaryIO

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.pickles.inert_pickle import Bounded, Global, Pairs, Recorder
from tensorkeep.formats.pickles.tensors import STORAGES
from tensorkeep.io.files import Bytes
from tensorkeep.state.dtypes import BY_NAME

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_COUNT_BYTES = 8


class OldFile:
    """The pickles of a file of ``size`` bytes, and where its storages are; like `TorchZip`, without its checks.

    Raises CorruptCheckpointError if they are malformed or the file is too short; UnsupportedError if it is another
    pickle, or comes from a big-endian machine.
    """

    checksummed = is_script = False

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._size = size
        self.storages: set[tuple[int, int]] = set()
        file.seek(0)
        recorder = Recorder(Bounded(file, size))
        try:
            if recorder.load() != _MAGIC_NUMBER or recorder.load() != _VERSION:
                raise UnsupportedError(
                    "is a bare Python pickle, which torch.save did not write; loading it could run any code",
                    path=path,
                    remedy="if you trust it, load it with pickle, and save tensors and plain values",
                )
            system = recorder.load()
            if type(system) is Pairs and any(pair == ("little_endian", False) for pair in system):
                remedy = "save it again on a little-endian one"
                raise UnsupportedError("comes from a big-endian machine", path=path, remedy=remedy)
            recorder.globals.clear()
            self._state, self._recorder = recorder.load(), recorder
            keys = recorder.load()
            self.pickle_bytes = start = file.tell()
            self._starts = self._find_storages(keys, start)
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
                if type(count) is int and count >= 0:
                    sizes[str(key)] = count * (dtype.itemsize if dtype else _QUANTISED.get(kind.name, 1))
        starts = {}
        for key in keys if type(keys) is list else ():
            if str(key) not in sizes:
                raise ValueError("a storage belongs to no tensor")
            starts[str(key)] = start + _COUNT_BYTES
            start += _COUNT_BYTES + sizes[str(key)]
        if start > self._size:
            raise ValueError(f"its storages need {start:,} bytes, the file has {self._size:,}")
        return starts

    def pickled(self) -> tuple[Any, Recorder]:
        """Return what the pickle records, and the recorder."""
        return self._state, self._recorder

    def storage_at(self, key: str, content: Bytes) -> int:
        """Return where in the file a storage begins; ValueError if it does not exist."""
        if key not in self._starts:
            raise ValueError(f"it has no storage {key!r:.50}")
        return self._starts[key]

    def local_headers(self) -> list[tuple[int, int]]:
        """Return nothing: no storage has a header that must be read to find it."""
        return []


_QUANTISED = {"QInt32Storage": 4}
"""Bytes an element of storages of quantised tensors; the others have one."""
