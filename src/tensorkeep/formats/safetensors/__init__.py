"""The format ``safetensors``: one file, or a directory of shards with Hugging Face's index.

A flat dict of tensors becomes a plain safetensors file. For any other state, the entry ``tensorkeep`` of the file's
``__metadata__`` holds the structure (see ``blockfile/header.py``): other tools see all tensors by their dotted names,
and `tensorkeep.load` returns the nested state. Links are followed: the cache of Hugging Face consists of links.
"""

from pathlib import Path

from tensorkeep.formats.base import Format, OpenSettings, Reader, WriteResult, WriteSettings
from tensorkeep.formats.blockfile.plan import CODED_SUFFIX, SUFFIX
from tensorkeep.formats.safetensors.reader import SafetensorsReader, locate
from tensorkeep.formats.safetensors.writer import SafetensorsOptions, check_compression, check_store, write
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat


class SafetensorsFormat(Format):
    """One safetensors file, or a directory of shards with an index; see `tensorkeep.formats.base.Format`.

    A destination that ends in ``.safetensors`` or ``.tensorkeep`` becomes one file, any other a directory of shards.
    Compressed tensors need the suffix ``.tensorkeep``, or ``force``. Metadata maps strings to strings. In an object
    store, one file of uncompressed tensors is written.
    """

    name = "safetensors"
    options = SafetensorsOptions
    suffixes = (SUFFIX, CODED_SUFFIX)
    writes_to_stores = True

    def recognises(self, path: Path) -> bool:
        return locate(path) is not None

    def open(self, path: Path, settings: OpenSettings) -> Reader:
        return SafetensorsReader(path, settings)

    def check(self, destination: Path, settings: WriteSettings) -> None:
        check_compression(destination, settings)
        check_store(destination, settings)

    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
        return write(flat, destination, settings)


FORMAT = SafetensorsFormat()
