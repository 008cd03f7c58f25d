"""What torch's distributed checkpoints do when something fails, and what ours do."""

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from distributed.sharded_states import SHAPES, emptied, full, full_tensor, load, save, sharded
from ranks import outcomes, run_ranks
from tensorkeep.distributed import DcpReader, DcpWriter
from tensorkeep.formats.blockfile.data_file import DataFile


class DyingPlanner(dcp.DefaultSavePlanner):
    """Kills rank 1 before it writes."""

    def finish_plan(self, new_plan: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().finish_plan(new_plan)


def writer_of(path: Path, **options: Any) -> Any:
    """Return the storage of a checkpoint: ours in a folder named so, DCP's elsewhere."""
    return DcpWriter(path, overwrite=True) if path.name == "ours" else dcp.FileSystemWriter(path, **options)


def save_with(path: Path, seed: int, planner: Any = None, **options: Any) -> None:
    save(sharded(SHAPES, seed), writer_of(path, **options), planner and planner())


def load_from(path: Path) -> dict[str, Any]:
    state = emptied(sharded(SHAPES, 0))
    load(state, DcpReader(path) if path.name == "ours" else dcp.FileSystemReader(path))
    return full(state)


def refusals(path: Path, loading: Any = load_from) -> dict[int, str]:
    """Load; return the class and the text of the error of each rank that has refused."""
    with pytest.raises(CheckpointException) as caught:
        loading(path)
    return {rank: f"{type(error).__name__}: {error}" for rank, (error, _) in caught.value.failures.items()}


def flip(file: Path, content: bytes) -> None:
    """Flip a bit of some bytes of a file."""
    damaged = bytearray(file.read_bytes())
    damaged[damaged.index(content)] ^= 1
    file.write_bytes(damaged)


def same(found: dict[str, Any], seed: int, rows: slice = slice(None)) -> bool:
    expected = {name: full_tensor(shape, seed + number).numpy() for number, (name, shape) in enumerate(SHAPES.items())}
    return all(np.array_equal(found[name][rows], expected[name][rows]) for name in expected)


def test_dcp_loads_half_of_each_save_after_a_rank_died_while_it_overwrote_and_ours_the_old_one(tmp_path: Path) -> None:
    loaded = {}
    for name in ("theirs", "ours"):
        run_ranks(2, save_with, tmp_path / name, 0)
        found = outcomes(2, save_with, tmp_path / name, 100, DyingPlanner, group_seconds=5)
        assert found[1].exit_code == -signal.SIGKILL and found[0].error is not None
        loaded[name] = run_ranks(2, load_from, tmp_path / name)[0]
    assert same(loaded["theirs"], 100, slice(0, 6)) and same(loaded["theirs"], 0, slice(6, 12))
    assert same(loaded["ours"], 0)


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


def error_of_a_thread(path: Path) -> dict[int, str]:
    """Save while each thread that opens a data file finds the disk full; return the error of each rank."""

    def fail(self: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patches, pytest.raises(CheckpointException) as caught:
        patches.setattr(DataFile, "_create", fail)
        save_with(path, 0)
    return {rank: str(error) for rank, (error, _) in caught.value.failures.items()}


def test_dcp_reports_a_save_as_done_after_a_thread_failed_and_ours_raises(tmp_path: Path) -> None:
    assert all(len(missing) == 1 for missing in run_ranks(2, missing_after_a_save, tmp_path / "theirs"))
    found = run_ranks(2, error_of_a_thread, tmp_path / "ours")
    assert found[0] == found[1] and all("No space left" in found[0][rank] for rank in (0, 1))
    assert not (tmp_path / "ours").exists()


def save_as_safetensors(path: Path) -> None:
    save(sharded(SHAPES, 0), dcp.HuggingFaceStorageWriter(str(path), save_distributed=True))


def load_safetensors(path: Path) -> dict[str, Any]:
    state = emptied(sharded(SHAPES, 0))
    load(state, dcp.HuggingFaceStorageReader(str(path)))
    return full(state)


def test_dcp_loads_a_checkpoint_that_lacks_a_file_and_ours_names_it(tmp_path: Path) -> None:
    run_ranks(2, save_as_safetensors, tmp_path / "theirs")
    run_ranks(2, save_with, tmp_path / "ours", 0)
    # The file of the first rank: the reader takes a tensor to be as long as the last row that it finds.
    for name in ("theirs", "ours"):
        sorted((tmp_path / name).glob("*.safetensors"))[0].unlink()
    loaded = run_ranks(2, load_safetensors, tmp_path / "theirs")[0]
    assert same(loaded, 0, slice(6, 12)) and all((each[:6] == 7).all() for each in loaded.values())
    refused = run_ranks(2, refusals, tmp_path / "ours")[0]
    assert refused.keys() == {0, 1} and "model-rank-00000.safetensors" in refused[0]


def test_dcp_loads_a_flipped_bit_and_ours_refuses_it(tmp_path: Path) -> None:
    for name, file in ("theirs", "__0_0.distcp"), ("ours", "model-rank-00000.safetensors"):
        run_ranks(2, save_with, tmp_path / name, 0)
        flip(tmp_path / name / file, full_tensor(SHAPES["a"], 0).numpy()[0].tobytes())
    loaded = run_ranks(2, load_from, tmp_path / "theirs")[0]
    assert not same(loaded, 0) and same(loaded, 0, slice(1, 12))
    refused = run_ranks(2, refusals, tmp_path / "ours")
    assert refused[0] == refused[1] and "CorruptCheckpointError" in refused[0][0] and "'a'" in refused[0][0]


def load_as_integers(path: Path) -> list[float]:
    state = {name: torch.zeros(shape, dtype=torch.int8) for name, shape in SHAPES.items()}
    load(state, DcpReader(path) if path.name == "ours" else dcp.FileSystemReader(path))
    return state["a"].tolist()


def refusal_of_integers(path: Path) -> dict[int, str]:
    return refusals(path, load_as_integers)


def test_dcp_casts_without_a_word_and_ours_names_both_dtypes(tmp_path: Path) -> None:
    for name in ("theirs", "ours"):
        run_ranks(2, save_with, tmp_path / name, 0)
    assert run_ranks(1, load_as_integers, tmp_path / "theirs")[0] == full_tensor(SHAPES["a"], 0).to(torch.int8).tolist()
    refused = run_ranks(1, refusal_of_integers, tmp_path / "ours")[0][0]
    assert "StateMismatchError" in refused and "'a'" in refused
    assert "int8 [12, 8] in the state, float32 [12, 8] saved" in refused


class Code:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def save_code(path: Path, made: Path) -> None:
    save({"a": torch.ones(2), "code": Code(made)}, dcp.FileSystemWriter(path))


def load_code(path: Path) -> None:
    load({"a": torch.zeros(2), "code": None}, dcp.FileSystemReader(path))


def refuse_code(path: Path) -> dict[int, str]:
    return refusals(path, lambda path: load({"a": torch.zeros(2), "code": None}, DcpReader(path)))


def test_dcp_runs_code_of_a_checkpoint_and_ours_refuses_it(tmp_path: Path) -> None:
    run_ranks(1, save_code, tmp_path / "c", tmp_path / "made")
    assert "posix.mkdir" in run_ranks(1, refuse_code, tmp_path / "c")[0][0]
    assert not (tmp_path / "made").exists()
    run_ranks(1, load_code, tmp_path / "c")
    assert (tmp_path / "made").exists()
