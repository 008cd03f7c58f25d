"""A checkpoint as ``torch.distributed.checkpoint`` describes one: flat names, and the keys that lead to each."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tensorkeep.checkpoint.load.rebuild import rebuild, refuse_placeholders_of
from tensorkeep.checkpoint.load.targets import LoadPlan
from tensorkeep.checkpoint.stateful import paths_to
from tensorkeep.errors import UnsupportedError
from tensorkeep.formats.base import Reader
from tensorkeep.io.buffers import BufferPool


class _StandIn:
    """Stands for a numpy array, or a numpy scalar, of a checkpoint."""


class Contents:
    """The entries of an open checkpoint, by the names that DCP gives them.

    A tensor is an entry if DCP would save it as one: nested in dicts, and in lists that have tensors or dicts. All else
    is a plain value, with the arrays and tensors in it.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._stand_ins = {name: _stand_in(reader, name) for name in reader.leaf_specs}
        self._names = {id(stand_in): name for name, stand_in in self._stand_ins.items()}
        self.paths, self._values = self._flattened(self._stand_ins)
        self.tensors = {
            key: self._names[id(value)] for key, value in self._values.items() if isinstance(value, torch.Tensor)
        }

    def _flattened(self, tensors: Mapping[str, Any]) -> tuple[dict[str, tuple[str | int, ...]], dict[str, Any]]:
        state = rebuild(self._reader, self._reader.flat.skeleton, tensors, as_given=tensors)
        if not isinstance(state, dict):
            raise UnsupportedError(
                f"its state is a {type(state).__name__}, and torch.distributed.checkpoint loads dicts only",
                path=self._reader.path,
                remedy="load it with tensorkeep.load",
            )
        flat, paths = flatten_state_dict(state)
        return paths, flat

    def metadata(self) -> Metadata:
        """Return the metadata: each tensor is one chunk, from which any box can be read."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for key, value in self._values.items():
            if key in self.tensors:
                chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
                entries[key] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), [chunk])
            else:
                entries[key] = BytesStorageMetadata()
        return Metadata(entries, self.paths, {}, StorageMeta(checkpoint_id=self._reader.path))

    def load_values(self, keys: set[str], threads: int, pool: BufferPool) -> dict[str, Any]:
        """Return plain values, with the arrays and tensors in them loaded."""
        wanted = [name for name, key in self._keys_of_values.items() if key in keys]
        plan = LoadPlan(self._reader, wanted, {})
        plan.read(threads, pool, None)
        loaded = {
            name: value[()] if self._reader.leaf_specs[name].kind == "npscalar" else value
            for name, value in plan.values().items()
        }
        _, values = self._flattened({**self._stand_ins, **loaded})
        for key in keys:
            refuse_placeholders_of(self._reader, (key,), values[key])
        return {key: values[key] for key in keys}

    @cached_property
    def _keys_of_values(self) -> dict[str, str]:
        """The plain value in which each array, and each tensor that is not an entry itself, is."""
        return {
            self._names[id(found)]: key
            for key, value in self._values.items()
            if key not in self.tensors
            for _, found in paths_to(value, (_StandIn, torch.Tensor))
        }


def _stand_in(reader: Reader, name: str) -> Any:
    """Return a tensor without memory, or what stands for an array."""
    entry = reader.entries[name]
    if reader.leaf_specs[name].kind not in ("tensor", "parameter"):
        return _StandIn()
    return torch.empty(entry.shape, dtype=entry.dtype.torch, device="meta")
