"""Which blocks are read, within the memory budget; statistics of what was read."""

from pathlib import Path

import numpy as np
import pytest
import torch

import tensorkeep
from faults.injection import flip_bit
from tensorkeep.formats.base import BLOCK_BYTES, OpenSettings
from tensorkeep.formats.finding import open_reader
from tensorkeep.pages.checkpoint import read_contents
from tensorkeep.pages.statistics import choose_sample, measure
from tensorkeep.storage.buffers import MINIMUM_BUDGET, BufferPool

BLOCKS = 9


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor of nine blocks, each filled with its number, the last one half; and small tensors."""
    path = tmp_path_factory.mktemp("large") / "checkpoint"
    count = BLOCK_BYTES // 2
    w = torch.arange(BLOCKS, dtype=torch.bfloat16).repeat_interleave(count)[: -count // 2]
    state = {"w": w, "small": torch.ones(5), "none": torch.zeros(0), "alias": w[3:5]}
    tensorkeep.save({"model": state}, path, compression="lossless")
    return path


def test_a_small_checkpoint_is_read_completely_and_of_a_large_one_blocks_that_are_spread_evenly(large: Path) -> None:
    with open_reader(large, OpenSettings()) as reader:
        sample = choose_sample(reader, 10**9)
        assert sample.every == 1
        assert sample.nbytes == sample.total == sum(leaf.nbytes for leaf in reader.flat.leaves.values())
        assert sample.text.startswith("Every element was read")
        # Each tensor has a block.
        sample = choose_sample(reader, 3 * BLOCK_BYTES + 100)
        assert (sample.every, [start // BLOCK_BYTES for start, _ in sample.ranges["model.w"]]) == (4, [1, 4, 7])
        assert (sample.ranges["model.small"], sample.ranges["model.none"]) == ([(0, 20)], [])
        assert "1 of every 4 blocks" in sample.text
        assert choose_sample(reader, 1).ranges["model.w"] == [(4 * BLOCK_BYTES, 5 * BLOCK_BYTES)]


def test_statistics_of_a_sample_within_the_budget(large: Path) -> None:
    reported: list[tuple[int, int]] = []
    pool = BufferPool(MINIMUM_BUDGET)
    with pool, open_reader(large, OpenSettings(pool=pool)) as reader:
        sample = choose_sample(reader, 3 * BLOCK_BYTES + 100)
        found = measure(reader, sample, threads=4, pool=pool, progress=lambda *both: reported.append(both))
        assert pool.peak_bytes <= MINIMUM_BUDGET
    assert list(found) == list(reader.flat.leaves)
    w = found["model.w"]
    assert (w.numbers, w.least, w.largest, w.mean) == (3 * BLOCK_BYTES // 2, 1, 7, pytest.approx(4))
    assert (found["model.none"].numbers, reported[-1]) == (0, (sample.nbytes, sample.nbytes))


def test_contents_of_any_format(tmp_path: Path) -> None:
    state = {"model": {"w": torch.tensor([1.0, float("nan"), 3.0]), "z": torch.zeros(4)}}
    paths = [tmp_path / name for name in ("native", "x.pt", "x.safetensors")]
    tensorkeep.save(state, paths[0])
    for path in paths[1:]:
        tensorkeep.convert(paths[0], path)
    for path in paths:
        found = read_contents(path)
        assert [[entry.name for entry in each] for each in (found.not_finite, found.zero)] == [["model.w"], ["model.z"]]
        assert found.statistics["model.w"].mean == 2
        statistics = found.as_dict()["tensors"][0]["statistics"]
        assert statistics["nan"] == 1 and np.isfinite(statistics["std"])


def test_a_damaged_block_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    tensorkeep.save({"w": torch.ones(100_000)}, path)
    file = next(path.glob("*.safetensors"))
    flip_bit(file, file.stat().st_size // 2)
    with pytest.raises(tensorkeep.CorruptCheckpointError) as caught:
        read_contents(path)
    assert caught.value.name == "w"
