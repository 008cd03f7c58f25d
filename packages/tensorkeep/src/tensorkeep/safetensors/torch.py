"""Drop-in for ``safetensors.torch``: torch tensors in safetensors files and bytes."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch

# Bound at import, because users may replace these functions by ours.
from safetensors.torch import save as serialize

from tensorkeep.errors import PathLike, StateMismatchError, UnsupportedError, UsageError
from tensorkeep.safetensors.file import (
    bytes_of_file,
    checked_tensors,
    safe_open,
    safetensor_errors,
    tensors_in,
    write_file,
)
from tensorkeep.state.aliases import find_aliases
from tensorkeep.state.leaf import Leaf

if TYPE_CHECKING:
    Device = torch.device | str | int

__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model"]


class ModelMismatchError(StateMismatchError, RuntimeError):
    """A file lacks parameters of a model, or has others; a RuntimeError, as torch and safetensors raise."""


def save_file(
    tensors: Mapping[str, torch.Tensor], filename: PathLike, metadata: Mapping[str, str] | None = None
) -> None:
    """Save tensors as one safetensors file of any name; an existing safetensors file is replaced.

    Unlike the original, the save is atomic and durable, and accepts tensors that are not contiguous.

    Raises
    ------
    UsageError, UnsupportedError, UnsupportedLeafError
        If the argument is not a flat dict, tensors share memory (`save_model` and `tensorkeep.save` accept that), or
        this format cannot store a value or the metadata.
    DestinationExistsError, BusyError, StoreError
        If something other than a safetensors file is at the path, another process is writing there, or the disk failed.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep.safetensors
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = f"{folder.name}/m.safetensors"
    >>> tensorkeep.safetensors.save_file({"w": torch.ones(2)}, path, metadata={"format": "pt"})
    >>> tensorkeep.safetensors.load_file(path)
    {'w': tensor([1., 1.])}
    >>> folder.cleanup()
    """
    with safetensor_errors():
        write_file(_separate(tensors), filename, metadata)


def load_file(filename: PathLike, device: "Device" = "cpu", *, backend: str = "mmap") -> dict[str, torch.Tensor]:
    """Load the tensors of a safetensors file, or of a directory of shards with an index; see `save_file`.

    Parameters
    ----------
    filename : path-like
    device, backend : optional
        See `safe_open`.

    Raises
    ------
    NotFoundError, SafetensorError
        If nothing is at the path, or the file is not a safetensors file or damaged, or an argument is wrong.
    """
    with safe_open(filename, framework="pt", device=device, backend=backend) as file:
        return file.get_tensors()


def save(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return tensors as the bytes of a safetensors file; see `save_file`.

    Examples
    --------
    >>> import torch, tensorkeep.safetensors
    >>> tensorkeep.safetensors.load(tensorkeep.safetensors.save({"w": torch.ones(2)}))
    {'w': tensor([1., 1.])}
    """
    with safetensor_errors():
        found = {name: tensor.contiguous() for name, tensor in _separate(tensors).items()}
        return bytes_of_file(serialize, found, metadata)


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors in the bytes of a safetensors file; SafetensorError for other bytes. See `save`."""
    return tensors_in(data, "pt")


def save_model(
    model: torch.nn.Module, filename: PathLike, metadata: Mapping[str, str] | None = None, force_contiguous: bool = True
) -> None:
    """Save the state of a module. A tensor with several names is stored once; the metadata maps the other names to it.

    Parameters
    ----------
    model : torch.nn.Module
    filename : path-like
    metadata : mapping of str to str, optional
    force_contiguous : bool
        Tensors are always stored in C order. With False, a tensor that is not contiguous is an error.

    Raises
    ------
    UsageError
        If ``force_contiguous`` is False and a tensor is not contiguous.
    UnsupportedError, DestinationExistsError, BusyError, StoreError
        If `save_file` raises them.

    Examples
    --------
    >>> import tempfile, torch
    >>> from tensorkeep.safetensors import load_model, safe_open, save_model
    >>> class Tied(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embedding = torch.nn.Embedding(3, 2)
    ...         self.head = torch.nn.Linear(2, 3, bias=False)
    ...         self.head.weight = self.embedding.weight
    >>> folder = tempfile.TemporaryDirectory()
    >>> save_model(Tied(), f"{folder.name}/m.safetensors")
    >>> with safe_open(f"{folder.name}/m.safetensors", framework="pt") as file:
    ...     file.keys(), file.metadata()
    (['embedding.weight'], {'head.weight': 'embedding.weight'})
    >>> load_model(Tied(), f"{folder.name}/m.safetensors")
    ([], [])
    >>> folder.cleanup()
    """
    state = model.state_dict()
    with safetensor_errors():
        shared = _shared_names(state, preferred=())
    for name, tensor in state.items():
        if not force_contiguous and not tensor.is_contiguous():
            raise UsageError(
                f"{name!r} is not contiguous, and is stored in C order",
                remedy="use save_model(..., force_contiguous=True)",
            )
    kept = {name: tensor for name, tensor in state.items() if name not in shared}
    save_file(kept, filename, {**shared, **(metadata or {})})


def load_model(
    model: torch.nn.Module, filename: PathLike, strict: bool = True, device: "Device" = "cpu", *, backend: str = "mmap"
) -> tuple[list[str], list[str]]:
    """Load a file into a module; return the names that only the module has, and the names that only the file has.

    Parameters
    ----------
    model : torch.nn.Module
    filename, device, backend
        See `load_file`.
    strict : bool
        Raise if there are such names, before the module changes. A name is not missing if the file has another name of
        the same tensor.

    Raises
    ------
    StateMismatchError
        If ``strict`` and names differ; it is also a RuntimeError, as in the original.
    NotFoundError, SafetensorError, RuntimeError
        If `load_file` raises the error, or ``load_state_dict`` finds another shape.
    """
    loaded = load_file(filename, device=device, backend=backend)
    state = model.state_dict()
    # A name is not missing if the file has another name of the same tensor.
    wanted = state.keys() - _shared_names(state, preferred=loaded).keys()
    missing, unexpected = sorted(wanted - loaded.keys()), sorted(loaded.keys() - wanted)
    if strict and (missing or unexpected):
        lists = {"Missing": missing, "Unexpected": unexpected}
        lines = [
            f"{what} key(s) in state_dict: " + ", ".join(f'"{n}"' for n in names)
            for what, names in lists.items()
            if names
        ]
        raise ModelMismatchError(
            f"does not fit the {type(model).__name__}; nothing was changed\n    " + "\n    ".join(lines),
            path=filename,
            remedy="build the model as it was saved, or load what fits (strict=False)",
            missing=tuple(missing),
            extra=tuple(unexpected),
        )
    # After the check of names: until here the module has not changed.
    model.load_state_dict(loaded, strict=False)
    return missing, unexpected


def _shared_names(state: Mapping[str, torch.Tensor], preferred: Collection[str]) -> dict[str, str]:
    """Map the names of tensors that lie inside another tensor to its name; preferred names are not mapped."""
    # The first of several names is kept. A name that the file has must be kept, or it would count as missing.
    order = sorted(state, key=lambda name: (name not in preferred, name))
    leaves = [leaf for name in order if (leaf := Leaf.of(name, state[name])) is not None]
    return {name: alias.of for name, alias in find_aliases(leaves).items()}


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return detached tensors; UnsupportedError if some share memory, which a safetensors file cannot express."""
    found = {name: tensor.detach() for name, tensor in checked_tensors(tensors, torch.Tensor).items()}
    for name, other in _shared_names(found, preferred=()).items():
        raise UnsupportedError(
            f"shares memory with {other!r}, and a safetensors file stores a tensor under one name only",
            name=name,
            remedy="use save_model, or leave one out, or clone it",
        )
    return found
