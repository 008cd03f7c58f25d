"""zipnn, a codec for tensors: what it compresses, one tensor after the other, in one file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar

import msgspec
import numpy as np

from tensorkeep.bench.checkpoint.tools.base import Tool

_LEAST_BYTES = 4096
_DTYPES = ("bfloat16", "float16", "float32")


class ZipnnTool(Tool, frozen=True, tag="zipnn"):
    """Each tensor's bytes through ``ZipNN.compress``; the index stands at the end of the file, its length last.

    Attributes
    ----------
    threads : int
        Given to zipnn.
    """

    threads: Annotated[int, msgspec.Meta(ge=1, le=256)] = 2

    suffix: ClassVar[str] = ".znn"
    needs: ClassVar[str | None] = "zipnn"

    def save(self, state: Any, path: Path) -> None:
        import torch

        index = []
        with path.open("xb") as file:
            for name, tensor in state.items():
                raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
                dtype = str(tensor.dtype).removeprefix("torch.")
                coded = raw.nbytes >= _LEAST_BYTES and dtype in _DTYPES
                # It overwrites what it is given, so that the state needs a copy; it crashes on a few bytes.
                stored = self._codec(dtype).compress(bytearray(raw)) if coded else raw.data
                index.append([name, dtype, list(tensor.shape), len(stored), coded])
                file.write(stored)
            trailer = json.dumps(index).encode()
            file.write(trailer + len(trailer).to_bytes(8, "little"))

    def load(self, path: Path) -> Any:
        import torch

        with path.open("rb") as file:
            index = _read_index(file)
            file.seek(0)
            loaded = {}
            for name, dtype, shape, length, coded in index:
                stored = file.read(length)
                raw = self._codec(dtype).decompress(stored) if coded else bytearray(stored)
                if len(raw):
                    flat = torch.from_numpy(np.frombuffer(raw, np.uint8)).view(getattr(torch, dtype))
                else:
                    flat = torch.empty(0, dtype=getattr(torch, dtype))
                loaded[name] = flat[: math.prod(shape)].view(shape)
        return loaded

    def _codec(self, dtype: str) -> Any:
        from zipnn import ZipNN

        return ZipNN(bytearray_dtype=dtype, threads=self.threads)


def _read_index(file: BinaryIO) -> list[tuple[str, str, list[int], int, bool]]:
    file.seek(-8, 2)
    end = file.tell()
    length = int.from_bytes(file.read(8), "little")
    file.seek(end - length)
    index: list[tuple[str, str, list[int], int, bool]] = json.loads(file.read(length))
    return index
