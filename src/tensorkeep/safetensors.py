"""``save_file`` and ``load_file`` as ``safetensors.torch`` has them: durable, atomic, and in parallel.

The files are ordinary safetensors files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tensorkeep.checkpoint.arguments import checked_path
from tensorkeep.checkpoint.load.load import load
from tensorkeep.checkpoint.save.save import save
from tensorkeep.errors import PathLike
from tensorkeep.formats.safetensors.reader import SUFFIX, begins_like_safetensors
from tensorkeep.io.commit import Commit
from tensorkeep.io.files import store_error

if TYPE_CHECKING:
    import torch

__all__ = ["load_file", "save_file"]


def save_file(
    tensors: Mapping[str, torch.Tensor], filename: PathLike, metadata: Mapping[str, str] | None = None
) -> None:
    """Save tensors as one safetensors file, whatever its name; a safetensors file that is there is replaced.

    Unlike safetensors' own, it takes tensors that share memory or are not contiguous.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
    filename : path-like
    metadata : mapping of str to str, optional

    Raises
    ------
    DestinationExistsError
        If something other than a safetensors file is at the path.
    UnsupportedError, StoreError, BusyError, UsageError
    """
    place = Path(checked_path(filename))
    if place.suffix == SUFFIX:
        _save(tensors, place, metadata)
        return
    # Of another name a directory would be made: the file gets its name when it is whole.
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
    """Load the tensors of a safetensors file, or of a directory of shards with an index.

    Parameters
    ----------
    filename : path-like
    device : torch.device or str

    Raises
    ------
    CorruptCheckpointError, NotACheckpointError, UnsupportedError, StoreError
    """
    loaded: dict[str, torch.Tensor] = load(filename, device=device, format="safetensors")
    return loaded
