"""Distributed checkpoints that tests use: written by DCP, and with DCP's own classes as many ranks write them."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as real

from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.dcp import FORMAT
from tensorkeep.testing.format_suite import load


def read(path: Path) -> Any:
    with FORMAT.open(path, OpenSettings()) as reader:
        assert list(reader.audit()) == []
        return load(reader)


def real_save(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options), no_dist=True)


def trained() -> dict[str, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 5)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}


def write_chunks(
    path: Path,
    tensors: dict[str, torch.Tensor],
    *,
    cut: Callable[[torch.Tensor], list[tuple[int, ...]]] | None = None,
    paths: dict[str, tuple[Any, ...]] | None = None,
    change: Callable[[real.Metadata], None] | None = None,
) -> None:
    """Write as many ranks do, each chunk to the next rank's file, with DCP's own classes.

    ``cut`` returns the offsets and the sizes of the chunks of a tensor.
    """
    path.mkdir()
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for name, tensor in tensors.items():
        chunks = []
        for rank, (offsets, sizes) in enumerate(cut(tensor) if cut else [((0,) * tensor.dim(), tuple(tensor.shape))]):
            piece = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].clone()
            content = io.BytesIO()
            torch.save(piece, content)
            file = path / f"__{rank}_0.distcp"
            before = file.stat().st_size if file.exists() else 0
            with file.open("ab") as stream:
                stream.write(content.getvalue())
            chunks.append(real.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            info = filesystem._StorageInfo(file.name, before, len(content.getvalue()))
            storage[real.MetadataIndex(name, torch.Size(offsets), rank)] = info
        entries[name] = real.TensorStorageMetadata(real.TensorProperties(tensor.dtype), tensor.size(), chunks)
    metadata = real.Metadata(entries, paths or {name: (name,) for name in tensors}, storage, real.StorageMeta(path))
    if change is not None:
        change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def grid(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return boxes of odd sizes in both dimensions, in no order, one of them empty."""
    rows, columns = tensor.shape
    boxes = [((r, c), (min(3, rows - r), min(4, columns - c))) for c in range(0, columns, 4) for r in range(0, rows, 3)]
    return [((rows, 0), (0, columns)), *reversed(boxes)]
