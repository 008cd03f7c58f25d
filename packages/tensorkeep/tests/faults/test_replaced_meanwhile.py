"""A checkpoint that is replaced during a read is read as the old or the new one, never as a mix."""

import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tensorkeep
from tensorkeep.storage import local
from tensorkeep.storage.base import Directory, SourceFile
from tensorkeep.storage.local import LocalDirectory
from tensorkeep.testing.equality import same
from tiers import exhaustive

FORMATS = {"native": {}, "safetensors": {"format": "safetensors", "shard_bytes": 32}}


def state(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {f"part{i}": {"w": torch.full((8,), value)} for i in range(6)}


@pytest.mark.parametrize(
    ("format", "verify"),
    [("native", True), ("safetensors", False), *exhaustive(("native", False), ("safetensors", True))],
)
def test_replaced_between_any_two_files(tmp_path: Path, format: str, verify: bool) -> None:
    real, options = LocalDirectory.open, FORMATS[format]
    met = set()
    for index in range(8):
        place = tmp_path / str(index)
        tensorkeep.save(state(1), place, **options)
        opened: list[str] = []

        def open_(
            self: Directory, name: str, place: Path = place, index: int = index, opened: Any = opened, **how: bool
        ) -> SourceFile:
            opened.append(name)
            if len(opened) == index + 1:
                tensorkeep.save(state(2), place, overwrite=True, **options)
            return real(self, name, **how)

        with mock.patch.object(LocalDirectory, "open", open_):
            found = tensorkeep.load(place, verify=verify)
        assert same(found, state(1)) or same(found, state(2))
        met.add(found["part0"]["w"][0].item())
        assert same(tensorkeep.load(place), state(2 if len(opened) > index else 1))
    assert 2.0 in met


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())  # earlier tests may have left some open
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 60, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("compression", [*exhaustive("none"), "lossless"])
@pytest.mark.usefixtures("few_descriptors")
def test_more_files_than_file_descriptors(tmp_path: Path, compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_OPEN_FILES", 40)
    wide = {f"part{i}": {"w": torch.full((8,), float(i)), "none": torch.empty(0)} for i in range(80)}
    wide["empty"] = {"w": torch.empty(0)}
    tensorkeep.save(wide, tmp_path / "ckpt", compression=compression)
    assert tensorkeep.verify(tmp_path / "ckpt").ok
    assert same(tensorkeep.load(tmp_path / "ckpt"), wide)
    tensorkeep.save(wide, tmp_path / "st", format="safetensors", shard_bytes=32, compression=compression, force=True)
    assert same(tensorkeep.load(tmp_path / "st"), wide)


def test_an_open_checkpoint_keeps_its_content_and_files_opened_later_raise_an_error(tmp_path: Path) -> None:
    tensorkeep.save(state(1), tmp_path / "ckpt")
    few_files = partial(mock.patch.object, local, "MAX_OPEN_FILES", 3)
    with tensorkeep.open(tmp_path / "ckpt") as opened, few_files(), tensorkeep.open(tmp_path / "ckpt") as partly:
        tensorkeep.save(state(2), tmp_path / "ckpt", overwrite=True)
        assert all(torch.equal(opened[name].load(), torch.ones(8)) for name in opened)
        with pytest.raises(tensorkeep.StoreError, match="was replaced while it was read"):
            partly["part0.w"].load()
        assert same(tensorkeep.load(tmp_path / "ckpt"), state(2))
        (tmp_path / "ckpt" / "part0.safetensors").unlink()
        with pytest.raises(tensorkeep.CorruptCheckpointError, match="missing"):
            tensorkeep.open(tmp_path / "ckpt")
