"""Boxes read from checkpoints of every kind into memory of every layout."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from simulated_ranks import at_random, by_dimension, random_tiling, save_by_ranks
from state.reloading import leaf_of
from tensorkeep.formats import base, boxes
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.finding import open_reader

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


@pytest.mark.coder
@pytest.mark.parametrize("kind", ["native", "torch", "anywhere", pytest.param("columns", marks=pytest.mark.exhaustive)])
def test_boxes_are_read_into_any_layout(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(SHAPE).bfloat16()
    write(tmp_path / "c", kind, tensor)
    monkeypatch.setattr(base, "BLOCK_BYTES", 2048)
    random = Random(2)
    for verify, long_run in ((True, 1), (False, 64), (True, 10**6), (False, 10**6)):
        monkeypatch.setattr(boxes, "_LONG_RUN", long_run)
        settings = OpenSettings(verify=verify)
        with open_reader(tmp_path / "c", settings) as reader:
            for offsets, sizes in random_tiling(random, SHAPE, cuts=4):
                expected = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
                for out in (torch.zeros(sizes, dtype=tensor.dtype), strided(sizes, tensor.dtype)):
                    reader.read_box("w", offsets, leaf_of(out), settings.pool)
                    assert torch.equal(out, expected), f"{sizes} at {offsets}, {long_run}, {verify}"


@pytest.mark.parametrize("kind", ["native", "anywhere"])
def test_boxes_of_numpy_arrays(tmp_path: Path, kind: str) -> None:
    array = np.arange(37 * 20 * 6).reshape(SHAPE).astype(np.complex128)
    write(tmp_path / "c", kind, array)
    settings = OpenSettings()
    with open_reader(tmp_path / "c", settings) as reader:
        out = np.zeros((5, 6, 3), array.dtype)[::-1]
        reader.read_box("w", (30, 13, 2), leaf_of(out), settings.pool)
        assert np.array_equal(out, array[30:35, 13:19, 2:5])


def test_scalars_and_empty_boxes(tmp_path: Path) -> None:
    tensorkeep.save({"s": torch.tensor(2.5), "e": torch.empty(0, 3)}, tmp_path / "c")
    settings, scalar = OpenSettings(), torch.tensor(0.0)
    with open_reader(tmp_path / "c", settings) as reader:
        reader.read_box("s", (), leaf_of(scalar), settings.pool)
        reader.read_box("e", (0, 0), leaf_of(torch.empty(0, 3)), settings.pool)
    assert scalar == 2.5


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes", "reads"),
    [
        # A column of a wide matrix takes one read for many rows, not one for each.
        ((1000, 50), (0, 7), (1000, 2), [(7, 999 * 50 + 9)]),
        # Long rows are read without what is between them.
        ((4, 10**6), (0, 100), (4, 500_000), [(row * 10**6 + 100, row * 10**6 + 500_100) for row in range(4)]),
    ],
    ids=["short rows", "long rows"],
)
def test_rows_are_read_together_if_little_is_between_them(
    shape: tuple[int, int], offsets: tuple[int, int], sizes: tuple[int, int], reads: list[tuple[int, int]]
) -> None:
    data = np.arange(shape[0] * shape[1], dtype=np.uint8)
    found: list[tuple[int, int]] = []

    def read(start: int, stop: int, out: Any) -> None:
        found.append((start, stop))
        out[:] = data[start:stop]

    out = np.zeros(sizes, np.uint8)
    boxes.read_box(read, shape, offsets, leaf_of(out), OpenSettings().pool, base.BLOCK_BYTES)
    assert sorted(found) == reads
    assert np.array_equal(out, data.reshape(shape)[:, offsets[1] : offsets[1] + sizes[1]])
