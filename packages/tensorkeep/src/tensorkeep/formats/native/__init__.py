"""The native format: safetensors files and a manifest, specified in ``docs/reference/native-format.md``."""

from pathlib import Path

from tensorkeep.errors import CorruptCheckpointError, UsageError
from tensorkeep.formats.base import Format, OpenSettings, Reader, StagedWrite, WriteResult, WriteSettings
from tensorkeep.formats.native.directory import is_native
from tensorkeep.formats.native.manifest import FILE_NAME
from tensorkeep.formats.native.reader import NativeReader, OpenFiles
from tensorkeep.formats.native.writer import NativeOptions, SingleProcessWrite
from tensorkeep.paths import as_path
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat
from tensorkeep.storage import storage_of


class NativeFormat(Format):
    name = "native"
    options = NativeOptions
    writes_to_stores = True

    def recognises(self, path: Path) -> bool:
        return is_native(path)

    def open(self, path: Path, settings: OpenSettings) -> Reader:
        opened = OpenFiles(path, settings)
        try:
            return NativeReader(opened, settings)
        except BaseException as error:
            # The reader owns the files from here on only if its constructor succeeds.
            opened.close()
            # Only a hostile skeleton is nested so deeply.
            if isinstance(error, RecursionError):
                raise CorruptCheckpointError("is nested too deeply", path=path / FILE_NAME) from error
            raise

    def check(self, destination: Path, settings: WriteSettings) -> None:
        base = settings.options_as(NativeOptions).base
        # A callable names the base only when the writing begins.
        if base is None or callable(base):
            return
        if storage_of(as_path(base)) is not storage_of(destination):
            raise UsageError(
                "the base and the new checkpoint share no files: one is on a disk, the other in an object store",
                path=base,
                remedy="leave out base=, or give a base beside the new checkpoint",
            )

    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
        return self.begin(flat, destination, settings).run()

    def begin(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> StagedWrite:
        return SingleProcessWrite(flat, destination, settings)


FORMAT = NativeFormat()
