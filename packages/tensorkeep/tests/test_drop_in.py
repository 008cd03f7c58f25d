"""``tensorkeep.torch`` and ``tensorkeep.safetensors`` stand in for the functions of those libraries."""

import argparse
import errno
import inspect
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tensorkeep
import tensorkeep.safetensors
import tensorkeep.torch
from faults import injection as faults
from tensorkeep.testing.equality import same

save, load = tensorkeep.torch.save, tensorkeep.torch.load
STATE = {"w": torch.arange(6.0).reshape(2, 3), "n": 3, "nested": {"b": torch.ones(2).bfloat16()}}


def test_torch_opens_what_was_saved_and_the_signatures_are_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    tensorkeep.torch.save(STATE, path)
    tensorkeep.torch.save(STATE, path)  # replaces, as torch does
    assert same(torch.load(path, weights_only=True), STATE)
    assert same(tensorkeep.torch.load(path), STATE)
    assert same(tensorkeep.torch.load(path, "cpu", weights_only=True, mmap=True), STATE)
    tensorkeep.save(STATE, tmp_path / "native")
    assert same(tensorkeep.torch.load(tmp_path / "native"), STATE)
    # Arguments without a meaning are ignored.
    tensorkeep.torch.save(STATE, path, pickle, 5, True, True)
    tensorkeep.torch.save(STATE, path, pickle_protocol=4, _disable_byteorder_record=True)
    assert same(torch.load(path), STATE)
    assert same(tensorkeep.torch.load(path, None, pickle, weights_only=None, mmap=False, encoding="latin1"), STATE)
    for name in ("save", "load"):
        theirs, mine = (inspect.signature(getattr(module, name)).parameters for module in (torch, tensorkeep.torch))
        assert [(each, mine[each].kind) for each in mine] == [(each, theirs[each].kind) for each in theirs]


def test_mapped_tensors_keep_writes_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(STATE, path)
    loaded = tensorkeep.torch.load(path, mmap=True)
    assert same(loaded, STATE)
    loaded["w"].zero_()
    assert same(tensorkeep.torch.load(path), STATE)
    maps = Path("/proc/self/maps").read_text()
    assert str(path) in maps, "the file is not mapped"
    assert tensorkeep.torch.load(path, "meta", mmap=True)["w"].device.type == "meta"


def test_map_location_works_as_in_torch(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    tensorkeep.torch.save(STATE, path)
    asked: list[str] = []
    assert same(tensorkeep.torch.load(path, lambda storage, location: asked.append(location) or storage), STATE)
    assert asked == ["cpu", "cpu"]
    assert tensorkeep.torch.load(path, {"cpu": "meta"})["w"].device.type == "meta"
    tensorkeep.save(STATE, tmp_path / "native")
    with pytest.raises(tensorkeep.UnsupportedError, match="only torch files can be loaded with a dict"):
        tensorkeep.torch.load(tmp_path / "native", {"cpu": "cpu"})


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda path: save(STATE, path, pickle_module=json), "unsupported", "'json' cannot be used"),
        (lambda path: save(STATE, path, _use_new_zipfile_serialization=False), "unsupported", "before version 1.6"),
        (lambda path: save(torch.nn.Linear(1, 1), path), "unsupported-leaf", "state_dict"),
        (lambda path: save(STATE, io.StringIO()), "usage", "text file"),
        (lambda path: save(STATE, 5), "usage", "int is neither a path nor a binary file"),
        (lambda path: load(object()), "usage", "object is neither a path nor a binary file"),
        (lambda path: load(path, weights_only=False), "usage", "would run code"),
        (lambda path: load(path, pickle_module=json), "unsupported", "'json' cannot be used"),
        (lambda path: load(path, map_locaton="cpu"), "usage", "'map_locaton' is not an argument"),
        (lambda path: load(path, {"cpu": "cuda:77"}), "usage", "map_location names a device that cannot be used"),
    ],
)
def test_unsupported_arguments_are_refused(tmp_path: Path, call: Any, kind: str, message: str) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    with pytest.raises(tensorkeep.TensorkeepError, match=message) as error:
        call(tmp_path / "a.pt")
    assert error.value.kind == kind
    assert same(torch.load(tmp_path / "a.pt"), STATE)


