"""Writing one split's tokens: appended as they come, hashed on the way, durable at the end."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from tensorkeep.formats.sealed import new_hasher
from tensorkeep.io.files import DirectFile
from tensorkeep.train.data.tokenizers.base import Tokens

_WRITTEN_AT_ONCE = 1 << 20


class TokenFile:
    """A new file of little-endian tokens; a context manager that closes it.

    Parameters
    ----------
    path : Path
    dtype : dtype
        uint16 or uint32.

    Attributes
    ----------
    tokens : int
        How many were added.

    Raises
    ------
    StoreError
        Here and in every method, if the operating system refuses.
    """

    def __init__(self, path: Path, dtype: np.dtype[np.unsignedinteger[Any]]) -> None:
        self.tokens = 0
        self._dtype = dtype
        self._file = DirectFile(path, direct=False)
        self._hasher = new_hasher(wide=False)
        self._waiting: list[Tokens] = []
        self._waiting_bytes = 0
        self._written = 0

    def add(self, tokens: Tokens) -> None:
        """Append tokens, which are of the file's dtype."""
        self._waiting.append(tokens)
        self._waiting_bytes += tokens.nbytes
        self.tokens += len(tokens)
        if self._waiting_bytes >= _WRITTEN_AT_ONCE:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            content = np.concatenate(self._waiting, dtype=self._dtype).view(np.uint8)
            self._hasher.update(content)
            self._file.write(self._written, content)
            self._written += content.nbytes
            self._waiting, self._waiting_bytes = [], 0

    def finish(self) -> str:
        """Make the file durable, close it, and return the xxh3-64 of its bytes as 16 hexadecimal digits."""
        self._write()
        self._file.finish(self._written)
        return str(self._hasher.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
