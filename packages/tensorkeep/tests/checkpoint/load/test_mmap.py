"""`tensorkeep.load` with ``mmap=True``: tensors over the mapped file."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import tensorkeep
from faults.injection import flip_bit
from tensorkeep.errors import CorruptCheckpointError, UnsupportedError, UsageError
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference


def make_state() -> dict[str, Any]:
    weight = torch.randn(300, 70).bfloat16()
    model = {"weight": weight, "tied": weight, "rows": weight[3:9], "bias": torch.nn.Parameter(torch.randn(5))}
    state = {"model": model, "scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "number": np.float64(0.1)}
    array, flags = np.arange(12, dtype=np.int32).reshape(3, 4), torch.tensor([True, False])
    return state | {"array": array, "flags": flags, "step": 7}


@pytest.mark.parametrize("verify", [None, True, False])
def test_a_state_is_the_same_as_without(tmp_path: Path, verify: bool | None) -> None:
    state = make_state()
    tensorkeep.save(state, tmp_path / "c")
    loaded = tensorkeep.load(tmp_path / "c", mmap=True, verify=verify)
    assert difference(state, loaded) is None
    assert loaded["model"]["tied"] is loaded["model"]["weight"]
    assert loaded["model"]["rows"].untyped_storage().data_ptr() == loaded["model"]["weight"].data_ptr()
    rows = tensorkeep.load(tmp_path / "c", mmap=True, verify=verify, select="model.rows")
    assert difference(rows["model"], {"rows": state["model"]["rows"].clone()}) is None


@pytest.mark.parametrize(
    ("options", "given", "error", "message"),
    [
        ({"compression": "lossless"}, {}, UnsupportedError, r"'w': is stored as planes, so that it .*\n.*convert"),
        ({"format": "dcp"}, {}, UnsupportedError, "'w': is not stored in one aligned piece"),
        ({}, {"into": {"w": torch.ones(2)}}, UsageError, "mmap|mapped"),
        ({}, {"device": "meta"}, UsageError, "mmap|mapped"),
    ],
    ids=["compressed", "in pieces", "into", "device"],
)
def test_what_cannot_be_mapped_is_refused(tmp_path: Path, options: Any, given: Any, error: Any, message: str) -> None:
    tensorkeep.save({"w": torch.randn(100_000).bfloat16()}, tmp_path / "c", **options)
    with pytest.raises(error, match=message):
        tensorkeep.load(tmp_path / "c", mmap=True, **given)


def test_damage_is_found_on_request(tmp_path: Path) -> None:
    tensorkeep.save({"w": torch.ones(10_000)}, tmp_path / "c")
    flip_bit(tmp_path / "c" / "model.safetensors", -7)
    assert is_mapped(tensorkeep.load(tmp_path / "c", mmap=True)["w"], tmp_path / "c" / "model.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors.*'w'"):
        tensorkeep.load(tmp_path / "c", mmap=True, verify=True)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
def test_files_of_other_tools_are_mapped(tmp_path: Path, name: str) -> None:
    state = {"w": torch.randn(50, 3), "b": torch.randn(4).half()}
    path = tmp_path / name
    safetensors.torch.save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    loaded = tensorkeep.load(path, mmap=True)
    assert difference(state, loaded) is None
    assert is_mapped(loaded["w"], path)


def test_writes_stay_in_memory_and_tensors_outlive_the_checkpoint(tmp_path: Path) -> None:
    tensorkeep.save({"w": torch.ones(10_000)}, tmp_path / "c")
    loaded, other = (tensorkeep.load(tmp_path / "c", mmap=True)["w"] for _ in range(2))
    loaded.zero_()
    assert loaded.sum() == 0
    assert tensorkeep.verify(tmp_path / "c").ok
    assert other.sum() == tensorkeep.load(tmp_path / "c", mmap=True)["w"].sum() == 10_000
    tensorkeep.save({"w": torch.zeros(10_000)}, tmp_path / "c", overwrite=True)
    assert other.sum() == 10_000
    assert tensorkeep.load(tmp_path / "c")["w"].sum() == 0


def test_each_tensor_has_a_storage_of_its_own_size(tmp_path: Path) -> None:
    """`torch.save` of one tensor writes its whole storage, which must not be the file."""
    tensorkeep.save({"w": torch.ones(3, 5), "b": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "c")
    loaded = tensorkeep.load(tmp_path / "c", mmap=True)
    assert [loaded[name].untyped_storage().nbytes() for name in "wb"] == [60, 4]


def test_an_array_or_a_tensor_in_a_misaligned_place_is_refused(tmp_path: Path) -> None:
    array, odd = tmp_path / "c.safetensors", tmp_path / "odd.safetensors"
    tensorkeep.save({"w": np.ones(2, np.float32)}, array)
    content = array.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    # One byte more of header: the data begins at an odd place.
    array.write_bytes(struct.pack("<Q", size + 1) + content[8 : 8 + size] + b" " + content[8 + size :])
    byte = b'{"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    header = byte + b'"w":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    header += b" " * (-len(header) % 8)
    odd.write_bytes(struct.pack("<Q", len(header)) + header + b"\1" + struct.pack("<2f", 1, 1))
    for path in (array, odd):
        with case(path.name):
            assert tensorkeep.load(path)["w"].tolist() == [1, 1]
            with pytest.raises(UnsupportedError, match="'w': is not stored in one aligned piece"):
                tensorkeep.load(path, mmap=True)


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    """Return whether a tensor lies in the mapping of a file."""
    inode, address = str(path.stat().st_ino), tensor.data_ptr()
    with open("/proc/self/maps") as lines:
        for line in lines:
            words = line.split()
            begin, end = (int(bound, 16) for bound in words[0].split("-"))
            if begin <= address < end:
                return words[4] == inode
    return False
