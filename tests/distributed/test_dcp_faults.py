"""What torch's distributed checkpoints do when something fails, and what ours do."""

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from distributed.sharded_states import SHAPES, emptied, full, full_tensor, save, sharded
from ranks import outcomes, run_ranks


class DyingPlanner(dcp.DefaultSavePlanner):
    """Kills rank 1 before it writes."""

    def finish_plan(self, new_plan: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().finish_plan(new_plan)


def save_with(path: Path, seed: int, planner: Any = None, **options: Any) -> None:
    save(sharded(SHAPES, seed), dcp.FileSystemWriter(path, **options), planner and planner())


def load_from(path: Path) -> dict[str, Any]:
    state = emptied(sharded(SHAPES, 0))
    dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    return full(state)


def same(found: dict[str, Any], seed: int, rows: slice = slice(None)) -> bool:
    expected = {name: full_tensor(shape, seed + number).numpy() for number, (name, shape) in enumerate(SHAPES.items())}
    return all(np.array_equal(found[name][rows], expected[name][rows]) for name in expected)


def test_dcp_loads_half_of_each_save_after_a_rank_died_while_it_overwrote(tmp_path: Path) -> None:
    run_ranks(2, save_with, tmp_path / "c", 0)
    found = outcomes(2, save_with, tmp_path / "c", 100, DyingPlanner, group_seconds=5)
    assert found[1].exit_code == -signal.SIGKILL and found[0].error is not None
    loaded = run_ranks(2, load_from, tmp_path / "c")[0]
    assert same(loaded, 100, slice(0, 6)) and same(loaded, 0, slice(6, 12))


class FullDiskPlanner(dcp.DefaultSavePlanner):
    """Fails as a full disk does, in every thread but the main one."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            self.failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        assert self.failed.wait(60)
        return super().resolve_data(write_item)


def missing_after_a_save(path: Path) -> list[str]:
    """Save, which succeeds; return the tensors that the checkpoint does not have."""
    save_with(path, 0, FullDiskPlanner, thread_count=2)
    stored = dcp.FileSystemReader(path).read_metadata().storage_data
    assert stored is not None
    return sorted(SHAPES.keys() - {index.fqn for index in stored})


def test_dcp_reports_a_save_as_done_after_a_thread_failed(tmp_path: Path) -> None:
    assert all(len(missing) == 1 for missing in run_ranks(2, missing_after_a_save, tmp_path / "c"))


def save_as_safetensors(path: Path) -> None:
    save(sharded(SHAPES, 0), dcp.HuggingFaceStorageWriter(str(path), save_distributed=True))


def load_safetensors(path: Path) -> dict[str, Any]:
    shapes = {name: (rows, columns) for name, (rows, columns) in SHAPES.items()}
    state = emptied(sharded(shapes, 0))
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
    return full(state)


def test_dcp_loads_a_checkpoint_that_lacks_a_file_and_leaves_its_rows_as_they_were(tmp_path: Path) -> None:
    run_ranks(2, save_as_safetensors, tmp_path / "c")
    # The file of the first rank: the reader takes a tensor to be as long as the last row that it finds.
    sorted((tmp_path / "c").glob("*.safetensors"))[0].unlink()
    loaded = run_ranks(2, load_safetensors, tmp_path / "c")[0]
    assert same(loaded, 0, slice(6, 12)) and all((each[:6] == 7).all() for each in loaded.values())


def test_dcp_loads_a_flipped_bit(tmp_path: Path) -> None:
    run_ranks(2, save_with, tmp_path / "c", 0)
    file = tmp_path / "c" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    first = full_tensor(SHAPES["a"], 0).numpy()[0].tobytes()
    content[content.index(first)] ^= 1
    file.write_bytes(content)
    loaded = run_ranks(2, load_from, tmp_path / "c")[0]
    assert not same(loaded, 0) and same(loaded, 0, slice(1, 12))


def load_as_integers(path: Path) -> list[float]:
    state = {name: torch.zeros(shape, dtype=torch.int8) for name, shape in SHAPES.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    return state["a"].tolist()


def test_dcp_casts_without_a_word(tmp_path: Path) -> None:
    run_ranks(2, save_with, tmp_path / "c", 0)
    assert run_ranks(1, load_as_integers, tmp_path / "c")[0] == full_tensor(SHAPES["a"], 0).to(torch.int8).tolist()
