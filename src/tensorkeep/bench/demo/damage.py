"""Part 2 of the demo: one bit is flipped in a checkpoint of each tool."""

import mmap
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorkeep.bench.checkpoint.state_pair import StatePair
from tensorkeep.bench.checkpoint.tools.registry import COMMON_TOOLS
from tensorkeep.checkpoint.loading import load
from tensorkeep.checkpoint.saving import save
from tensorkeep.checkpoint.verify import VerifyReport, verify
from tensorkeep.errors import CorruptCheckpointError, UsageError, first_line
from tensorkeep.formats.native import manifest
from tensorkeep.formats.native.manifest import Manifest
from tensorkeep.storage.local import LocalDirectory

SAVED = "step-1000"
_WINDOW_BYTES = 64
_EXPONENT_BIT = 0x40
"""Of the last byte of a little-endian float: the value grows or shrinks by many orders of magnitude."""


@dataclass(frozen=True, slots=True)
class BitFlip:
    """A byte that was changed: file and offset, the tensor and block that it belongs to, its values."""

    file: str
    offset: int
    name: str
    block: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class DamageReport:
    """A flipped bit, the report of `verify`, and the message with which `load` refuses the tensor."""

    flip: BitFlip
    report: VerifyReport
    refusal: str


@dataclass(frozen=True, slots=True)
class PeerDamage:
    """What another tool loaded from a file with a flipped bit: a value before and after, or the error."""

    tool: str
    file: str
    offset: int
    name: str
    before: float
    after: float | None
    error: str | None

    @property
    def silent(self) -> bool:
        """Whether the damaged value was loaded without an error."""
        return self.error is None and self.after != self.before


def flip_bit(checkpoint: Path) -> BitFlip:
    """Flip one bit of a native checkpoint: in the middle of the middle block of its largest tensor.

    Raises UsageError if it holds no tensor with data.
    """
    with LocalDirectory(checkpoint) as directory:
        found = manifest.read(directory)
    assert isinstance(found, Manifest)  # one process saved it
    leaf = max(found.leaves, key=lambda leaf: leaf.nbytes, default=None)
    if leaf is None or not leaf.blocks:
        raise UsageError("holds no tensor whose data could be damaged", path=checkpoint)
    block = len(leaf.blocks) // 2
    offset = leaf.offset + sum(each.length for each in leaf.blocks[:block]) + leaf.blocks[block].length // 2
    file = found.files[leaf.file].name
    before = _flip(checkpoint / file, offset, 1)
    return BitFlip(file, offset, leaf.name, block, before, before ^ 1)


def _flip(file: Path, offset: int, bit: int) -> int:
    """Flip a bit of a file; return its byte before that."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        before = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([before ^ bit]))
    return before


def save_and_verify(folder: Path, states: StatePair) -> VerifyReport:
    """Save the state compressed, and verify it."""
    save(states.source, folder / SAVED, compression="lossless")
    return verify(folder / SAVED)


def damage_and_verify(folder: Path) -> DamageReport:
    """Flip a bit in a copy of what `save_and_verify` saved; verify and load the copy, and remove it."""
    path = folder / f"{SAVED}-damaged"
    shutil.copytree(folder / SAVED, path)
    try:
        flip = flip_bit(path)
        report = verify(path)
        try:
            load(path, select=[flip.name])
        except CorruptCheckpointError as error:
            return DamageReport(flip, report, error.message)
    finally:
        shutil.rmtree(path)
    raise AssertionError("a damaged block was loaded")  # pragma: no cover


def damage_peers(folder: Path, states: StatePair, name: str) -> list[PeerDamage]:
    """Save a tensor of the state with torch and safetensors, flip a bit of a value in the file, and load it."""
    tensor = COMMON_TOOLS["safetensors"].view(states.source)[name or "state"].contiguous()
    return [_damage_peer(folder, tool, name or "state", tensor) for tool in ("torch", "safetensors")]


def _damage_peer(folder: Path, tool_name: str, name: str, tensor: Any) -> PeerDamage:
    tool = COMMON_TOOLS[tool_name]
    path = folder / f"damaged{tool.suffix}"
    tool.save({name: tensor}, path)
    index = tensor.numel() // 2
    offset = _offset_in_file(path, tensor, index) + tensor.itemsize - 1
    _flip(path, offset, _EXPONENT_BIT)
    before, after, error = float(tensor.view(-1)[index]), None, None
    try:
        after = float(tool.load(path)[name].view(-1)[index])
    except Exception as raised:
        error = first_line(raised)
    path.unlink()
    return PeerDamage(tool_name, path.name, offset, name, before, after, error)


def _offset_in_file(path: Path, tensor: Any, index: int) -> int:
    """Return the offset of an element: both tools store the bytes of a tensor as they are."""
    import torch

    window = tensor.view(-1)[index : index + _WINDOW_BYTES // tensor.itemsize].view(torch.uint8).numpy().tobytes()
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return mapped.find(window)
