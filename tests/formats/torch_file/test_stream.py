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
from tensorkeep.formats.torch_file import stream
from tensorkeep.testing.format_states import noise, training_state


def written(value: object, path: Path) -> Path:
    """Return a file with the value twice, as DCP has many of them in one file."""
    with stream.TorchStream(path) as file:
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


@pytest.mark.parametrize(
    "value",
    [
        training_state(),
        noise("float32", 3_000_001),
        {"empty": torch.empty(0), "b": noise("int8", 1), "shared": [row := noise("bfloat16", 50), row[3:], row]},
        {"optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]).state_dict()},
        3,
    ],
    ids=["training state", "large", "empty and shared", "optimizer", "plain value"],
)
def test_files_are_those_of_torch(value: object, tmp_path: Path) -> None:
    expected = io.BytesIO()
    torch.save(value, expected)
    found = written(value, tmp_path / "x").read_bytes()
    assert len(found) == 2 * len(expected.getvalue())
    for half in (found[: len(found) // 2], found[len(found) // 2 :]):
        assert records(half) == records(expected.getvalue())


def test_files_have_no_checksums_if_torch_is_set_to_write_none(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        tensorkeep.save({"w": noise("uint8", 500)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    report = tensorkeep.verify(tmp_path / "x.pt")
    assert report
    assert report.checked is None


@pytest.mark.parametrize(
    "state", [{"w": torch.ones(3)}, {"w": torch.ones(3), "large": torch.zeros(1_000_000)}], ids=["small", "large"]
)
def test_another_container_than_expected_is_refused(
    state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Torch then writes the storages itself.
    monkeypatch.setattr(torch.serialization, "skip_data", nullcontext)
    with pytest.raises(UnsupportedError, match="in another way"):
        tensorkeep.save(state, tmp_path / "x.pt")
    assert list(tmp_path.iterdir()) == []


def test_tensor_can_be_resized_after_the_save(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    written({"w": tensor}, tmp_path / "x")
    assert tensor.resize_(1000).numel() == 1000


def test_state_is_not_referenced_after_the_save(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    storage = tensor.untyped_storage()
    before = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    written({"w": tensor}, tmp_path / "x")
    assert torch._C._storage_Use_Count(storage._cdata) == before  # type: ignore[attr-defined]
