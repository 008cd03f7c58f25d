"""The format ``tensorstore``: one Zarr v2 or v3 array per tensor, in a directory or an OCDBT database."""

from pathlib import Path
from typing import ClassVar

from tensorkeep.ext.formats import Format, FormatOptions, OpenSettings, Reader, WriteResult, WriteSettings
from tensorkeep.ext.state import Flat, Source
from tensorkeep_formats.tensorstore.reader import TensorStoreReader, recognises
from tensorkeep_formats.tensorstore.specs import TensorStoreOptions

__all__ = ["FORMAT", "TensorStoreFormat"]


class TensorStoreFormat(Format):
    """TensorStore arrays; see `tensorkeep.formats.base.Format`.

    With the option ``sync=False``, only the name of the checkpoint's directory is made durable.
    """

    name: ClassVar[str] = "tensorstore"
    options: ClassVar[type[FormatOptions]] = TensorStoreOptions
    suffixes: ClassVar[tuple[str, ...]] = (".zarr",)

    def recognises(self, path: Path) -> bool:
        return recognises(path)

    def open(self, path: Path, settings: OpenSettings) -> Reader:
        return TensorStoreReader(path, settings)

    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
        from tensorkeep_formats.tensorstore.writer import write

        return write(flat, destination, settings)


FORMAT = TensorStoreFormat()
