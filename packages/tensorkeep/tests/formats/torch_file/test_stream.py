"""The storages of torch files are written by Tensorkeep: the files are those that torch writes."""

import io
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep.errors import UnsupportedError
from tensorkeep.formats.torch_file import writer
from tensorkeep.testing.cases import case
from tensorkeep.testing.format_suite import noise, training_state


def written(value: object, path: Path) -> Path:
    """Return a file with the value twice, as DCP has many of them in one file."""
    with writer.TorchStream(path) as file:
        file.save(value)
        file.save(value)
        assert file.tell() == file.finish()
    return path


def records(content: bytes) -> list[tuple[Any, ...]]:
    """Return all that a zip directory says, and the content of each record, except the hash of all CRC-32."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        assert file.testzip() is None
        return [
            (info.filename, info.header_offset, info.flag_bits, info.file_size, info.CRC, file.read(info))
            for info in file.infolist()
            if not info.filename.endswith("serialization_id")
        ]


def test_files_are_those_of_torch(tmp_path: Path) -> None:
    row = noise("bfloat16", 50)
    for label, value in {
        "training state": training_state(),
        "large": noise("float32", 300_001),
        "empty and shared": {"empty": torch.empty(0), "b": noise("int8", 1), "shared": [row, row[3:], row]},
        "optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]).state_dict(),
        "plain value": 3,
    }.items():
        expected = io.BytesIO()
        torch.save(value, expected)
        found = written(value, tmp_path / label).read_bytes()
        with case(label):
            assert len(found) == 2 * len(expected.getvalue())
            for half in (found[: len(found) // 2], found[len(found) // 2 :]):
                assert records(half) == records(expected.getvalue())


def test_another_container_than_expected_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch then writes the storages itself.
    monkeypatch.setattr(torch.serialization, "skip_data", nullcontext)
    for state in ({"w": torch.ones(3)}, {"w": torch.ones(3), "large": torch.zeros(1_000_000)}):
        with pytest.raises(UnsupportedError, match="in another way"):
            tensorkeep.save(state, tmp_path / "x.pt")
        assert list(tmp_path.iterdir()) == []


def test_tensor_is_not_referenced_and_can_be_resized_after_the_save(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    storage = tensor.untyped_storage()
    before = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    written({"w": tensor}, tmp_path / "x")
    assert torch._C._storage_Use_Count(storage._cdata) == before  # type: ignore[attr-defined]
    assert tensor.resize_(1000).numel() == 1000
