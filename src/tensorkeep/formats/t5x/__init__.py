"""The format ``t5x``: one msgpack file and a zarr v2 array for each parameter.

Arrays are written and read by TensorStore, which comes with the extra ``tensorstore``.
"""

import stat
from pathlib import Path
from typing import ClassVar

from tensorkeep.formats import sidecar
from tensorkeep.formats.base import Format, FormatOptions, OpenSettings, Reader, WriteResult, WriteSettings
from tensorkeep.formats.t5x.reader import FILE_NAME
from tensorkeep.formats.tensorstore.specs import T5XOptions
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat
from tensorkeep.storage import file_mode, first_bytes, names_in

__all__ = ["FORMAT", "T5XFormat"]

_MAPS = frozenset(bytes((code,)) for code in (*range(0x80, 0x90), 0xDE, 0xDF))
"""First bytes of a msgpack map."""


class T5XFormat(Format):
    """Checkpoints of T5X; see `tensorkeep.formats.base.Format`.

    The whole state is stored under ``optimizer.target``: T5X finds its parameters there, nested as in the state, and
    plain values beside them. What T5X has no place for is stored in ``tensorkeep.json``.
    """

    name: ClassVar[str] = "t5x"
    options: ClassVar[type[FormatOptions]] = T5XOptions

    def recognises(self, path: Path) -> bool:
        start = first_bytes(path / FILE_NAME, 64)
        return start is not None and start[:1] in _MAPS and (b"version" in start or b"optimizer" in start)

    def open(self, path: Path, settings: OpenSettings) -> Reader:
        from tensorkeep.formats.t5x.reader import T5XReader

        return T5XReader(path, settings)

    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
        from tensorkeep.formats.t5x.writer import write

        return write(flat, destination, settings, replaceable=self._is_replaceable)

    def _is_replaceable(self, path: Path) -> bool:
        return self.recognises(path) and all(
            name in (FILE_NAME, sidecar.FILE_NAME) or _is_array(path / name) for name in names_in(path)
        )


def _is_array(path: Path) -> bool:
    return stat.S_ISDIR(file_mode(path, follow_links=False)) and first_bytes(path / ".zarray", 1) == b"{"


FORMAT = T5XFormat()
