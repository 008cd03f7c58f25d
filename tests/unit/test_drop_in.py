"""``holdfast.torch`` and ``holdfast.safetensors`` stand in for the functions of those libraries."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import holdfast
import holdfast.safetensors
import holdfast.torch
from holdfast.testing.equality import same

STATE = {"w": torch.arange(6.0).reshape(2, 3), "n": 3, "nested": {"b": torch.ones(2).bfloat16()}}


def test_torch_opens_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    holdfast.torch.save(STATE, path)
    holdfast.torch.save(STATE, path)  # replaces, as torch does
    assert same(torch.load(path, weights_only=True), STATE)
    assert same(holdfast.torch.load(path), STATE)
    assert same(holdfast.torch.load(path, "cpu", weights_only=True, mmap=True), STATE)


def test_any_format_is_opened(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    holdfast.save(STATE, tmp_path / "native")
    assert same(holdfast.torch.load(tmp_path / "a.pt"), STATE)
    assert same(holdfast.torch.load(tmp_path / "native"), STATE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: holdfast.torch.save(STATE, io.BytesIO()), "BytesIO is no path"),
        (lambda path: holdfast.torch.load(io.BytesIO()), "BytesIO is no path"),
        (lambda path: holdfast.torch.load(path, weights_only=False), "would run code"),
        (lambda path: holdfast.torch.load(path, map_location={"cuda:0": "cpu"}), "map_location is a dict"),
        (lambda path: holdfast.torch.load(path, map_location=lambda storage, place: storage), "map_location is a"),
    ],
)
def test_what_is_not_taken_over_says_so(tmp_path: Path, call: Any, message: str) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    with pytest.raises(holdfast.UsageError, match=message):
        call(tmp_path / "a.pt")


def test_safetensors_opens_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"w": torch.arange(6.0), "t": torch.arange(6.0).reshape(2, 3).t()}
    holdfast.safetensors.save_file(tensors, path, metadata={"who": "me"})
    holdfast.safetensors.save_file(tensors, path, metadata={"who": "me"})
    found = safetensors.torch.load_file(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert same(holdfast.safetensors.load_file(path), {name: t.contiguous() for name, t in tensors.items()})
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["who"] == "me"
    with pytest.raises(holdfast.UnsupportedError, match="maps strings to strings"):
        holdfast.safetensors.save_file(tensors, path, metadata={"n": 1})  # type: ignore[dict-item]
