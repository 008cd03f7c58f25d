"""Blocks stored as differences: only from undamaged bases, only where smaller, and decoded by their readers."""

import errno
import os
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open

import tensorkeep
from faults.test_hostile_manifests import body_of, seal
from formats.native.steps import DELTA, LOSSLESS, codecs, flip, trained, weights
from tensorkeep.formats.native import incremental
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same

pytestmark = pytest.mark.coder


class OldNote(msgspec.Struct):
    """The manifest as readers without support for differences parse it."""

    dtype: str
    shape: tuple[int, ...]
    blocks: list[tuple[str, int]]


class OldNotes(msgspec.Struct):
    version: int
    block_bytes: int
    tensors: dict[str, OldNote]


def notes(file: Path) -> OldNotes:
    with safe_open(file, "pt") as opened:
        return msgspec.json.decode(opened.metadata()["tensorkeep"], type=OldNotes)


def test_the_version_refuses_readers_without_differences_where_there_are_any(tmp_path: Path) -> None:
    state = weights(2)
    tensorkeep.save(state, tmp_path / "a", incremental=True, **LOSSLESS)
    tensorkeep.save(trained(state), tmp_path / "b", base=tmp_path / "a", **DELTA)
    assert "delta" in codecs(tmp_path / "b")
    # Such a reader finds every field that it needs, so only the version stops it from loading differences as weights.
    found = notes(tmp_path / "b" / "changes-model.tensorkeep")
    assert found.tensors["w0"].blocks
    assert found.version == 2
    with pytest.raises(tensorkeep.UnsupportedError, match="blocks in other files"):
        tensorkeep.load(tmp_path / "b" / "changes-model.tensorkeep")
    # Any reader reads tensors that are fully stored.
    state["w1"] = weights(2, seed=9)["w1"]
    tensorkeep.save(state, tmp_path / "c", base=tmp_path / "a", **LOSSLESS)
    alone = tmp_path / "c" / "changes-model.tensorkeep"
    assert notes(alone).version == 1
    assert same(tensorkeep.load(alone), {"w1": state["w1"]})


def test_a_bad_sector_in_an_earlier_step_does_not_stop_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = weights()
    tensorkeep.save(state, tmp_path / "a", incremental=True, **LOSSLESS)
    bad = (tmp_path / "a" / "model.tensorkeep").stat().st_ino
    real, failures = os.preadv, []

    def preadv(fd: int, *arguments: Any) -> int:
        if os.fstat(fd).st_ino == bad:
            failures.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    state = trained(state)
    report = tensorkeep.save(state, tmp_path / "b", base=tmp_path / "a", threads=1, **DELTA)
    assert len(failures) == 1  # a failing disk may take seconds for each read
    assert os.strerror(errno.EIO) in (report.base_refused or "")
    assert same(tensorkeep.load(tmp_path / "b"), state)


@pytest.mark.parametrize("options", [LOSSLESS, DELTA], ids=["whole", "delta"])
def test_blocks_of_a_codec_that_is_not_installed_are_not_reused(tmp_path: Path, options: dict[str, Any]) -> None:
    state = weights(2)
    tensorkeep.save(state, tmp_path / "a", incremental=True, **LOSSLESS)
    body = body_of(tmp_path / "a")
    for leaf in body["leaves"]:
        leaf["blocks"][0][0] = "theirs"
    seal(body, tmp_path / "a")
    state["w1"] = trained(state)["w1"]
    report = tensorkeep.save(state, tmp_path / "b", base=tmp_path / "a", **options)
    assert "'theirs', which is not installed" in (report.base_refused or "")
    assert same(tensorkeep.load(tmp_path / "b"), state)


