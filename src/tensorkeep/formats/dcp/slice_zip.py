"""A piece of a distributed checkpoint: a ``torch.save`` file of its own, inside a larger file that is mapped."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from pickle import UnpicklingError
from typing import Any, cast

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, TensorkeepError, UnsupportedError
from tensorkeep.formats.dcp.metadata import Place
from tensorkeep.formats.torch_file.zip_file import PICKLE, TorchZip, restricted_load
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import Bytes

DAMAGED = "the bytes on disk are not what was saved: take another checkpoint or copy"

_LOCAL_HEADER_BYTES = 30
_CRC_BYTES = 4 * 1024**2


class MappedFile:
    """A file in memory that is read when it is touched."""

    def __init__(self, directory: Directory, name: str) -> None:
        import torch

        self.path = directory.path / name
        with directory.open(name, follow_links=False) as file:
            self.size = file.size
            self.content: Bytes = np.empty(0, np.uint8)
            if file.size:
                # Torch keeps no descriptor open for a mapping, of which a checkpoint of many ranks has thousands.
                storage = torch.UntypedStorage.from_file(file.fd_path, False, file.size)
                self.content = torch.empty(0, dtype=torch.uint8).set_(cast(Any, storage)).numpy()


class SliceZip:
    """The records of a piece; all but the tensors' storages have been checked.

    Raises
    ------
    CorruptCheckpointError, UnsupportedError
        As `TorchZip`.
    """

    def __init__(self, file: MappedFile, place: Place) -> None:
        self._file = file
        self.content = file.content[place.offset : place.offset + place.length]
        with io.BufferedReader(_View(self.content)) as view:
            archive = TorchZip(view, place.length, file.path)
            with zipfile.ZipFile(view) as listing:
                infos = listing.infolist()
        self.pickle_bytes = archive.pickle_bytes
        self.checksummed = archive.checksummed
        root = next(info.filename for info in infos if info.filename.endswith(f"/{PICKLE}")).removesuffix(PICKLE)
        self._records = {info.filename.removeprefix(root): info for info in infos}

    def record(self, name: str) -> Bytes:
        """Return a record's bytes.

        Raises
        ------
        ValueError
            If there is none, or it does not lie in the piece.
        """
        info = self._records.get(name)
        if info is None:
            raise ValueError(f"it has no record {name!r}")
        header = self.content[info.header_offset : info.header_offset + _LOCAL_HEADER_BYTES]
        if info.header_offset < 0 or len(header) < _LOCAL_HEADER_BYTES:
            raise ValueError(f"the record {name!r} lies beyond its end")
        lengths = header[26:30].view("<u2")
        start = info.header_offset + _LOCAL_HEADER_BYTES + int(lengths[0]) + int(lengths[1])
        found = self.content[start : start + info.file_size]
        if found.size != info.file_size:
            raise ValueError(f"the record {name!r} lies beyond its end")
        return found

    def crc(self, name: str) -> int | None:
        """Return the CRC-32 that was written down for a record."""
        return int(self._records[name].CRC) if self.checksummed else None

    def check(self) -> None:
        """Check every record.

        Raises
        ------
        CorruptCheckpointError
        """
        for name in self._records:
            try:
                sound = self.crc(name) in (None, crc32(self.record(name)))
            except ValueError as error:
                raise CorruptCheckpointError(str(error), path=self._file.path) from error
            if not sound:
                raise CorruptCheckpointError(
                    f"the CRC-32 of the record {name!r} is wrong", path=self._file.path, remedy=DAMAGED
                )


def crc32(content: Bytes) -> int:
    """Return the CRC-32 of memory, which is read in pieces that other threads can run between."""
    crc = 0
    for at in range(0, len(content), _CRC_BYTES):
        crc = zlib.crc32(content[at : at + _CRC_BYTES], crc)
    return crc


def load_value(name: str, place: Place, file: MappedFile) -> tuple[Any, int]:
    """Return a plain value, made by torch's restricted unpickler, and the length of its pickle.

    Raises
    ------
    CorruptCheckpointError
        If it is damaged.
    UnsupportedError
        If it is of classes that would have to be trusted.
    """
    try:
        archive = SliceZip(file, place)
        archive.check()
        return restricted_load(io.BytesIO(archive.content.tobytes())), archive.pickle_bytes
    except TensorkeepError as error:
        error.name = error.name or name
        raise
    except UnpicklingError as error:
        raise UnsupportedError(
            "holds a value that torch's restricted unpickler refuses: loading it could run code from the file",
            path=file.path,
            name=name,
            remedy="where you trust it, load it with torch.distributed.checkpoint and save plain tensors and values",
        ) from error
    # Hostile bytes make torch raise almost any type; whichever it is, the value cannot be read.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise CorruptCheckpointError(f"torch cannot read it ({reason})", path=file.path, name=name) from error


class _View(io.RawIOBase):
    """Memory as a file."""

    def __init__(self, content: Bytes) -> None:
        self._content = memoryview(content)
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: len(self._content)}[whence]
        if origin + offset < 0:
            raise ValueError("seeks before its beginning")
        self._place = origin + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any, /) -> int:
        found = self._content[self._place : self._place + len(buffer)]
        buffer[: len(found)] = found
        self._place += len(found)
        return len(found)
