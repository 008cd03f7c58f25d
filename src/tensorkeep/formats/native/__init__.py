"""The native format: a directory of safetensors files and a manifest.

Specified in ``docs/reference/native-format.md``.
"""

from __future__ import annotations

from pathlib import Path

from tensorkeep.formats.base import Format, OpenSettings, Reader, Write, WriteSettings, Written
from tensorkeep.formats.native import reader, writer
from tensorkeep.state.source import Source
from tensorkeep.state.tree import Flat


class NativeFormat(Format):
    """See `tensorkeep.formats.base.Format`.

    The options are ``shard_bytes`` and ``direct_io``; and, for saves that write only what has changed, ``incremental``,
    ``base`` and ``delta`` (see `tensorkeep.save`).
    """

    name = "native"

    def recognises(self, path: Path) -> bool:
        return reader.is_native(path)

    def open(self, path: Path, settings: OpenSettings) -> Reader:
        return reader.NativeReader(path, settings)

    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> Written:
        return self.begin(flat, destination, settings).run()

    def begin(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> Write:
        return writer.NativeWrite(flat, destination, settings, replaceable=reader.is_replaceable)


FORMAT = NativeFormat()
