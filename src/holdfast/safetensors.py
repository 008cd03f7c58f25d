"""``save_file`` and ``load_file`` as ``safetensors.torch`` has them: durable, atomic, and in parallel.

The files are ordinary safetensors files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.checkpoint.load import load
from holdfast.checkpoint.save import save
from holdfast.errors import PathLike

if TYPE_CHECKING:
    import torch

__all__ = ["load_file", "save_file"]


def save_file(
    tensors: Mapping[str, torch.Tensor], filename: PathLike, metadata: Mapping[str, str] | None = None
) -> None:
    """Save tensors as one safetensors file; what is at the path is replaced.

    Unlike safetensors' own, it takes tensors that share memory or are not contiguous.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
    filename : path-like
        Must end in ``.safetensors``.
    metadata : mapping of str to str, optional

    Raises
    ------
    UnsupportedError, DestinationExistsError, StoreError, BusyError, UsageError
    """
    save(dict(tensors), filename, format="safetensors", overwrite=True, metadata=dict(metadata or {}))


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
