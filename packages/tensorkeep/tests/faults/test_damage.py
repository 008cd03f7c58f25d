"""Flipped bits, truncations and missing files are found, and damaged data is never loaded."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from faults.injection import flip_bit
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same

STATE = {
    "model": {"w": torch.arange(300, dtype=torch.float32).sin().bfloat16().reshape(10, 30), "tied": None},
    "optimizer": {"state": {0: {"step": torch.tensor(3.0), "m": torch.linspace(0, 1, 50)}}, "lr": 0.1},
    "epoch": 7,
}
STATE["model"]["tied"] = STATE["model"]["w"]

COMPRESSED = {name: {"compression": name} for name in ("lossless", "zstd", "gzip")}
WRITERS = {"raw": {}, **COMPRESSED, "sharded": {"shard_bytes": 500}}


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


@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_flipped_bit_in_any_byte_is_found(checkpoint: Path, exhaustive: bool, record_property: Any) -> None:
    assert tensorkeep.verify(checkpoint).ok
    refused = cases = 0
    for file in sorted(checkpoint.iterdir()):
        content = file.read_bytes()
        for position in range(0, len(content), 1 if exhaustive else 331):
            cases += 1
            # A different bit at each position, so that all eight are flipped throughout the file, equally often.
            flip_bit(file, position, position % 8)
            report = tensorkeep.verify(checkpoint, threads=1)
            assert not report.ok, f"byte {position} of {file.name} was flipped and not found"
            assert report.problems[0].message
            was_refused = load_is_right_or_refused(checkpoint)
            assert was_refused or file.name != "manifest.json"
            refused += was_refused
            file.write_bytes(content)
    # `load` does not use the headers and indexes, which other tools read; it does use all other bytes.
    used = sum(entry.stored_bytes for entry in tensorkeep.info(checkpoint).entries)
    used += (checkpoint / "manifest.json").stat().st_size
    assert refused == used if exhaustive else refused > 0
    assert tensorkeep.verify(checkpoint).ok
    record_property("cases", cases)


def offset_of(checkpoint: Path, entry: Any) -> int:
    with tensorkeep.open(checkpoint) as opened:
        return opened._reader._box(entry.name, 0).blocks[0].offset


def test_a_problem_names_file_tensor_and_block_and_loading_without_verification_is_opt_in(checkpoint: Path) -> None:
    entry = next(entry for entry in tensorkeep.info(checkpoint).entries if entry.codec == "raw")
    content = (checkpoint / entry.file).read_bytes()
    flip_bit(checkpoint / entry.file, offset_of(checkpoint, entry))
    assert not same(tensorkeep.load(checkpoint, verify=False), STATE)
    (checkpoint / entry.file).write_bytes(content)
    entry = tensorkeep.info(checkpoint).entries[0]
    file = checkpoint / entry.file
    flip_bit(file, offset_of(checkpoint, entry) + 3)
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


def with_link(file: Path) -> None:
    file.symlink_to(file.rename(file.parents[1] / "outside"))


def with_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)  # which must not be waited for


@pytest.mark.parametrize(
    ("replace", "message"),
    [(Path.unlink, "missing"), (with_link, "symbolic link"), (with_pipe, "not a regular file")],
    ids=["missing", "link out of the checkpoint", "pipe"],
)
def test_only_a_regular_file_is_read(checkpoint: Path, replace: Callable[[Path], None], message: str) -> None:
    files = sorted(checkpoint.glob("*.[st]*"))
    assert files
    for file in files:
        content = file.read_bytes()
        replace(file)
        with pytest.raises(tensorkeep.CorruptCheckpointError, match=message) as caught:
            tensorkeep.load(checkpoint)
        assert caught.value.path == str(file)
        assert not tensorkeep.verify(checkpoint).ok
        file.unlink(missing_ok=True)
        file.write_bytes(content)


def test_what_is_not_a_checkpoint_is_reported(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(tensorkeep.NotACheckpointError, match="no manifest"):
        tensorkeep.load(checkpoint, format="native")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text.bin").write_text("not a checkpoint")
    (tmp_path / "folder").mkdir()
    for name in ("empty", "text.bin", "folder"):
        with case(name), pytest.raises(tensorkeep.NotACheckpointError):
            tensorkeep.load(tmp_path / name)
    for act in (tensorkeep.load, tensorkeep.open, tensorkeep.verify, tensorkeep.info):
        for name in ("missing", "missing/deep"):
            with case((act, name)), pytest.raises(tensorkeep.NotACheckpointError, match="does not exist"):
                act(tmp_path / name)
