"""Boxes read from checkpoints of every kind into memory of every layout."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from simulated_ranks import at_random, by_dimension, random_tiling, save_by_ranks
from tensorkeep.checkpoint.finding import open_reader
from tensorkeep.formats import box_copies
from tensorkeep.formats.base import OpenSettings
from tensorkeep.state.leaf import Leaf

SHAPE = (37, 20, 6)


def write(path: Path, kind: str, tensor: Any) -> None:
    if kind == "native":
        tensorkeep.save({"w": tensor}, path)
    elif kind == "torch":
        torch.save({"w": tensor}, path)
    else:
        split = at_random(3, seed=3, cuts=9) if kind == "anywhere" else by_dimension(3, 1)
        compression = "lossless" if kind == "anywhere" else "none"
        save_by_ranks(path, {"w": tensor}, 3, split, grid_bytes=512, compression=compression)


def strided(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor whose elements are in reverse order of dimensions, with gaps."""
    return torch.zeros(*reversed(shape), 2, dtype=dtype)[..., 0].permute(*reversed(range(len(shape))))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", ["native", "torch", "columns", "anywhere"])
def test_boxes_are_read_into_any_layout(
    tmp_path: Path, kind: str, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.randn(SHAPE).bfloat16()
    write(tmp_path / "c", kind, tensor)
    monkeypatch.setattr(box_copies, "BLOCK_BYTES", 2048)
    random = Random(2)
    settings = OpenSettings(verify=verify)
    with open_reader(tmp_path / "c", settings) as reader:
        for long_run in (1, 64, 10**6):
            monkeypatch.setattr(box_copies, "_LONG_RUN", long_run)
            for offsets, sizes in random_tiling(random, SHAPE, cuts=25):
                expected = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
                for out in (torch.zeros(sizes, dtype=tensor.dtype), strided(sizes, tensor.dtype)):
                    reader.read_box(
                        "w", offsets, Leaf("w", "tensor", reader.flat.leaves["w"].dtype, out), settings.pool
                    )
                    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", ["native", "anywhere"])
def test_boxes_of_numpy_arrays(tmp_path: Path, kind: str) -> None:
    array = np.arange(37 * 20 * 6).reshape(SHAPE).astype(np.complex128)
    write(tmp_path / "c", kind, array)
    settings = OpenSettings()
    with open_reader(tmp_path / "c", settings) as reader:
        out = np.zeros((5, 6, 3), array.dtype)[::-1]
        leaf = Leaf.of("w", out)
        assert leaf is not None
        reader.read_box("w", (30, 13, 2), leaf, settings.pool)
        assert np.array_equal(out, array[30:35, 13:19, 2:5])


def test_scalars_and_empty_boxes(tmp_path: Path) -> None:
    tensorkeep.save({"s": torch.tensor(2.5), "e": torch.empty(0, 3)}, tmp_path / "c")
    settings = OpenSettings()
    with open_reader(tmp_path / "c", settings) as reader:
        scalar, empty = torch.tensor(0.0), torch.empty(0, 3)
        for name, out in (("s", scalar), ("e", empty)):
            leaf = Leaf.of(name, out)
            assert leaf is not None
            reader.read_box(name, (0,) * out.ndim, leaf, settings.pool)
    assert scalar == 2.5


def test_short_rows_are_read_together() -> None:
    """A column of a wide matrix takes one read for many rows, not one for each."""
    data = np.arange(1000 * 50, dtype=np.uint8)
    reads: list[tuple[int, int]] = []

    def read(start: int, stop: int, out: Any) -> None:
        reads.append((start, stop))
        out[:] = data[start:stop]

    out = np.zeros((1000, 2), np.uint8)
    leaf = Leaf.of("w", out)
    assert leaf is not None
    box_copies.read_box(read, (1000, 50), (0, 7), leaf, OpenSettings().pool)
    assert reads == [(7, 999 * 50 + 9)]
    assert np.array_equal(out, data.reshape(1000, 50)[:, 7:9])


def test_long_rows_are_read_without_what_is_between_them() -> None:
    data = np.arange(4 * 10**6, dtype=np.uint8).reshape(4, 10**6)
    reads: list[int] = []

    def read(start: int, stop: int, out: Any) -> None:
        reads.append(stop - start)
        out[:] = data.reshape(-1)[start:stop]

    out = np.zeros((4, 500_000), np.uint8)
    leaf = Leaf.of("w", out)
    assert leaf is not None
    box_copies.read_box(read, (4, 10**6), (0, 100), leaf, OpenSettings().pool)
    assert reads == [500_000] * 4
    assert np.array_equal(out, data[:, 100:500_100])
