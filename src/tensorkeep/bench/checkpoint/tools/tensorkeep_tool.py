"""Tensorkeep's own format."""

from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec

from tensorkeep.bench.checkpoint.tools.base import Tool
from tensorkeep.checkpoint.load.load import load
from tensorkeep.checkpoint.save.save import save
from tensorkeep.io.buffers import DEFAULT_BUDGET
from tensorkeep.io.parallel import default_threads


class TensorkeepTool(Tool, frozen=True, tag="tensorkeep"):
    """`tensorkeep.save` and `tensorkeep.load`.

    Attributes
    ----------
    direct_io : bool
        Bypass the page cache when writing, where the file system supports it.
    threads : int or None
        Threads that write and read; the defaults of `save` and `load` if None.
    verify : bool
        Verify the checksum of every block that is loaded.
    """

    compression: str = "none"
    direct_io: bool = True
    threads: Annotated[int, msgspec.Meta(ge=1, le=256)] | None = None
    verify: bool = True

    nested: ClassVar[bool] = True

    @property
    def durable(self) -> bool:
        return True

    def check(self) -> None:
        from tensorkeep.formats.blockfile.data_file import find_codec

        if self.compression != "auto":
            find_codec(self.compression)

    def save(self, state: Any, path: Path) -> None:
        save(
            state,
            path,
            compression=self.compression,
            threads=default_threads() if self.threads is None else self.threads,
            memory_budget=DEFAULT_BUDGET,
            direct_io=self.direct_io,
        )

    def load(self, path: Path) -> Any:
        return load(path, verify=self.verify, threads=self.threads)

    def load_into(self, path: Path, state: Any) -> None:
        load(path, into=state, verify=self.verify, threads=self.threads)
