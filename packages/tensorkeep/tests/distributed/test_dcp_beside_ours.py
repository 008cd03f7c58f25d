"""What torch's distributed checkpoints do when something fails, and the bytes that they move; and what ours do."""

import errno
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tensorkeep
from checkpoint.ranks import cases
from distributed.calls import DyingPlanner, errors_of, full_tensor, load, save
from faults.injection import flip_bit
from ranks import outcomes, run_ranks
from tensorkeep.distributed.dcp import DcpReader, DcpWriter
from tensorkeep.formats.blockfile.write import DataFile

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

SHAPES = {"a": (12, 8), "b": (12, 4)}


def sharded(shapes: dict[str, tuple[int, int]], seed: int, layout: str = "rows") -> Any:
    """Return tensors of known values that are divided among all ranks."""
    tensors = {name: full_tensor(shape, seed + number) for number, (name, shape) in enumerate(shapes.items())}
    return cases.divided({"model": tensors}, layout)["model"]


def emptied(state: Any) -> Any:
    """Return a state of the same layout whose elements are all 7."""
    return {name: torch.full_like(each, 7) for name, each in state.items()}


def writer_of(path: Path, **options: Any) -> Any:
    """Return the storage of a checkpoint by its name: ours, DCP's safetensors, or DCP's own format."""
    if path.name == "ours":
        return DcpWriter(path, overwrite=True)
    if path.name == "safetensors":
        return dcp.HuggingFaceStorageWriter(str(path), save_distributed=True)
    return dcp.FileSystemWriter(path, **options)


def reader_of(path: Path) -> Any:
    readers: dict[str, Callable[[str], Any]] = {"ours": DcpReader, "safetensors": dcp.HuggingFaceStorageReader}
    return readers.get(path.name, dcp.FileSystemReader)(str(path))


def save_with(path: Path, seed: int, planner: Any = None, **options: Any) -> None:
    save(sharded(SHAPES, seed), writer_of(path, **options), planner and planner())


def load_from(path: Path) -> dict[str, Any]:
    state = emptied(sharded(SHAPES, 0))
    load(state, reader_of(path))
    return {name: each.full_tensor().numpy() for name, each in state.items()}


def same(found: dict[str, Any], seed: int, rows: slice = slice(None)) -> bool:
    expected = {name: full_tensor(shape, seed + number).numpy() for number, (name, shape) in enumerate(SHAPES.items())}
    return all(np.array_equal(found[name][rows], expected[name][rows]) for name in expected)


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """Return the folder of two checkpoints that two ranks have saved, DCP's and ours."""
    for name in ("theirs", "ours"):
        run_ranks(2, save_with, tmp_path / name, 0)
    return tmp_path


def test_dcp_loads_half_of_each_save_after_a_rank_died_while_it_overwrote_and_ours_the_old_one(both: Path) -> None:
    loaded = {}
    for name in ("theirs", "ours"):
        found = outcomes(2, save_with, both / name, 100, partial(DyingPlanner, 1, "finish_plan"), group_seconds=5)
        assert found[1].exit_code == -signal.SIGKILL and found[0].error is not None
        loaded[name] = run_ranks(2, load_from, both / name)[0]
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

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(DataFile, "_create", fail)
        return errors_of(save_with, path, 0)


def test_dcp_reports_a_save_as_done_after_a_thread_failed_and_ours_raises(tmp_path: Path) -> None:
    assert all(len(missing) == 1 for missing in run_ranks(2, missing_after_a_save, tmp_path / "theirs"))
    found = run_ranks(2, error_of_a_thread, tmp_path / "ours")
    assert found[0] == found[1] and all("No space left" in found[0][rank] for rank in (0, 1))
    assert not (tmp_path / "ours").exists()


def test_dcp_loads_a_checkpoint_that_lacks_a_file_and_ours_names_it(tmp_path: Path) -> None:
    # The file of the first rank: the reader takes a tensor to be as long as the last row that it finds.
    for name in ("safetensors", "ours"):
        run_ranks(2, save_with, tmp_path / name, 0)
        sorted((tmp_path / name).glob("*.safetensors"))[0].unlink()
    loaded = run_ranks(2, load_from, tmp_path / "safetensors")[0]
    assert same(loaded, 0, slice(6, 12)) and all((each[:6] == 7).all() for each in loaded.values())
    refused = run_ranks(2, errors_of, load_from, tmp_path / "ours")[0]
    assert refused.keys() == {0, 1} and "model-rank-00000.safetensors" in refused[0]


