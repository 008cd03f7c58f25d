"""Tools that store torch tensors: ``torch.save``, safetensors and DCP."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tensorkeep.bench.checkpoint.tools.base import Threads, Tool


class TorchTool(Tool, frozen=True, tag="torch"):
    """``torch.save`` and ``torch.load(weights_only=True)``."""

    crc32: bool = True  # whether ``torch.save`` computes the CRC-32 of every record, as it does by default

    suffix: ClassVar[str] = ".pt"
    nested: ClassVar[bool] = True

    def save(self, state: Any, path: Path) -> None:
        import torch

        default = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(self.crc32)
        try:
            torch.save(state, path)
        finally:
            torch.serialization.set_crc32_options(default)

    def load(self, path: Path) -> Any:
        import torch

        # A training state also holds numpy arrays, such as the states of random generators.
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(path, weights_only=True)


def _numpy_globals() -> list[Any]:
    """Return the globals in the pickle of a numpy array; none of them runs code from the file."""
    from numpy._core.multiarray import _reconstruct, scalar

    kinds = [each for each in vars(np.dtypes).values() if isinstance(each, type)]
    return [_reconstruct, scalar, np.ndarray, np.dtype, *kinds]


class SafetensorsTool(Tool, frozen=True, tag="safetensors"):
    """``safetensors.torch.save_file`` and ``load_file``: a flat dict of contiguous tensors that share no memory."""

    suffix: ClassVar[str] = ".safetensors"
    maps_files: ClassVar[bool] = True

    def save(self, state: Any, path: Path) -> None:
        from safetensors.torch import save_file

        # It refuses tensors that are not contiguous, so its users have to copy them.
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)

    def load(self, path: Path) -> Any:
        from safetensors.torch import load_file

        return load_file(path)


class DcpTool(Tool, frozen=True, tag="dcp"):
    """``torch.distributed.checkpoint`` in one process, with its file system writer and reader."""

    threads: Threads = 1  # of the writer, each of which writes one file

    def save(self, state: Any, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = FileSystemWriter(path, thread_count=self.threads)
        with _without_process_group_warning():
            save(state, storage_writer=writer, no_dist=True)

    def load(self, path: Path) -> Any:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

        # The public `load` only fills existing tensors; this is the way to new ones.
        with _without_process_group_warning():
            return _load_state_dict_from_keys(storage_reader=FileSystemReader(path))

    def load_into(self, path: Path, state: Any) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        with _without_process_group_warning():
            load(state, storage_reader=FileSystemReader(path), no_dist=True)


@contextmanager
def _without_process_group_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*", category=UserWarning)
        yield
