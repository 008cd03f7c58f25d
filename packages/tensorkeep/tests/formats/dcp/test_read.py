"""Reading checkpoints that DCP wrote, with one rank or many."""

import argparse
import io
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tensorkeep
from forked import ended, start
from formats.dcp.checkpoints import grid, read, real_save, trained, write_chunks
from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.dcp import FORMAT
from tensorkeep.testing.equality import difference
from tensorkeep.testing.format_suite import load, noise


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


class MegatronPlanner(dcp.DefaultSavePlanner):
    """Keeps the plans of all ranks in the metadata, like the planner of Megatron-Core."""

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], dcp.metadata.Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.all_local_plans = all_plans
        return plans, metadata


def test_checkpoints_of_megatron_are_read(tmp_path: Path) -> None:
    state = {"decoder.layers.mlp.weight": torch.randn(3, 4, 5), "decoder.x/shard_0_1": [torch.ones(1), "text"]}
    dcp.save(state, checkpoint_id=tmp_path / "iter_0000005", planner=MegatronPlanner(False), no_dist=True)
    assert b"WriteItemType" in (tmp_path / "iter_0000005" / ".metadata").read_bytes()
    assert difference(state, read(tmp_path / "iter_0000005")) is None
    assert tensorkeep.verify(tmp_path / "iter_0000005").ok


def test_every_layout_and_dtype_and_plain_value_of_dcp_is_read(tmp_path: Path) -> None:
    names = ["float16", "bfloat16", "float8_e4m3fn", "uint16", "uint64", "bool", "complex64", "complex128", "int8"]
    tensors = {name: noise(name, 4, 6) for name in names}
    tensors |= {
        "turned": noise("float32", 6, 4).t(),
        "expanded": noise("float64", 1, 5).expand(3, 5),
        "part": noise("int32", 50, 2)[7:9],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    others = {
        "list": [torch.ones(2), {"x": torch.zeros(1)}, 7],
        "tuple": (torch.arange(3), "text"),
        "plain": [1, 2.5, "three", None],
        "dict": {"a": {"b": True}},
        "dotted.key": torch.ones(1),
    }
    real_save(tensors | others, tmp_path / "c")
    expected = {name: tensor.detach().contiguous() for name, tensor in tensors.items()} | others
    assert difference(expected, read(tmp_path / "c")) is None


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


def save_as_rank(rank: int, folder: Path) -> None:
    """Save sharded tensors together with the other rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2)
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(5 * 6, dtype=torch.float32).reshape(5, 6)
    places = {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}
    model = {name: distribute_tensor(whole, mesh, [place]) for name, place in places.items()}
    dcp.save({"model": model, "step": 3}, checkpoint_id=folder / "c")
    dist.barrier()  # a rank that ends first closes the connections of the other
    dist.destroy_process_group()


@pytest.mark.exhaustive
@pytest.mark.xdist_group("processes")
def test_checkpoint_of_two_ranks_is_read(tmp_path: Path) -> None:
    outputs = [tmp_path / f"output-{rank}" for rank in range(2)]
    ranks = [start(save_as_rank, rank, tmp_path, output=output) for rank, output in enumerate(outputs)]
    assert [ended(rank) for rank in ranks] == [0, 0], [output.read_text() for output in outputs]
    whole = torch.arange(5 * 6, dtype=torch.float32).reshape(5, 6)
    found = read(tmp_path / "c")
    assert found["step"] == 3
    for name in ("rows", "columns", "all"):
        assert torch.equal(found["model"][name], whole), name


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_objects_of_other_classes_are_refused_by_name_or_if_allowed_read_as_dicts(tmp_path: Path) -> None:
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    state = {"weight": torch.ones(2), "config": threading.Thread, "extra": io.BytesIO(b"x"), "q": quantised}
    real_save(state, tmp_path / "c")
    with pytest.raises(UnsupportedError, match=r"'config'.*calls threading\.Thread"):
        tensorkeep.load(tmp_path / "c")
    assert list(tensorkeep.load(tmp_path / "c", select="*")) == ["weight"]
    assert tensorkeep.info(tmp_path / "c").placeholders.keys() == {"config", "extra", "q"}
    vars(tagged := torch.ones(1))["tag"] = 1
    real_save({"model": {"w": torch.ones(3)}, "args": argparse.Namespace(lr=0.1), "pair": (tagged,)}, tmp_path / "ours")
    with pytest.raises(UnsupportedError, match=r"calls argparse\.Namespace: .*\n.*allow=\[\"argparse\.Namespace\"\]"):
        tensorkeep.load(tmp_path / "ours")
    with pytest.warns(UserWarning, match="attributes of tensors or containers are not loaded: tag"):
        found = tensorkeep.load(tmp_path / "ours", allow="argparse.Namespace")
    assert difference({"model": {"w": torch.ones(3)}, "args": {"lr": 0.1}, "pair": (tagged,)}, found) is None
