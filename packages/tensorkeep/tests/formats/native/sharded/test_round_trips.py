"""Checkpoints that several ranks wrote: everything that one process does with them."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import tensorkeep
from formats.native.steps import flip
from simulated_ranks import at_random, by_dimension, save_by_ranks
from tensorkeep.testing.equality import difference
from tensorkeep.testing.format_suite import names_in
from tiers import exhaustive

SPLITS = {"rows": by_dimension(3), "columns": by_dimension(3, 1), "anywhere": at_random(3, seed=5)}


def state() -> Any:
    torch.manual_seed(0)
    weight = torch.randn(300, 70)
    model = {"w": weight, "tied": weight, "row": weight[3], "b": torch.randn(1001).bfloat16()}
    model |= {"transposed": torch.randn(40, 30).t(), "complex": torch.randn(3, 50, 40).to(torch.complex128)}
    model |= {"scalar": torch.tensor(3.5), "array": np.arange(60, dtype=np.float16).reshape(3, 4, 5)}
    model |= {"empty": torch.empty(0, 4), "float8": torch.randn(33, 9).to(torch.float8_e4m3fn)}
    return {"model": model, "optimizer": {"m": torch.randn(300, 70).double()}, "step": 7}


COMPRESSIONS, GRIDS = ("none", "lossless", "zstd"), (None, 4096)
# Each value once, or twice.
FEW = [(c, GRIDS[number % 2], split) for number, (c, split) in enumerate(zip(COMPRESSIONS, SPLITS, strict=True))]


@pytest.mark.coder
@pytest.mark.parametrize(
    ("compression", "grid_bytes", "split"),
    [*FEW, *exhaustive(*(way for way in product(COMPRESSIONS, GRIDS, SPLITS) if way not in FEW))],
)
def test_what_ranks_save_loads_exactly(tmp_path: Path, compression: str, grid_bytes: int | None, split: str) -> None:
    path, saved = tmp_path / "c", state()
    save_by_ranks(path, saved, 3, SPLITS[split], compression=compression, grid_bytes=grid_bytes, metadata={"note": 1})
    assert tensorkeep.verify(path).ok
    loaded = tensorkeep.load(path)
    assert difference(loaded, saved) is None
    assert loaded["model"]["w"] is loaded["model"]["tied"]
    into = {"model": {"w": torch.zeros(70, 300).t()}}
    tensorkeep.load(path, into=into, select="model.w")
    assert torch.equal(into["model"]["w"], saved["model"]["w"])
    with tensorkeep.open(path) as opened:
        assert opened.metadata == {"note": 1}
        assert torch.equal(opened["model.w"][5:17], saved["model"]["w"][5:17])
        assert torch.equal(opened["model.transposed"][1:29, 3], saved["model"]["transposed"][1:29, 3])
        assert np.array_equal(opened["model.array"][2], saved["model"]["array"][2])


def test_the_boxes_on_disk_are_named_by_rank_and_place(tmp_path: Path) -> None:
    weight = torch.arange(48.0).reshape(8, 6)
    save_by_ranks(tmp_path / "rows", {"w": weight}, 2)
    with safe_open(tmp_path / "rows" / "model-rank-00001.safetensors", "pt") as file:
        assert list(file.keys()) == ["w"]
        assert torch.equal(file.get_tensor("w"), weight[4:])
    save_by_ranks(tmp_path / "anywhere", {"w": weight}, 1, at_random(1, seed=1, cuts=2))
    with safe_open(tmp_path / "anywhere" / "model-rank-00000.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118
            place = key.removeprefix("w[").removesuffix("]").split(",")
            rows, columns = (slice(*map(int, side.split(":"))) for side in place)
            assert torch.equal(file.get_tensor(key), weight[rows, columns])
    files = [name.format(rank) for name in ("model-rank-{:05}.safetensors", "rank-{:05}.json") for rank in (0, 1)]
    assert names_in(tmp_path / "rows") == ["manifest.json", *files]


def test_a_rank_without_boxes_and_a_state_without_tensors(tmp_path: Path) -> None:
    save_by_ranks(tmp_path / "one", {"w": torch.ones(1)}, 3)
    assert torch.equal(tensorkeep.load(tmp_path / "one")["w"], torch.ones(1))
    save_by_ranks(tmp_path / "none", {"step": 3}, 2)
    assert tensorkeep.load(tmp_path / "none") == {"step": 3}
    assert tensorkeep.verify(tmp_path / "none").ok


def test_a_checkpoint_of_ranks_is_replaced_like_any_other_and_a_failed_rank_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save_by_ranks(path, {"w": torch.zeros(9)}, 2)
    save_by_ranks(path, {"w": torch.ones(9)}, 3, overwrite=True)
    assert torch.equal(tensorkeep.load(path)["w"], torch.ones(9))
    tensorkeep.save({"w": torch.zeros(2)}, path, overwrite=True)
    save_by_ranks(path, {"w": torch.ones(9)}, 3, overwrite=True)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(tensorkeep.DestinationExistsError, match=r"notes\.txt"):
        save_by_ranks(path, {"w": torch.ones(9)}, 3, overwrite=True)
    with pytest.raises(tensorkeep.CorruptCheckpointError, match=r"no rank has its element \[5\]"):
        save_by_ranks(tmp_path / "d", {"w": torch.ones(9)}, 2, lambda leaf: [by_dimension(2)(leaf)[0], []])
    assert names_in(tmp_path) == ["c"]


@pytest.mark.parametrize("compression", ["none", pytest.param("lossless", marks=pytest.mark.coder)])
def test_a_flipped_byte_names_tensor_file_and_block(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "c"
    save_by_ranks(path, {"w": torch.randn(100, 70)}, 2, compression=compression, grid_bytes=1024)
    file = next(path.glob("model-rank-00001.*"))
    flip(file, -1)
    assert [problem.file for problem in tensorkeep.verify(path).problems] == [file.name]
    with pytest.raises(tensorkeep.CorruptCheckpointError, match=file.name):
        tensorkeep.load(path)
