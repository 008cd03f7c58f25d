"""The native format: a directory of safetensors files and a manifest.

Specified in ``docs/reference/native-format.md``.
"""

from __future__ import annotations

from pathlib import Path

from tensorkeep.formats.base import Format, OpenSettings, Reader, StagedWrite, WriteResult, WriteSettings
from tensorkeep.formats.native import reader, writer
from tensorkeep.formats.native.history import NativeOptions
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat


class NativeFormat(Format):
    """A directory of safetensors files and a manifest; see `tensorkeep.formats.base.Format`."""

    name = "native"
    options = NativeOptions

    def recognises(self, path: Path) -> bool:
        return reader.is_native(path)

    def open(self, path: Path, settings: OpenSettings) -> Reader:
        return reader.NativeReader(path, settings)

    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
        return self.begin(flat, destination, settings).run()

    def begin(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> StagedWrite:
        return writer.NativeWrite(flat, destination, settings, replaceable=reader.is_replaceable)


FORMAT = NativeFormat()
