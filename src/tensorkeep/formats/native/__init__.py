"""The native format: a directory of safetensors files and a manifest.

Specified in ``docs/reference/native-format.md``.
"""

from pathlib import Path

from tensorkeep.formats.base import Format, OpenSettings, Reader
from tensorkeep.formats.native.directory import is_native
from tensorkeep.formats.native.reader import NativeReader
from tensorkeep.formats.native.writer import NativeOptions, NativeWrite
from tensorkeep.formats.write import StagedWrite, WriteResult, WriteSettings
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat


class NativeFormat(Format):
    """A directory of safetensors files and a manifest; see `tensorkeep.formats.base.Format`."""

    name = "native"
    options = NativeOptions

    def recognises(self, path: Path) -> bool:
        return is_native(path)

    def open(self, path: Path, settings: OpenSettings) -> Reader:
        return NativeReader(path, settings)

    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
        return self.begin(flat, destination, settings).run()

    def begin(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> StagedWrite:
        return NativeWrite(flat, destination, settings)


FORMAT = NativeFormat()
