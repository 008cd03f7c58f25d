"""The files that ``torch.save`` writes to."""

from pathlib import Path
from typing import Any, Self

import numpy as np

from tensorkeep.formats.write import BLOCK_BYTES
from tensorkeep.io.files import Bytes, DirectFile
from tensorkeep.io.parallel import Cancellation, Meter

_BUFFER_BYTES = 1024**2


class TorchStream:
    """A new file for one or several calls of ``torch.save``; a context manager that closes it.

    An error or a cancellation is kept, and nothing is written after it: torch's zip writer does not survive an
    exception that passes through it. Call `raise_failure` after ``torch.save``. The meter counts the bytes written, up
    to its total: the bytes of the zip container come on top of those of the tensors.
    """

    def __init__(self, path: Path, *, cancellation: Cancellation | None = None, meter: Meter | None = None) -> None:
        self._file = DirectFile(path, direct=False)
        self._cancellation = cancellation
        self._meter = meter
        self._uncounted = meter.total if meter is not None else 0
        self._small = bytearray()
        self._offset = 0
        self._failure: BaseException | None = None

    def write(self, data: Any) -> int:
        if self._failure is None:
            try:
                # Torch makes some forty writes of a few bytes for each tensor.
                if len(self._small) + len(data) > _BUFFER_BYTES:
                    self._flush_small()
                if len(data) > _BUFFER_BYTES:
                    self._write_blocks(np.frombuffer(data, np.uint8))
                else:
                    self._small += data
                self._count(len(data))
            except BaseException as error:
                self._failure = error
        return len(data)

    def _flush_small(self) -> None:
        small, self._small = self._small, bytearray()
        if small:
            self._write_blocks(np.frombuffer(small, np.uint8))

    def _write_blocks(self, content: Bytes) -> None:
        for start in range(0, len(content), BLOCK_BYTES):
            if self._cancellation is not None:
                self._cancellation.check()
            block = content[start : start + BLOCK_BYTES]
            self._file.write(self._offset, block)
            self._offset += len(block)

    def _count(self, nbytes: int) -> None:
        if self._meter is not None:
            counted = min(nbytes, self._uncounted)
            self._uncounted -= counted
            self._meter.add(counted)

    def flush(self) -> None:
        """Do nothing; torch calls it."""

    def tell(self) -> int:
        return self._offset + len(self._small)

    def raise_failure(self) -> None:
        """Raise the error that was kept, if there is one."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> int:
        """Make the file durable and return its size."""
        self.raise_failure()
        self._flush_small()
        self._file.finish(self._offset)
        return self._offset

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
