"""The format ``dcp``: checkpoints of ``torch.distributed.checkpoint``, without DCP's reader or a process group."""

import re
from pathlib import Path

from tensorkeep.errors import UsageError
from tensorkeep.formats import sidecar
from tensorkeep.formats.base import Format, FormatOptions, OpenSettings, Reader, WriteResult, WriteSettings
from tensorkeep.formats.dcp.reader import FILE_NAME, DcpFormatReader
from tensorkeep.formats.torch_file.archive import begins_like_pickle
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat
from tensorkeep.storage import first_bytes, names_in

# Each thread writes one file.
_MAX_THREADS = 256


class DcpOptions(FormatOptions, frozen=True):
    """Options of ``tensorkeep.save(..., format="dcp")``.

    Attributes
    ----------
    thread_count : int or None
        Number of data files, each written by one thread: 1 to 256. By default as many as the save has threads.
    """

    thread_count: int | None = None

    def __post_init__(self) -> None:
        if self.thread_count is not None and not 1 <= self.thread_count <= _MAX_THREADS:
            raise UsageError(f"thread_count is {self.thread_count}", remedy=f"give a number from 1 to {_MAX_THREADS}")


class DcpFormat(Format):
    """Distributed checkpoints; see `tensorkeep.formats.base.Format`. Nothing is compressed.

    Other programs find tensors and the plain values of dicts and lists under their dotted names. ``tensorkeep.json``
    stores what DCP cannot: container types, tensors that share storage, metadata. A conversion from another checkpoint
    holds one tensor per thread in memory.
    """

    name = "dcp"
    options = DcpOptions

    def recognises(self, path: Path) -> bool:
        start = first_bytes(path / FILE_NAME, 2)
        return start is not None and begins_like_pickle(start)

    def open(self, path: Path, settings: OpenSettings) -> Reader:
        return DcpFormatReader(path, settings)

    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
        # Here, because it imports torch.distributed.
        from tensorkeep.formats.dcp.writer import write

        threads = settings.options_as(DcpOptions).thread_count or min(settings.threads, _MAX_THREADS)
        return write(flat, destination, settings, threads, replaceable=self._is_replaceable)

    def _is_replaceable(self, path: Path) -> bool:
        # An overwrite removes the whole folder, so every file in it must be known.
        known = re.compile(rf"__\d+_\d+\.distcp|{re.escape(FILE_NAME)}|{re.escape(sidecar.FILE_NAME)}")
        return self.recognises(path) and all(known.fullmatch(name) for name in names_in(path))


FORMAT = DcpFormat()
