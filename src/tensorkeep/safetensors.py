"""``save_file`` and ``load_file`` of ``safetensors.torch``: durable, atomic and parallel."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tensorkeep.checkpoint.load.load import load
from tensorkeep.checkpoint.save.save import save
from tensorkeep.errors import PathLike
from tensorkeep.formats.blockfile.plan import SUFFIX
from tensorkeep.formats.safetensors.reader import begins_like_safetensors
from tensorkeep.io.commit import Commit
from tensorkeep.io.files import store_errors
from tensorkeep.paths import checked_path

if TYPE_CHECKING:
    import torch

__all__ = ["load_file", "save_file"]


def save_file(
    tensors: "Mapping[str, torch.Tensor]", filename: PathLike, metadata: Mapping[str, str] | None = None
) -> None:
    """Save tensors as one safetensors file of any name; an existing safetensors file is replaced.

    Unlike the original, it accepts tensors that share memory or are not contiguous, of the dtypes that safetensors has.

    Raises
    ------
    DestinationExistsError, UnsupportedError, BusyError, StoreError
        If something other than a safetensors file is at the path, this format cannot store a value or the metadata,
        another process is writing there, or the disk failed.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep.safetensors
    >>> folder = tempfile.TemporaryDirectory()
    >>> tensorkeep.safetensors.save_file({"w": torch.ones(2)}, f"{folder.name}/m.safetensors")
    >>> tensorkeep.safetensors.load_file(f"{folder.name}/m.safetensors")
    {'w': tensor([1., 1.])}
    >>> folder.cleanup()
    """
    place = Path(checked_path(filename))
    write = partial(save, dict(tensors), format="safetensors", overwrite=True, metadata=dict(metadata or {}))
    if place.suffix == SUFFIX:
        write(place)
        return
    # By another name, the format would write a directory: the file is renamed when it is complete.
    with Commit(place, directory=False, overwrite=True, replaceable=begins_like_safetensors) as commit:
        whole = commit.path.with_name(f"model{SUFFIX}")
        write(whole)
        with store_errors(place, "save here"):
            os.rename(whole, commit.path)
        commit.publish()


def load_file(filename: PathLike, device: "torch.device | str" = "cpu") -> "dict[str, torch.Tensor]":
    """Load the tensors of a safetensors file, or of a directory of shards with an index; see `save_file`.

    Raises
    ------
    NotFoundError, NotACheckpointError, CorruptCheckpointError
        If nothing is at the path, or not a safetensors file, or a damaged one.
    UsageError, UnsupportedError, StoreError
        If the device does not exist, the file has a dtype that this installation does not know, or the disk failed.
    """
    loaded: dict[str, torch.Tensor] = load(filename, device=device, format="safetensors")
    return loaded
