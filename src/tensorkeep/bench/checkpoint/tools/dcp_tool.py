"""``torch.distributed.checkpoint`` in one process, without a process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tensorkeep.bench.checkpoint.tools.base import Tool


class DcpTool(Tool, frozen=True, tag="dcp"):
    """``dcp.save`` and ``dcp.load`` with the writer and the reader for file systems.

    Attributes
    ----------
    threads : int
        Of the writer, one file each.
    """

    threads: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1

    def save(self, state: Any, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = FileSystemWriter(path, thread_count=self.threads)
        with _one_process():
            save(state, storage_writer=writer, no_dist=True)

    def load(self, path: Path) -> Any:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

        # The only way to new memory: `load` fills tensors that exist.
        with _one_process():
            return _load_state_dict_from_keys(storage_reader=FileSystemReader(path))

    def load_into(self, path: Path, state: Any) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        with _one_process():
            load(state, storage_reader=FileSystemReader(path), no_dist=True)


@contextmanager
def _one_process() -> Iterator[None]:
    """Silence the remark that there is no process group: one process is what is measured."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*", category=UserWarning)
        yield
