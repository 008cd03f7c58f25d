"""``save_file`` and ``load_file`` of ``safetensors.torch``: durable, atomic and parallel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tensorkeep.checkpoint.arguments import checked_path
from tensorkeep.checkpoint.load.load import load
from tensorkeep.checkpoint.save.save import save
from tensorkeep.errors import PathLike
from tensorkeep.formats.blockfile.plan import SUFFIX
from tensorkeep.formats.safetensors.reader import begins_like_safetensors
from tensorkeep.io.commit import Commit
from tensorkeep.io.files import store_error

if TYPE_CHECKING:
    import torch

__all__ = ["load_file", "save_file"]


def save_file(
    tensors: Mapping[str, torch.Tensor], filename: PathLike, metadata: Mapping[str, str] | None = None
) -> None:
    """Save tensors as one safetensors file of any name; an existing safetensors file is replaced.

    Unlike the original, it accepts tensors that share memory or are not contiguous.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        Of any shape and of the dtypes that safetensors has.
    filename : path-like
    metadata : mapping of str to str, optional

    Raises
    ------
    DestinationExistsError
        If something other than a safetensors file is at the path.
    UnsupportedError
        If a value or the metadata cannot be stored in this format.
    BusyError, StoreError
        If another process is writing to the path, or the disk failed.

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
    if place.suffix == SUFFIX:
        _save(tensors, place, metadata)
        return
    # By another name, the format would write a directory: the file is renamed when it is complete.
    with Commit(place, directory=False, overwrite=True, replaceable=begins_like_safetensors) as commit:
        whole = commit.path.with_name(f"model{SUFFIX}")
        _save(tensors, whole, metadata)
        try:
            os.rename(whole, commit.path)
        except OSError as error:
            raise store_error(error, place, "save here") from error
        commit.publish()


def _save(tensors: Mapping[str, torch.Tensor], place: Path, metadata: Mapping[str, str] | None) -> None:
    save(dict(tensors), place, format="safetensors", overwrite=True, metadata=dict(metadata or {}))


def load_file(filename: PathLike, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Load the tensors of a safetensors file, or of a directory of shards with an index; see `save_file`.

    Parameters
    ----------
    filename : path-like
    device : torch.device or str
        The device of the tensors.

    Returns
    -------
    dict of str to torch.Tensor

    Raises
    ------
    NotFoundError, NotACheckpointError
        If nothing is at the path, or not a safetensors file.
    CorruptCheckpointError
        If the file is damaged or truncated.
    UsageError
        If the device does not exist.
    UnsupportedError, StoreError
        If it has a dtype that this installation does not know, or the disk failed.
    """
    loaded: dict[str, torch.Tensor] = load(filename, device=device, format="safetensors")
    return loaded
