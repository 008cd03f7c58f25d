"""zipnn, a codec for tensors: each tensor compressed in turn, all in one file."""

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tensorkeep.bench.checkpoint.tools.base import Threads, Tool

_LEAST_BYTES = 4096
_DTYPES = ("bfloat16", "float16", "float32")


class ZipnnTool(Tool, frozen=True, tag="zipnn"):
    """``ZipNN.compress`` for each tensor. The file holds, for each, a line of JSON that describes it and its bytes."""

    threads: Threads = 2

    suffix: ClassVar[str] = ".znn"
    package: ClassVar[str | None] = "zipnn"

    def save(self, state: Any, path: Path) -> None:
        import torch

        with path.open("xb") as file:
            for name, tensor in state.items():
                raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
                dtype = str(tensor.dtype).removeprefix("torch.")
                compressed = raw.nbytes >= _LEAST_BYTES and dtype in _DTYPES
                # zipnn overwrites its input, so it gets a copy; it crashes on inputs of a few bytes.
                stored = self._codec(dtype).compress(bytearray(raw)) if compressed else raw.data
                header = [name, dtype, list(tensor.shape), len(stored), compressed]
                file.write(json.dumps(header).encode() + b"\n")
                file.write(stored)

    def load(self, path: Path) -> Any:
        import torch

        loaded = {}
        with path.open("rb") as file:
            while header := file.readline():
                name, dtype, shape, length, compressed = json.loads(header)
                stored = file.read(length)
                raw = self._codec(dtype).decompress(stored) if compressed else bytearray(stored)
                bytes_ = torch.from_numpy(np.frombuffer(raw, np.uint8)) if raw else torch.empty(0, dtype=torch.uint8)
                loaded[name] = bytes_.view(getattr(torch, dtype))[: math.prod(shape)].view(shape)
        return loaded

    def _codec(self, dtype: str) -> Any:
        from zipnn import ZipNN

        return ZipNN(bytearray_dtype=dtype, threads=self.threads)
