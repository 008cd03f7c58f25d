"""TensorStore's arrays: a directory of Zarr v2 or v3 arrays, or an OCDBT database of them, as JAX's world keeps them.

One array per tensor, and beside them one JSON file of ours that makes a nested state of them. Arrays that others wrote
are read, too. ``tensorstore`` is imported when it is needed and comes with ``pip install 'tensorkeep[tensorstore]'``.
"""

from __future__ import annotations

from pathlib import Path

from tensorkeep.formats.base import Format, OpenSettings, Reader, WriteResult, WriteSettings
from tensorkeep.formats.tensorstore import discovery
from tensorkeep.formats.tensorstore.loading import load_arrays
from tensorkeep.formats.tensorstore.settings import TensorStoreOptions
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat


class TensorStoreFormat(Format):
    """See `tensorkeep.formats.base.Format`; the options are those of ``settings.ArraySettings``.

    Nothing is synced but the directory's own name where the option ``sync`` is False.
    """

    name = "tensorstore"
    options = TensorStoreOptions

    def recognises(self, path: Path) -> bool:
        return discovery.recognises(path)

    def open(self, path: Path, settings: OpenSettings) -> Reader:
        from tensorkeep.formats.tensorstore.reader import TensorStoreReader

        return TensorStoreReader(path, settings)

    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
        from tensorkeep.formats.tensorstore.saving import write

        return write(flat, destination, settings)


FORMAT = TensorStoreFormat()

__all__ = ["FORMAT", "TensorStoreFormat", "load_arrays"]