@pytest.mark.parametrize(
    ("options", "file", "reason"),
    [
        ({}, "model.safetensors", "the checksum of a block is wrong"),
        (LOSSLESS, "model.tensorkeep", "the checksum of its stored bytes is wrong"),
    ],
    ids=["raw", "coded"],
)
def test_a_damaged_block_is_no_base(tmp_path: Path, options: dict[str, Any], file: str | Path, reason: str) -> None:
    state, file = weights(1), tmp_path / "a" / file
    tensorkeep.save(state, tmp_path / "a", incremental=True, **options)
    flip(file, -1000)
    report = tensorkeep.save(trained(state), tmp_path / "b", base=tmp_path / "a", **DELTA)
    assert reason in (report.base_refused or "")
    assert "delta" not in codecs(tmp_path / "b")
    assert same(tensorkeep.load(tmp_path / "b"), trained(state))
    # Damage that comes later is found, and the damaged file is named.
    flip(file, -1000)
    tensorkeep.save(trained(state), tmp_path / "c", base=tmp_path / "a", **DELTA)
    assert "delta" in codecs(tmp_path / "c")
    flip(file, -1000)
    assert [problem.file for problem in tensorkeep.verify(tmp_path / "c").problems] == ["from-a-model.tensorkeep"]
    with pytest.raises(tensorkeep.CorruptCheckpointError) as caught:
        tensorkeep.load(tmp_path / "c")
    assert caught.value.path == str(tmp_path / "c" / "from-a-model.tensorkeep")


def test_chains_of_several_differences_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incremental, "MAX_CHAIN_LENGTH", 3)
    state = weights(1)
    tensorkeep.save(state, tmp_path / "0", incremental=True)
    for number in (1, 2, 3):
        state = trained(state, seed=number)
        tensorkeep.save(state, tmp_path / str(number), base=tmp_path / str(number - 1), **DELTA)
        assert tensorkeep.info(tmp_path / str(number)).details["history"]["deepest_chain"] == number
        assert same(tensorkeep.load(tmp_path / str(number)), state)
    flip(tmp_path / "0" / "model.safetensors", -1000)
    assert [problem.file for problem in tensorkeep.verify(tmp_path / "3").problems] == ["from-0-model.tensorkeep"]


def patched(size: int, patches: list[int], length: int, *, noise: slice) -> tuple[np.ndarray, np.ndarray]:
    """Return a base and a block: the same noise in a few places, elsewhere noise in the base and zeros in the block."""
    draw = np.random.default_rng(0)
    block, base = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    base[noise] = draw.integers(0, 256, size, np.uint8)[noise]
    for start in patches:
        block[start : start + length] = base[start : start + length] = draw.integers(0, 256, length, np.uint8)
    return base, block


SIZE = 3 * 1024**2
BLOCKS = {
    "noise where four samples would lie": patched(
        SIZE, np.linspace(0, SIZE - 65536, 4).astype(int).tolist(), 65536, noise=slice(0, SIZE * 9 // 10)
    ),
    "half of it cleared": patched(SIZE, [0], SIZE // 2, noise=slice(SIZE // 2, SIZE)),
    "a small block": patched(20_000, [0], 4000, noise=slice(4000, 9000)),
    "other noise": tuple(np.random.default_rng(1).integers(0, 256, (2, 60_000), np.uint8)),
}


def test_difference_is_stored_only_if_it_is_smaller(tmp_path: Path) -> None:
    for label, dtype in product(BLOCKS, (torch.uint8, torch.bfloat16, torch.float32)):
        base, block = (torch.from_numpy(array.copy()).view(dtype) for array in BLOCKS[label])
        place = tmp_path / f"{label} {dtype}"
        with case(f"{label}, {dtype}"):
            tensorkeep.save({"w": base}, place / "a", incremental=True, **LOSSLESS)
            report = tensorkeep.save({"w": block}, place / "b", base=place / "a", **DELTA)
            plain = tensorkeep.save({"w": block}, place / "c", **LOSSLESS)
            assert report.new_bytes <= 1.01 * plain.new_bytes + 200
            assert label != "other noise" or "delta" not in codecs(place / "b")
            assert same(tensorkeep.load(place / "b"), {"w": block})


def test_many_small_tensors_take_no_more_space_than_in_a_full_checkpoint(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {f"layers.{n}.bias": torch.randn(24, generator=generator) for n in range(300)}
    tensorkeep.save(state, tmp_path / "a", incremental=True, **LOSSLESS)
    state = trained(state)
    report = tensorkeep.save(state, tmp_path / "b", base=tmp_path / "a", **DELTA)
    plain = tensorkeep.save(state, tmp_path / "c", incremental=True, **LOSSLESS)
    assert report.new_bytes <= 1.01 * plain.new_bytes
    assert same(tensorkeep.load(tmp_path / "b"), state)


def test_with_differences_auto_means_lossless(tmp_path: Path) -> None:
    report = tensorkeep.save(weights(1), tmp_path / "a", incremental=True, delta=True, compression="auto")
    assert report.compression == "lossless"
    assert "differences" in report.auto["reason"]
