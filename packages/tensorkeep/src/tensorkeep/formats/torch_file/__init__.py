"""The format ``torch``: files of ``torch.save``, read without executing their pickles and written by torch."""

from pathlib import Path

from tensorkeep.errors import UsageError
from tensorkeep.formats.base import Format, OpenSettings, Reader, WriteResult, WriteSettings
from tensorkeep.formats.blockfile.plan import CODED_SUFFIX, SUFFIX
from tensorkeep.formats.torch_file.archive import is_torch_file
from tensorkeep.formats.torch_file.reader import TorchFolderReader, TorchReader, locate
from tensorkeep.formats.torch_file.writer import write
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat


class TorchFormat(Format):
    """The files of ``torch.save``, without options, compression and metadata; see `tensorkeep.formats.base.Format`.

    It also reads files of torch before version 1.6, and the tensors of TorchScript archives as a flat dict by name.
    It writes what ``torch.load(weights_only=True)`` reads: tensors, parameters, dicts, lists, tuples, sets and plain
    scalars, but not numpy arrays, named tuples, dataclasses, enums, ranges or frozensets. Writing from another
    checkpoint holds the whole state in memory, because ``torch.save`` does.
    """

    name = "torch"
    suffixes = (".pt", ".pth", ".bin")

    def recognises(self, path: Path) -> bool:
        return locate(path) is not None or is_torch_file(path)

    def open(self, path: Path, settings: OpenSettings) -> Reader:
        place = locate(path)
        return TorchReader(path, settings) if place is None else TorchFolderReader(path, place, settings)

    def check(self, destination: Path, settings: WriteSettings) -> None:
        if destination.name.endswith((SUFFIX, CODED_SUFFIX)):
            raise UsageError(
                f"a file of torch.save is not read under the suffix {destination.suffix}, which means safetensors",
                path=destination,
                remedy='give it the suffix .pt, or write safetensors (format="safetensors")',
            )

    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
        return write(flat, destination, settings, replaceable=is_torch_file)


FORMAT = TorchFormat()
