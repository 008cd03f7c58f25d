"""Distributed checkpoints: those of DCP are read, ours are read by DCP, hostile ones are refused."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, format_utils
from torch.distributed.checkpoint import metadata as real

import tensorkeep
from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    OutOfMemoryError,
    StoreError,
    TensorkeepError,
    UnsupportedError,
    UsageError,
)
from tensorkeep.formats import sidecar
from tensorkeep.formats.base import OpenSettings, WriteSettings
from tensorkeep.formats.dcp import FORMAT, inert_pickle, writer
from tensorkeep.formats.dcp.tiling import check_tiling
from tensorkeep.formats.structure import Structure
from tensorkeep.state.tree import flatten
from tensorkeep.testing.equality import difference
from tensorkeep.testing.format_states import load, noise, training_state


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    # Torch warns that there is no process group, and that its loader executes pickles.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


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


# ---- written by DCP, read by us


@pytest.mark.parametrize("threads", [1, 3])
def test_dcp_checkpoint_loads_as_nested_state(threads: int, tmp_path: Path) -> None:
    state = trained()
    real_save(state, tmp_path / "ours", thread_count=threads)
    expected = {**state, "model": dict(state["model"])}
    # DCP itself turns these keys into text.
    expected["optimizer"] = {
        "state": {str(key): value for key, value in state["optimizer"]["state"].items()},
        "param_groups": state["optimizer"]["param_groups"],
    }
    assert difference(expected, read(tmp_path / "ours")) is None
    assert tensorkeep.info(tmp_path / "ours").format == "dcp"
    assert tensorkeep.verify(tmp_path / "ours").ok


def test_every_layout_and_dtype_of_dcp_is_read(tmp_path: Path) -> None:
    names = ["float16", "bfloat16", "float8_e4m3fn", "uint16", "uint64", "bool", "complex64", "complex128", "int8"]
    state = {name: noise(name, 4, 6) for name in names}
    state |= {
        "turned": noise("float32", 6, 4).t(),
        "expanded": noise("float64", 1, 5).expand(3, 5),
        "part": noise("int32", 50, 2)[7:9],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    real_save(state, tmp_path / "c")
    found = read(tmp_path / "c")
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype, name
        assert difference(tensor.detach().contiguous(), found[name]) is None, name


def test_plain_values_and_lists_of_dcp_are_read(tmp_path: Path) -> None:
    state = {
        "list": [torch.ones(2), {"x": torch.zeros(1)}, 7],
        "tuple": (torch.arange(3), "text"),
        "plain": [1, 2.5, "three", None],
        "dict": {"a": {"b": True}},
        "dotted.key": torch.ones(1),
    }
    real_save(state, tmp_path / "c")
    assert difference(state, read(tmp_path / "c")) is None


def test_conflicting_paths_keep_the_dotted_names(tmp_path: Path) -> None:
    write_chunks(tmp_path / "c", {"a": torch.ones(1), "a.b": torch.ones(2)}, paths={"a": ("a",), "a.b": ("a", "b")})
    assert sorted(read(tmp_path / "c")) == ["a", "a.b"]


def test_value_of_an_unknown_class_is_refused_by_name(tmp_path: Path) -> None:
    real_save({"weight": torch.ones(2), "config": threading.Thread}, tmp_path / "c")
    with pytest.raises(UnsupportedError, match=r"'config'.*calls threading\.Thread"):
        FORMAT.open(tmp_path / "c", OpenSettings())


# ---- several ranks


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


def test_chunks_of_many_ranks_are_assembled(tmp_path: Path) -> None:
    tensors = {"w": noise("float32", 11, 9), "b": noise("bfloat16", 7, 8)}
    write_chunks(tmp_path / "c", tensors, cut=grid)
    # DCP itself reads the fixture.
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(target, checkpoint_id=tmp_path / "c", no_dist=True)
    assert difference(tensors, target) is None
    assert difference(tensors, read(tmp_path / "c")) is None
    with FORMAT.open(tmp_path / "c", OpenSettings()) as reader:
        whole = tensors["w"].numpy().view(np.uint8).reshape(-1)
        for start, stop in [(0, 4), (4, 40), (32, 36), (100, 396), (0, 396), (72, 108), (8, 8)]:
            out = np.empty(stop - start, np.uint8)
            reader.read("w", start, stop, out)
            assert np.array_equal(out, whole[start:stop])
        assert reader.entries["w"].file == "12 files"


def test_damaged_chunk_is_found_and_named(tmp_path: Path) -> None:
    write_chunks(tmp_path / "c", {"w": torch.full((11, 9), 7.25)}, cut=grid)
    file = tmp_path / "c" / "__4_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(torch.full((2,), 7.25).numpy().tobytes())] ^= 1
    file.write_bytes(data)
    with FORMAT.open(tmp_path / "c", OpenSettings()) as reader, pytest.raises(CorruptCheckpointError) as caught:
        load(reader)
    assert caught.value.path == str(file) and caught.value.name == "w" and "CRC-32" in str(caught.value)
    with FORMAT.open(tmp_path / "c", OpenSettings(verify=False)) as reader:
        assert (load(reader)["w"] != 7.25).sum() == 1


RANKS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard, Replicate
rank, place, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(5 * 6, dtype=torch.float32).reshape(5, 6)
state = {"model": {"rows": distribute_tensor(whole, mesh, [Shard(0)]),
                   "columns": distribute_tensor(whole, mesh, [Shard(1)]),
                   "all": distribute_tensor(whole, mesh, [Replicate()])}, "step": 3}
dcp.save(state, checkpoint_id=path)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_checkpoint_of_two_ranks_is_read(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    arguments = [str(tmp_path / "rendezvous"), str(tmp_path / "c")]
    ranks = [subprocess.Popen([sys.executable, str(script), str(rank), *arguments]) for rank in range(2)]
    assert [process.wait(120) for process in ranks] == [0, 0]
    whole = torch.arange(5 * 6, dtype=torch.float32).reshape(5, 6)
    expected = {"model": {"rows": whole, "columns": whole, "all": whole.clone()}, "step": 3}
    found = read(tmp_path / "c")
    assert found["step"] == 3
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), name


# ---- written by us, read by DCP


def test_dcp_loads_our_checkpoint_into_a_nested_state(tmp_path: Path) -> None:
    state = trained()
    tensorkeep.save(state, tmp_path / "c", format="dcp", thread_count=2)
    assert difference(state, tensorkeep.load(tmp_path / "c")) is None
    target: dict[str, Any] = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(7, 5)}}, "param_groups": [{"lr": 0.0, "betas": None}]},
        "step": 0,
    }
    dcp.load(target, checkpoint_id=tmp_path / "c", no_dist=True)
    assert difference(dict(state["model"]), target["model"]) is None
    assert torch.equal(target["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])
    assert target["optimizer"]["param_groups"] == [{"lr": 0.001, "betas": (0.9, 0.999)}]
    assert target["step"] == 5


def test_torch_converts_our_checkpoint_as_it_does_dcps(tmp_path: Path) -> None:
    state = {**trained(), "list": [torch.ones(2), {"x": torch.zeros(1)}], "text": "ü", "empty": {}}
    real_save(state, tmp_path / "theirs")
    tensorkeep.save(state, tmp_path / "ours", format="dcp")
    found = []
    for name in ("theirs", "ours"):
        format_utils.dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
        found.append(torch.load(tmp_path / f"{name}.pt", weights_only=True))
    assert difference(*found) is None


def test_tied_weights_are_stored_under_both_names(tmp_path: Path) -> None:
    weight = noise("float32", 6, 4)
    state = {"embed": weight, "head": weight, "turned": weight.t(), "rows": weight[2:4], "huge": weight[0].expand(9, 4)}
    tensorkeep.save(state, tmp_path / "c", format="dcp")
    target = {name: torch.zeros(tensor.shape) for name, tensor in state.items() if name != "huge"}
    dcp.load(target, checkpoint_id=tmp_path / "c", no_dist=True)
    for name, tensor in target.items():
        assert torch.equal(tensor, state[name]), name
    found = tensorkeep.load(tmp_path / "c")
    assert found["embed"] is found["head"]
    assert difference(state, found) is None


def test_dtypes_that_torch_lacks_and_odd_names_round_trip(tmp_path: Path) -> None:
    import ml_dtypes

    array = np.arange(12).astype(ml_dtypes.float8_e3m4).reshape(3, 4)
    state = OrderedDict({"": array, "of": array[1:], "a.b": {"c": torch.ones(1)}, "a": {"b.c": torch.zeros(1)}, 3: {4}})
    tensorkeep.save(state, tmp_path / "c", format="dcp")
    assert difference(state, tensorkeep.load(tmp_path / "c")) is None


def test_conversion_holds_one_tensor_for_each_thread(tmp_path: Path) -> None:
    state = {f"t{number}": torch.full((300_000,), float(number)) for number in range(12)}
    tensorkeep.save(state, tmp_path / "native")
    with tensorkeep.open(tmp_path / "native") as source:
        flat = source._reader.flat
        written = FORMAT.write(flat, tmp_path / "c", WriteSettings(threads=2))
    assert 1_200_000 <= written.peak_buffer_bytes <= 2 * 1_200_000
    assert difference(state, read(tmp_path / "c")) is None


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    settings = WriteSettings(progress=lambda done, total: seen.append((done, total)))
    FORMAT.write(flatten({"a": torch.ones(5), "b": torch.ones(3)}), tmp_path / "c", settings)
    assert sorted(done for done, _ in seen)[-1] == 32 and {total for _, total in seen} == {32}


@pytest.mark.parametrize("count", [0, -1, 257, "2", True])
def test_invalid_thread_count_is_refused(count: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="thread_count"):
        tensorkeep.save({"a": torch.ones(1)}, tmp_path / "c", format="dcp", thread_count=count)


def test_error_in_any_thread_is_raised_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, failed = os.pwrite, threading.Event()

    def failing(fd: int, data: Any, offset: int) -> int:
        # Only the first write of any thread.
        if failed.is_set():
            return real_write(fd, data, offset)
        failed.set()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(StoreError, match="Input/output error"):
        tensorkeep.save({f"t{n}": torch.ones(9) for n in range(9)}, tmp_path / "c", format="dcp", thread_count=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("state", [{f"t{n}": torch.ones(9) for n in range(8)}, {f"v{n}": n for n in range(8)}])
def test_out_of_memory_in_any_thread_is_raised_and_the_old_checkpoint_stays(
    state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorkeep.save({"old": torch.zeros(2)}, tmp_path / "c", format="dcp")
    real_torch_save, failed = torch.save, threading.Event()

    def failing(*args: Any, **options: Any) -> None:
        if threading.current_thread().name.endswith("-1"):
            failed.set()
            raise MemoryError
        failed.wait(10)
        real_torch_save(*args, **options)

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(OutOfMemoryError, match="not enough memory"):
        tensorkeep.save(state, tmp_path / "c", format="dcp", thread_count=2, overwrite=True)
    assert failed.is_set()
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    assert difference({"old": torch.zeros(2)}, tensorkeep.load(tmp_path / "c")) is None


def test_interrupt_ends_the_save_in_the_middle_of_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, writes = os.pwrite, 0

    def interrupted(fd: int, data: Any, offset: int) -> int:
        nonlocal writes
        writes += 1
        if writes == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.2)
        return real_write(fd, data, offset)

    monkeypatch.setattr("tensorkeep.formats.torch_file.stream.BLOCK_BYTES", 4096)
    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tensorkeep.save({"t": torch.ones(4_000_000)}, tmp_path / "c", format="dcp", thread_count=1)
    assert writes < 100
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("function", "most"), [("open", 0), ("pwrite", 1)])
def test_no_tensor_is_read_for_a_file_that_cannot_be_written(
    function: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    real_copy, real_function = writer._own_tensor, getattr(os, function)

    def own_tensor(source: Any) -> torch.Tensor | None:
        fetched.append(source.name)
        return real_copy(source)

    def failing(first: Any, *rest: Any, **options: Any) -> Any:
        if function == "open" and not str(first).endswith(".distcp"):
            return real_function(first, *rest, **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_own_tensor", own_tensor)
    monkeypatch.setattr(os, function, failing)
    with pytest.raises(StoreError, match="No space left"):
        tensorkeep.save({f"t{n}": torch.ones(500_000) for n in range(5)}, tmp_path / "c", format="dcp", thread_count=1)
    assert len(fetched) <= most


def test_default_thread_count_is_at_most_256(tmp_path: Path) -> None:
    FORMAT.write(flatten({f"v{n}": n for n in range(300)}), tmp_path / "c", WriteSettings(threads=1024))
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 256


def test_damaged_source_fails_the_conversion(tmp_path: Path) -> None:
    tensorkeep.save(training_state(), tmp_path / "native")
    file = next((tmp_path / "native").glob("model*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        tensorkeep.convert(tmp_path / "native", tmp_path / "c", to="dcp")
    assert not (tmp_path / "c").exists()


# ---- hostile and damaged checkpoints


def hostile(path: Path, change: Callable[[real.Metadata], None]) -> TensorkeepError:
    write_chunks(path, {"w": torch.ones(11, 9)}, cut=grid, change=change)
    with pytest.raises(TensorkeepError) as caught, FORMAT.open(path, OpenSettings()) as reader:
        load(reader)
    return caught.value


def infos(metadata: real.Metadata) -> list[Any]:
    return list(metadata.storage_data.values())


def as_value(metadata: real.Metadata) -> None:
    metadata.state_dict_metadata["w"] = real.BytesStorageMetadata()
    metadata.storage_data = {real.MetadataIndex("w"): infos(metadata)[0]}


def test_metadata_that_would_run_code_is_refused_by_name_and_not_run(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path}/run",)

    real_save({"w": torch.ones(2)}, tmp_path / "c")
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    metadata.planner_data = Attack()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsupportedError, match=r"names posix\.system"):
        FORMAT.open(tmp_path / "c", OpenSettings())
    assert FORMAT.recognises(tmp_path / "c")
    assert not (tmp_path / "run").exists()


def test_piece_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path}/run",)

    content = io.BytesIO()
    torch.save(Attack(), content)
    for kind in ("tensor", "value"):
        write_chunks(tmp_path / kind, {"w": torch.ones(2)})
        metadata = pickle.loads((tmp_path / kind / ".metadata").read_bytes())
        infos(metadata)[0].length = len(content.getvalue())
        if kind == "value":
            as_value(metadata)
        (tmp_path / kind / ".metadata").write_bytes(pickle.dumps(metadata))
        (tmp_path / kind / "__0_0.distcp").write_bytes(content.getvalue())
        with pytest.raises(UnsupportedError), FORMAT.open(tmp_path / kind, OpenSettings()) as reader:
            load(reader)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "c:d", "x\0y"])
def test_file_name_outside_of_the_directory_is_refused(name: str, tmp_path: Path) -> None:
    def change(metadata: real.Metadata) -> None:
        infos(metadata)[3].relative_path = name

    error = hostile(tmp_path / "c", change)
    assert isinstance(error, CorruptCheckpointError) and "which is not in the checkpoint's directory" in str(error)


def test_symbolic_link_is_refused(tmp_path: Path) -> None:
    write_chunks(tmp_path / "c", {"w": torch.ones(2)})
    (tmp_path / "c" / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (tmp_path / "c" / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpointError, match="symbolic link"):
        FORMAT.open(tmp_path / "c", OpenSettings())


@pytest.mark.parametrize(
    ("offset", "length"), [(10**15, 5), (-1, 100), (0, 0), (0, -5), (0, 10**15), (10**15, 10**15), (1, 2**70)]
)
def test_chunk_beyond_the_end_of_its_file_is_refused(offset: int, length: int, tmp_path: Path) -> None:
    def change(metadata: real.Metadata) -> None:
        infos(metadata)[2].offset, infos(metadata)[2].length = offset, length

    error = hostile(tmp_path / "c", change)
    assert isinstance(error, CorruptCheckpointError) and error.name == "w"


def test_entries_that_share_the_same_bytes_are_refused(tmp_path: Path) -> None:
    def change(metadata: real.Metadata) -> None:
        info = infos(metadata)[2]
        for number in range(10_000):
            metadata.state_dict_metadata[f"v{number}"] = real.BytesStorageMetadata()
            metadata.storage_data[real.MetadataIndex(f"v{number}")] = info

    assert "its chunks claim" in str(hostile(tmp_path / "c", change))


def test_overlapping_and_missing_chunks_are_refused(tmp_path: Path) -> None:
    def missing(metadata: real.Metadata) -> None:
        del metadata.state_dict_metadata["w"].chunks[4]

    def twice(metadata: real.Metadata) -> None:
        metadata.state_dict_metadata["w"].chunks.append(metadata.state_dict_metadata["w"].chunks[4])

    def moved(metadata: real.Metadata) -> None:
        metadata.state_dict_metadata["w"].chunks[4] = metadata.state_dict_metadata["w"].chunks[5]

    def beyond(metadata: real.Metadata) -> None:
        metadata.state_dict_metadata["w"].size = torch.Size([11, 8])

    def homeless(metadata: real.Metadata) -> None:
        del metadata.storage_data[real.MetadataIndex("w", torch.Size([0, 4]))]

    for number, (change, words) in enumerate(
        {
            missing: "chunks hold",
            twice: "overlap",
            moved: "chunks hold|overlap",
            beyond: "beyond",
            homeless: "lacks the location",
        }.items()
    ):
        error = hostile(tmp_path / str(number), change)
        assert isinstance(error, CorruptCheckpointError) and error.name == "w"
        assert any(word in str(error) for word in words.split("|")), str(error)


def test_piece_that_differs_from_the_metadata_is_refused(tmp_path: Path) -> None:
    def dtype(metadata: real.Metadata) -> None:
        metadata.state_dict_metadata["w"].properties.dtype = torch.int32

    def swapped(metadata: real.Metadata) -> None:
        infos(metadata)[0].relative_path, infos(metadata)[5].relative_path = "__5_0.distcp", "__0_0.distcp"

    assert "the metadata says" in str(hostile(tmp_path / "dtype", dtype))

    def huge(metadata: real.Metadata) -> None:
        entry = metadata.state_dict_metadata["w"]
        entry.size = torch.Size([2**40, 2**40])

    assert "impossible shape" in str(hostile(tmp_path / "huge", huge))


def test_transforms_are_refused_with_a_remedy(tmp_path: Path) -> None:
    def change(metadata: real.Metadata) -> None:
        infos(metadata)[1].transform_descriptors = ["stream.zstd/1"]

    error = hostile(tmp_path / "c", change)
    assert isinstance(error, UnsupportedError) and "transform" in error.message and error.remedy


def test_missing_file_is_named(tmp_path: Path) -> None:
    write_chunks(tmp_path / "c", {"w": torch.ones(11, 9)}, cut=grid)
    (tmp_path / "c" / "__7_0.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"__7_0\.distcp.*missing"):
        FORMAT.open(tmp_path / "c", OpenSettings())
    (tmp_path / "c" / ".metadata").unlink()
    with pytest.raises(NotACheckpointError, match=r"no \.metadata"):
        FORMAT.open(tmp_path / "c", OpenSettings())


def test_missing_sidecar_is_found_and_a_stale_one_explained(tmp_path: Path) -> None:
    tensorkeep.save({"a": torch.ones(1)}, tmp_path / "c", format="dcp")
    kept = (tmp_path / "c" / "tensorkeep.json").read_bytes()
    (tmp_path / "c" / "tensorkeep.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"tensorkeep\.json"):
        FORMAT.open(tmp_path / "c", OpenSettings())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real_save({"b": torch.zeros(2)}, tmp_path / "c")
    assert difference({"b": torch.zeros(2)}, read(tmp_path / "c")) is None
    (tmp_path / "c" / "tensorkeep.json").write_bytes(kept)
    with pytest.raises(CorruptCheckpointError, match="if another tool wrote here since, remove"):
        FORMAT.open(tmp_path / "c", OpenSettings())


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04r\xff\xff\xff\x7f.",  # a memo of two thousand million places
        b"\x80\x05\x96" + (2**40).to_bytes(8, "little"),  # a bytearray of a terabyte
        b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"x",  # a text of four exabytes
        b"\x80\x04)" + b"\x85" * 200_000 + b"}\x94h\x00s.",
        b"\x80\x04}" + b")" + b"\x85" * 200_000 + b"Ns.",  # a key that is hashed by recursion
        b"\x80\x04]\x94h\x00a.",  # a list that holds itself
        b"\x80\x04(.",
        b"\x80\x04",
        b"",
        b"\x80\x04K\x01R.",
        b"\x80\x04\x82\x01.",  # a registered extension
        b"cposix\nsystem\n(X\x02\x00\x00\x00lstR.",
    ],
)
def test_malformed_pickle_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises((CorruptCheckpointError, UnsupportedError)):
        FORMAT.open(tmp_path, OpenSettings())


def test_lists_with_large_indices_stay_flat(tmp_path: Path) -> None:
    write_chunks(tmp_path / "c", {"a.999999999": torch.ones(1)}, paths={"a.999999999": ("a", 999_999_999)})
    assert list(read(tmp_path / "c")) == ["a.999999999"]


def test_gaps_of_all_lists_together_are_bounded(tmp_path: Path) -> None:
    paths = {"a": ("a", *[1000] * 400)}
    write_chunks(tmp_path / "c", {"a": torch.ones(1)}, paths=paths)
    assert list(read(tmp_path / "c")) == ["a"]


def opened(path: Path) -> TensorkeepError:
    with pytest.raises(TensorkeepError) as caught:
        FORMAT.open(path, OpenSettings()).close()
    return caught.value


def test_names_that_share_one_list_of_chunks_are_refused(tmp_path: Path) -> None:
    def change(metadata: real.Metadata) -> None:
        entry = metadata.state_dict_metadata["w"]
        for number in range(3000):
            metadata.state_dict_metadata[f"w{number}"] = entry
            metadata.storage_data[real.MetadataIndex(f"w{number}")] = infos(metadata)[0]

    write_chunks(tmp_path / "c", {"w": torch.ones(44, 36)}, cut=grid, change=change)
    error = opened(tmp_path / "c")
    assert isinstance(error, CorruptCheckpointError) and "same chunks many times" in str(error)


def test_names_that_share_one_path_are_refused(tmp_path: Path) -> None:
    path = ("a", *[0] * 3000)

    def change(metadata: real.Metadata) -> None:
        metadata.planner_data = {"w": path} | {f"v{number}": path for number in range(200)}

    write_chunks(tmp_path / "c", {"w": torch.ones(1)}, change=change)
    error = opened(tmp_path / "c")
    assert isinstance(error, CorruptCheckpointError) and "same paths many times" in str(error)


def test_record_with_too_many_fields_is_refused(tmp_path: Path) -> None:
    def change(metadata: real.Metadata) -> None:
        metadata.__dict__.update({f"field{number}": number for number in range(1000)})

    write_chunks(tmp_path / "c", {"w": torch.ones(1)}, change=change)
    error = opened(tmp_path / "c")
    assert isinstance(error, CorruptCheckpointError) and "fields" in str(error)


@pytest.mark.parametrize("field", ["offset", "length"])
@pytest.mark.parametrize("value", [10**5000, -(10**5000), 2**63], ids=["huge", "below", "just"])
def test_offset_of_thousands_of_digits_is_refused(field: str, value: int, tmp_path: Path) -> None:
    write_chunks(
        tmp_path / "c", {"w": torch.ones(1)}, change=lambda metadata: setattr(infos(metadata)[0], field, value)
    )
    error = opened(tmp_path / "c")
    assert isinstance(error, CorruptCheckpointError) and error.name == "w" and len(str(error)) < 1000


def test_shape_larger_than_its_chunk_is_refused_before_memory_is_allocated(tmp_path: Path) -> None:
    def change(metadata: real.Metadata) -> None:
        entry = metadata.state_dict_metadata["w"]
        entry.size = entry.chunks[0].sizes = torch.Size([2**50])

    write_chunks(tmp_path / "c", {"w": torch.ones(1)}, change=change)
    error = opened(tmp_path / "c")
    assert isinstance(error, CorruptCheckpointError) and error.name == "w" and "cannot hold" in str(error)


def test_expanded_tensor_is_refused(tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save(torch.ones(1).expand(50), content)

    def change(metadata: real.Metadata) -> None:
        infos(metadata)[0].length = len(content.getvalue())

    write_chunks(tmp_path / "c", {"w": torch.ones(50)}, change=change)
    (tmp_path / "c" / "__0_0.distcp").write_bytes(content.getvalue())
    with FORMAT.open(tmp_path / "c", OpenSettings()) as reader, pytest.raises(CorruptCheckpointError, match="repeats"):
        load(reader)


def test_audit_checks_every_chunk_of_a_tensor_outside_of_the_state(tmp_path: Path) -> None:
    tensors = {"w": torch.full((11, 9), 7.25), "x": torch.full((11, 9), 7.25)}
    write_chunks(tmp_path / "c", tensors, cut=grid)
    # A sidecar that does not list x.
    flat = flatten({"w": tensors["w"]})
    structure, notes = Structure.of_state(flat), sidecar.describe_tensors(flat)
    sidecar.write(
        tmp_path / "c", sidecar.Sidecar(format="dcp", structure=structure, tensors=notes, files={}, metadata={})
    )
    with FORMAT.open(tmp_path / "c", OpenSettings()) as reader:
        assert list(reader.audit()) == []
        places = [chunk.location for chunk in reader._contents.tensors["x"].chunks]
    assert len(places) > 2
    file = tmp_path / "c" / places[0].file
    data = bytearray(file.read_bytes())
    data[data.index(torch.full((2,), 7.25).numpy().tobytes(), places[0].offset)] ^= 1
    file.write_bytes(data)
    with FORMAT.open(tmp_path / "c", OpenSettings()) as reader:
        assert [(problem.name, problem.file) for problem in reader.audit()] == [("x", file.name)]


def test_exponentially_shared_containers_are_refused(tmp_path: Path) -> None:
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    content = io.BytesIO()
    torch.save(value, content)

    def change(metadata: real.Metadata) -> None:
        as_value(metadata)
        infos(metadata)[0].length = len(content.getvalue())

    write_chunks(tmp_path / "c", {"w": torch.ones(1)}, change=change)
    (tmp_path / "c" / "__0_0.distcp").write_bytes(content.getvalue())
    with pytest.raises(UnsupportedError, match="expands to more than"):
        FORMAT.open(tmp_path / "c", OpenSettings())


def test_inert_pickle_records_calls_and_keeps_plain_values() -> None:
    value = {"a": [1, -2, 2**40, 2**100, 1.5, None, True, "ü", b"x"], "t": ((), (1,), (1, 2, 3, 4)), "d": Path("a/b")}
    for protocol in (4, 5):
        found = inert_pickle.decode(pickle.dumps(value, protocol), {("pathlib", "PosixPath")}, "it")
        assert found["a"] == value["a"] and found["t"] == value["t"]
        assert str(found["d"].function) == "pathlib.PosixPath" and found["d"].args == ("a", "b")


def box(*sides: tuple[int, int]) -> tuple[slice, ...]:
    """Return a box by the start and the length of each side."""
    return tuple(slice(start, start + length) for start, length in sides)


def test_tilings_must_cover_a_tensor_once() -> None:
    check_tiling((), [()])
    check_tiling((0, 3), [])
    check_tiling((4,), [box((2, 2)), box((0, 2))])
    for bad in (
        [box((0, 2), (0, 2)), box((1, 1), (1, 1)), box((0, 1), (2, 1)), box((1, 1), (2, 0))],
        [box((0, 2), (0, 3)), box((0, 2), (0, 3))],
        [box((0, 2))],
        [],
    ):
        with pytest.raises(ValueError):
            check_tiling((2, 3), bad)
    with pytest.raises(ValueError, match="overlap"):
        check_tiling((4, 2), [box((0, 3), (0, 2)), box((2, 1), (0, 2))])
