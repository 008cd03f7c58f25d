"""Tensorkeep's own format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from tensorkeep.bench.checkpoint.tools.base import Threads, Tool
from tensorkeep.checkpoint.loading import load
from tensorkeep.checkpoint.saving import save
from tensorkeep.storage.buffers import DEFAULT_BUDGET
from tensorkeep.storage.parallel import default_threads


class TensorkeepTool(Tool, frozen=True, tag="tensorkeep"):
    """`tensorkeep.save` and `tensorkeep.load`."""

    compression: str = "none"
    direct_io: bool = True  # bypass the page cache when writing, where the file system supports it
    threads: Threads | None = None  # that write and read; the defaults of `save` and `load` if None
    verify: bool = True  # verify the checksum of every block that is loaded

    nested: ClassVar[bool] = True

    @property
    def durable(self) -> bool:
        return True

    @classmethod
    def parse(cls, settings: Mapping[str, object]) -> Self:
        from tensorkeep.formats.blockfile.write import find_codec

        tool = super().parse(settings)
        if tool.compression != "auto":
            find_codec(tool.compression)
        return tool

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
