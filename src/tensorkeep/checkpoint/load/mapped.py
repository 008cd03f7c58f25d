"""Tensors whose memory is the mapped file: nothing is read until they are used: ``load(mmap=True)``."""

from collections.abc import Iterable

from tensorkeep.errors import UnsupportedError
from tensorkeep.formats.base import Reader, StoredLeaf
from tensorkeep.state.aliases import make_view
from tensorkeep.state.leaf import LeafKind, allocate
from tensorkeep.state.strided import Array


def map_tensors(reader: Reader, names: Iterable[str]) -> dict[str, Array]:
    """Return tensors of a checkpoint over the mapped file; those that share storage are views of one.

    Raises UnsupportedError if the bytes of one are not stored as they are in memory: coded, in pieces, or not aligned.
    """
    stored: dict[str, Array] = {}
    tensors: dict[str, Array] = {}
    for name in names:
        alias = reader.flat.aliases.get(name)
        base = name if alias is None else alias.of
        if base not in stored:
            stored[base] = _map_tensor(reader, reader.leaf_specs[name].kind, reader.flat.leaves[base])
        tensors[name] = stored[base] if alias is None else make_view(stored[base], alias)
    return tensors


def _map_tensor(reader: Reader, kind: LeafKind, leaf: StoredLeaf) -> Array:
    if not leaf.nbytes:
        return allocate(kind, leaf.dtype, leaf.shape)
    content = reader.mapped(leaf.name)
    if content is not None and kind in ("ndarray", "npscalar"):
        array = content.view(leaf.dtype.numpy).reshape(leaf.shape)
        if array.flags.aligned:
            return array
    elif content is not None:
        import torch

        tensor = torch.frombuffer(content, dtype=leaf.dtype.torch).view(leaf.shape)
        if not tensor.data_ptr() % leaf.dtype.itemsize:
            return tensor
    how = f"is stored as {leaf.codec}" if leaf.codec != "raw" else "is not stored in one aligned piece"
    raise UnsupportedError(
        f"{how}, so that it cannot be mapped",
        path=reader.path,
        name=leaf.name,
        remedy="load without mmap, or `tensorkeep.convert` it with compression='none'",
    )