def test_dcp_loads_a_flipped_bit_and_ours_refuses_it(both: Path) -> None:
    for damaged in both / "theirs/__0_0.distcp", both / "ours/model-rank-00000.safetensors":
        flip_bit(damaged, damaged.read_bytes().index(full_tensor(SHAPES["a"], 0).numpy()[0].tobytes()))
    loaded = run_ranks(2, load_from, both / "theirs")[0]
    assert not same(loaded, 0) and same(loaded, 0, slice(1, 12))
    refused = run_ranks(2, errors_of, load_from, both / "ours")
    assert refused[0] == refused[1] and "CorruptCheckpointError" in refused[0][0] and "'a'" in refused[0][0]


def load_as_integers(path: Path) -> list[float]:
    state = {name: torch.zeros(shape, dtype=torch.int8) for name, shape in SHAPES.items()}
    load(state, reader_of(path))
    return state["a"].tolist()


def test_dcp_casts_without_a_word_and_ours_names_both_dtypes(both: Path) -> None:
    assert run_ranks(1, load_as_integers, both / "theirs")[0] == full_tensor(SHAPES["a"], 0).to(torch.int8).tolist()
    refused = run_ranks(1, errors_of, load_as_integers, both / "ours")[0][0]
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


def load_code(path: Path, reader: type[Any]) -> None:
    load({"a": torch.zeros(2), "code": None}, reader(path))


def test_dcp_runs_code_of_a_checkpoint_and_ours_refuses_it(tmp_path: Path) -> None:
    run_ranks(1, save_code, tmp_path / "c", tmp_path / "made")
    assert "posix.mkdir" in run_ranks(1, errors_of, load_code, tmp_path / "c", DcpReader)[0][0]
    assert not (tmp_path / "made").exists()
    run_ranks(1, load_code, tmp_path / "c", dcp.FileSystemReader)
    assert (tmp_path / "made").exists()


LAYERS = {f"layers.{number}.{name}": (256, 1024) for number in range(4) for name in ("attention", "up", "down")}
MODEL = {"embedding": (4096, 256), **LAYERS, "head": (4096, 256)}
LARGE = {"weight": (49_152, 512)}
"""Many times the distance of the cuts between blocks, of which a rank that reads another part reads one in full."""
STATE_BYTES = 4 * sum(rows * columns for rows, columns in MODEL.values())
LARGE_BYTES = 4 * sum(rows * columns for rows, columns in LARGE.values())


def transferred(counter: str) -> int:
    """Return how many bytes this process has read (counter ``"rchar"``) or written (``"wchar"``) so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields[counter])


def save_replicated_shards(path: Path) -> int:
    state = sharded(MODEL, 0, "replicas of shards")
    before = transferred("wchar")
    if path.name == "ours":
        tensorkeep.save(state, path, group=dist.group.WORLD)
    else:
        save(state, dcp.FileSystemWriter(path))
    return transferred("wchar") - before


def save_shards(path: Path) -> None:
    save(sharded(LARGE, 0), writer_of(path))


def load_shards(path: Path) -> int:
    state = emptied(sharded(LARGE, 0))
    reader = reader_of(path)
    dist.barrier()
    before = transferred("rchar")
    dcp.load(state, storage_reader=reader)
    return transferred("rchar") - before


@pytest.mark.exhaustive
def test_dcp_gives_some_ranks_more_to_write_and_ours_the_same(tmp_path: Path) -> None:
    written = {name: run_ranks(4, save_replicated_shards, tmp_path / name) for name in ("theirs", "ours")}
    over_the_mean = {name: max(each) * len(each) / sum(each) for name, each in written.items()}
    assert over_the_mean["theirs"] > 1.15 and over_the_mean["ours"] < 1.05
    assert sum(written["ours"]) < 1.02 * STATE_BYTES


@pytest.mark.exhaustive
@pytest.mark.parametrize(("count", "times"), [(3, 1.5), (8, 2.0)])
def test_dcp_reads_whole_shards_on_other_ranks_and_ours_what_it_needs(count: int, times: float, tmp_path: Path) -> None:
    read = {}
    for name in ("theirs", "ours"):
        run_ranks(4, save_shards, tmp_path / name)
        read[name] = sum(run_ranks(count, load_shards, tmp_path / name)) / LARGE_BYTES
    assert read["theirs"] > times and read["ours"] < 1.1
