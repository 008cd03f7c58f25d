"""The format ``dcp``: checkpoints of ``torch.distributed.checkpoint``.

Written in one process; read without DCP's own reader and without a process group, from any number of ranks.
"""

import re
from pathlib import Path
from typing import ClassVar

from tensorkeep.formats import sidecar
from tensorkeep.formats.base import Format, FormatOptions, OpenSettings, Reader, WriteResult, WriteSettings
from tensorkeep.formats.dcp.metadata import FILE_NAME
from tensorkeep.formats.dcp.options import DcpOptions
from tensorkeep.formats.dcp.reader import DcpReader
from tensorkeep.formats.probe import first_bytes, names_in
from tensorkeep.formats.torch_file.zip_file import begins_like_old_pickle
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat

__all__ = ["FORMAT", "DcpFormat"]


class DcpFormat(Format):
    """Distributed checkpoints; see `tensorkeep.formats.base.Format`. Nothing is compressed.

    Other programs find every tensor under its dotted name, and the plain values of dicts and lists under theirs. What
    DCP has no place for (container types, tensors that share storage, metadata) is stored in ``tensorkeep.json``. A
    conversion from another checkpoint holds one tensor for each thread in memory.
    """

    name: ClassVar[str] = "dcp"
    options: ClassVar[type[FormatOptions]] = DcpOptions

    def recognises(self, path: Path) -> bool:
        start = first_bytes(path / FILE_NAME, 2)
        return start is not None and begins_like_old_pickle(start)

    def open(self, path: Path, settings: OpenSettings) -> Reader:
        return DcpReader(path, settings)

    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
        # Here, because it imports torch.distributed.
        from tensorkeep.formats.dcp.writer import write

        return write(flat, destination, settings, replaceable=self._is_replaceable)

    def _is_replaceable(self, path: Path) -> bool:
        known = re.compile(rf"__\d+_\d+\.distcp|{re.escape(FILE_NAME)}|{re.escape(sidecar.FILE_NAME)}")
        return self.recognises(path) and all(known.fullmatch(name) for name in names_in(path))


FORMAT = DcpFormat()