class Stream:
    """A file object that can only be read or written sequentially."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = content

    def read(self, count: int = -1) -> bytes:
        taken = self.content if count < 0 else self.content[:count]
        self.content = self.content[len(taken) :]
        return taken

    def write(self, data: bytes) -> int:
        self.content += data
        return len(data)


@pytest.mark.parametrize("make", [io.BytesIO, Stream])
def test_file_objects_are_written_and_read_and_a_damaged_byte_is_found(make: Any) -> None:
    file = make()
    tensorkeep.torch.save(STATE, file)
    content = file.getvalue() if make is io.BytesIO else file.content
    assert same(torch.load(io.BytesIO(content)), STATE)
    assert same(tensorkeep.torch.load(make(content), mmap=True), STATE)
    assert same(tensorkeep.torch.load(make(content), {"cuda:0": "cpu"}), STATE)
    damaged = content.replace(torch.arange(6.0).numpy().tobytes(), torch.arange(1, 7.0).numpy().tobytes())
    for place in (None, {"cpu": "cpu"}, lambda storage, location: storage):
        with pytest.raises(tensorkeep.CorruptCheckpointError, match="CRC-32"):
            tensorkeep.torch.load(make(damaged), place)


@pytest.mark.parametrize("name", ["model.bin", "model", "a.safetensors", "model.SAFETENSORS"])
def test_one_file_is_saved_whatever_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for number in range(2):
        transposed = torch.arange(6.0).reshape(2, 3).t()
        tensors = {"w": torch.full((3,), float(number)), "t": transposed}
        tensorkeep.safetensors.save_file(tensors, path, metadata={"number": str(number)})
        tensors["t"] = transposed.contiguous()
        assert path.is_file()
        for load_file in (safetensors.torch.load_file, tensorkeep.safetensors.load_file):
            assert same(dict(sorted(load_file(path).items())), dict(sorted(tensors.items())))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["number"] == "1"
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_only_a_safetensors_file_is_replaced_by_one(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("years of work")
    (tmp_path / "folder").mkdir()
    for name in ("model.bin", "folder"):
        with pytest.raises(tensorkeep.DestinationExistsError, match="not replaced"):
            tensorkeep.safetensors.save_file({"w": torch.zeros(1)}, tmp_path / name)
    assert (tmp_path / "model.bin").read_text() == "years of work"


def test_a_file_of_any_name_is_saved_atomically(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    old, new = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    tensorkeep.safetensors.save_file(old, path)
    for index in range(faults.count_operations(lambda: tensorkeep.safetensors.save_file(old, path))):
        with faults.broken(fail_at=index, action=faults.raise_error(errno.EIO)):
            try:
                tensorkeep.safetensors.save_file(new, path)
                allowed = [new]
            except tensorkeep.StoreError:
                allowed = [old, new]
        assert any(same(tensorkeep.safetensors.load_file(path), state) for state in allowed)
        tensorkeep.safetensors.save_file(old, path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["model.bin"]


def test_torch_load_follows_its_own_remedy(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(1), "args": argparse.Namespace(lr=0.1)}, path)
    with pytest.raises(tensorkeep.UnsupportedError, match=r"allow=\[\"argparse.Namespace\"\]"):
        tensorkeep.torch.load(path)
    assert tensorkeep.torch.load(path, allow=["argparse.Namespace"])["args"] == {"lr": 0.1}
    with pytest.raises(tensorkeep.UsageError, match="needs one device"):
        tensorkeep.torch.load(path, {"cuda": "cpu"}, allow=["argparse.Namespace"])
