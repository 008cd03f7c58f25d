"""Flipped bits, truncations and missing files are found, and damaged data is never loaded."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep.testing.equality import same

STATE = {
    "model": {"w": torch.arange(300, dtype=torch.float32).sin().bfloat16().reshape(10, 30), "tied": None},
    "optimizer": {"state": {0: {"step": torch.tensor(3.0), "m": torch.linspace(0, 1, 50)}}, "lr": 0.1},
    "epoch": 7,
}
STATE["model"]["tied"] = STATE["model"]["w"]

WRITERS = {
    "raw": {},
    "lossless": {"compression": "lossless"},
    "zstd": {"compression": "zstd"},
    "gzip": {"compression": "gzip"},
    "sharded": {"shard_bytes": 500},
}


@pytest.fixture(params=WRITERS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tensorkeep.save(STATE, tmp_path / "ckpt", **WRITERS[request.param])
    return tmp_path / "ckpt"


def load_is_right_or_refused(path: Path) -> bool:
    """Load and return whether it was refused; a wrong state or another error fails the test."""
    try:
        # With one thread, thousands of small loads take half as long.
        found = tensorkeep.load(path, threads=1)
    except tensorkeep.TensorkeepError:
        return True
    assert same(found, STATE)
    return False


def positions(count: int, exhaustive: bool) -> range:
    """Return all positions, or a sample in which each of the eight bits is flipped equally often."""
    return range(0, count, 1 if exhaustive else 61)


@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_flipped_bit_in_any_byte_is_found(checkpoint: Path, exhaustive: bool, record_property: Any) -> None:
    assert tensorkeep.verify(checkpoint).ok
    refused = cases = 0
    for file in sorted(checkpoint.iterdir()):
        content = file.read_bytes()
        for position in positions(len(content), exhaustive):
            cases += 1
            # A different bit at each position, so that all eight are flipped throughout the file.
            flipped = content[position] ^ (1 << position % 8)
            with file.open("r+b") as target:
                target.seek(position)
                target.write(bytes([flipped]))
            report = tensorkeep.verify(checkpoint, threads=1)
            assert not report.ok, f"byte {position} of {file.name} was flipped and not found"
            assert report.problems[0].message
            was_refused = load_is_right_or_refused(checkpoint)
            assert was_refused or file.name != "manifest.json"
            refused += was_refused
            with file.open("r+b") as target:
                target.seek(position)
                target.write(content[position : position + 1])
    # `load` does not use the headers and indexes, which other tools read; it does use all other bytes.
    used = sum(entry.stored_bytes for entry in tensorkeep.info(checkpoint).entries)
    used += (checkpoint / "manifest.json").stat().st_size
    assert refused == used if exhaustive else refused > 0
    assert tensorkeep.verify(checkpoint).ok
    record_property("cases", cases)


def test_a_problem_names_file_tensor_and_block(checkpoint: Path) -> None:
    entry = tensorkeep.info(checkpoint).entries[0]
    file = checkpoint / entry.file
    content = bytearray(file.read_bytes())
    with tensorkeep.open(checkpoint) as opened:
        offset = opened._reader.tensors[entry.name].blocks[0].offset
    content[offset + 3] ^= 1
    file.write_bytes(content)
    (problem,) = tensorkeep.verify(checkpoint).problems
    assert (problem.file, problem.name, problem.block) == (entry.file, entry.name, 0)
    with pytest.raises(tensorkeep.CorruptCheckpointError) as caught:
        tensorkeep.load(checkpoint)
    assert (caught.value.path, caught.value.name, caught.value.block) == (str(file), entry.name, 0)
    assert caught.value.remedy


def test_truncated_files_are_refused(checkpoint: Path, record_property: Any) -> None:
    cases = 0
    for file in sorted(checkpoint.iterdir()):
        content = file.read_bytes()
        for length in {0, 1, 7, 8, 100, len(content) // 2, len(content) - 1}:
            cases += 1
            file.write_bytes(content[:length])
            with pytest.raises((tensorkeep.CorruptCheckpointError, tensorkeep.NotACheckpointError)):
                tensorkeep.load(checkpoint)
        file.write_bytes(content + b"x")
        with pytest.raises(tensorkeep.CorruptCheckpointError):
            tensorkeep.load(checkpoint)
        file.write_bytes(content)
    assert same(tensorkeep.load(checkpoint), STATE)
    record_property("cases", cases)


def test_a_missing_file_is_named(checkpoint: Path) -> None:
    for file in sorted(checkpoint.glob("*.[st]*")):
        aside = file.rename(file.with_suffix(".aside"))
        with pytest.raises(tensorkeep.CorruptCheckpointError, match="missing") as caught:
            tensorkeep.load(checkpoint)
        assert caught.value.path == str(file)
        assert not tensorkeep.verify(checkpoint).ok
        aside.rename(file)


def test_links_out_of_the_checkpoint_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = min(checkpoint.glob("*.[st]*"))
    outside = tmp_path / "outside"
    shutil.move(file, outside)
    file.symlink_to(outside)
    with pytest.raises(tensorkeep.CorruptCheckpointError, match="symbolic link"):
        tensorkeep.load(checkpoint)


def test_a_pipe_in_the_place_of_a_file_does_not_hang(checkpoint: Path) -> None:
    file = min(checkpoint.glob("*.[st]*"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(tensorkeep.CorruptCheckpointError, match="not a regular file"):
        tensorkeep.load(checkpoint)


def test_a_folder_without_a_manifest_is_not_a_native_checkpoint(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(tensorkeep.NotACheckpointError, match="no manifest"):
        tensorkeep.load(checkpoint, format="native")


@pytest.mark.parametrize("name", ["missing", "missing/deep"])
def test_a_missing_path_raises_not_found(tmp_path: Path, name: str) -> None:
    for act in (tensorkeep.load, tensorkeep.open, tensorkeep.verify, tensorkeep.info):
        with pytest.raises(tensorkeep.NotACheckpointError, match="does not exist"):
            act(tmp_path / name)


def test_files_of_other_tools_are_reported(tmp_path: Path) -> None:
    empty, text, folder = tmp_path / "empty", tmp_path / "text.bin", tmp_path / "folder"
    empty.write_bytes(b"")
    text.write_text("not a checkpoint")
    folder.mkdir()
    for path in (empty, text, folder):
        with pytest.raises(tensorkeep.NotACheckpointError):
            tensorkeep.load(path)


def test_loading_without_verification_is_opt_in(checkpoint: Path) -> None:
    entry = next(entry for entry in tensorkeep.info(checkpoint).entries if entry.codec == "raw")
    file = checkpoint / entry.file
    with tensorkeep.open(checkpoint) as opened:
        offset = opened._reader.tensors[entry.name].blocks[0].offset
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)
    assert not same(tensorkeep.load(checkpoint, verify=False), STATE)
