"""Parts 2 and 3 of the demo: one flipped bit in a checkpoint, and ``kill -9`` in the middle of a save."""

import mmap
import shutil
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tensorkeep import VerifyReport, load, save, verify
from tensorkeep.errors import CorruptCheckpointError, StoreError, UsageError, first_line
from tensorkeep.ext import format_bytes, format_seconds, machine, number
from tensorkeep.ext.formats import manifest
from tensorkeep.ext.storage import LocalDirectory
from tensorkeep_bench.checkpoint.measure import start_process
from tensorkeep_bench.checkpoint.states import StatePair, digest, wipe
from tensorkeep_bench.checkpoint.tools import COMMON_TOOLS, TorchTool

SAVED = "step-1000"
_WINDOW_BYTES = 64
_EXPONENT_BIT = 0x40  # in the last byte of a little-endian float, it changes the value by many orders of magnitude


@dataclass(frozen=True, slots=True)
class BitFlip:
    file: str
    offset: int
    name: str
    block: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class DamageReport:
    flip: BitFlip
    report: VerifyReport
    refusal: str

    def texts(self) -> list[str]:
        named = [f"file {each.file}, tensor {each.name}, block {each.block}" for each in self.report.problems]
        found = f"tensorkeep verify finds it: {'; '.join(named)}." if named else "tensorkeep verify did NOT notice."
        return [found, f"tensorkeep.load refuses it: {self.refusal}."]


@dataclass(frozen=True, slots=True)
class PeerDamage:
    tool: str
    file: str
    offset: int
    name: str
    before: float
    after: float | None
    error: str | None

    @property
    def silent(self) -> bool:
        return self.error is None and self.after != self.before

    def text(self) -> str:
        if not self.silent:
            return f"{self.tool} raises: {self.error}."
        values = f"{number(self.after or 0.0)} instead of {number(self.before)}"
        return f"{self.tool} loads {values} (byte {self.offset:,} of {self.file}), without a word."


def flip_bit(checkpoint: Path) -> BitFlip:
    """Flip one bit in the largest tensor of a native checkpoint; UsageError if no tensor has data."""
    with LocalDirectory(checkpoint) as directory:
        found = manifest.read(directory)
    assert isinstance(found, manifest.Manifest)  # one process saved it
    leaf = max(found.leaves, key=lambda leaf: leaf.nbytes, default=None)
    if leaf is None or not leaf.blocks:
        raise UsageError("holds no tensor with data that could be damaged", path=checkpoint)
    block = len(leaf.blocks) // 2
    offset = leaf.offset + sum(each.length for each in leaf.blocks[:block]) + leaf.blocks[block].length // 2
    file = found.files[leaf.file].name
    before = _flip(checkpoint / file, offset, 1)
    return BitFlip(file, offset, leaf.name, block, before, before ^ 1)


def _flip(file: Path, offset: int, bit: int) -> int:
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        before = mapped[offset]
        mapped[offset] = before ^ bit
    return before


def save_and_verify(folder: Path, states: StatePair) -> VerifyReport:
    save(states.source, folder / SAVED, compression="lossless")
    return verify(folder / SAVED)


def damage_and_verify(folder: Path) -> DamageReport:
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
    # Reached only if a checksum missed the damage.
    raise AssertionError("a damaged block was loaded")  # pragma: no cover


def damage_peers(folder: Path, states: StatePair, name: str) -> list[PeerDamage]:
    tensor = COMMON_TOOLS["safetensors"].view(states.source)[name or "state"].contiguous()
    return [_damage_peer(folder, tool, name or "state", tensor) for tool in ("torch", "safetensors")]


def _damage_peer(folder: Path, tool_name: str, name: str, tensor: Any) -> PeerDamage:
    tool = COMMON_TOOLS[tool_name]
    path = folder / f"damaged{tool.suffix}"
    tool.save({name: tensor}, path)
    # One value of the tensor, so that the page can show it before and after.
    index = tensor.numel() // 2
    # Both tools store the bytes of a tensor as they are, so a few of its bytes are found in the file.
    window = tensor.view(-1)[index : index + _WINDOW_BYTES // tensor.itemsize].view(torch.uint8).numpy().tobytes()
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        offset = mapped.find(window) + tensor.itemsize - 1
    _flip(path, offset, _EXPONENT_BIT)
    before, after, error = float(tensor.view(-1)[index]), None, None
    try:
        after = float(tool.load(path)[name].view(-1)[index])
    except Exception as raised:
        error = first_line(raised)
    path.unlink()
    return PeerDamage(tool_name, path.name, offset, name, before, after, error)


# Part 3

# Fractions of the bytes after which a save is killed; the later ones are tried if a save ended before.
_FRACTIONS = (0.5, 0.25, 0.1, 0.02)
_POLL_SECONDS = 0.001
_ENOUGH_BYTES = 64 * 1024**2  # a save of fewer bytes ends before it can be killed


@dataclass(frozen=True, slots=True)
class KilledSave:
    tool: str
    seconds: float
    written: int  # bytes, of ``nbytes``
    nbytes: int
    error: str | None  # why the checkpoint does not load, with every bit of the state that it had

    @property
    def intact(self) -> bool:
        return self.error is None

    def text(self) -> str:
        written = f"{format_bytes(self.written)} of {format_bytes(self.nbytes)} written"
        left = "still loads, with every bit that it had" if self.intact else f"is broken: {self.error}"
        return f"{self.tool}: killed after {format_seconds(self.seconds)}, {written}. The old checkpoint {left}."


def kill_saves(folder: Path, states: StatePair) -> list[KilledSave]:
    if states.nbytes < _ENOUGH_BYTES:
        # A small save would end before it can be killed.
        padding = torch.zeros(_ENOUGH_BYTES, dtype=torch.uint8)
        states = StatePair({"state": states.source, "padding": padding})
    source = folder / "latest"
    save(states.source, source)
    torch_file = folder / "latest.pt"
    TorchTool().save(states.source, torch_file)
    found = []
    for tool, path in (("torch", torch_file), ("tensorkeep", source)):
        seconds, written = _kill(tool, path, source, states.nbytes)
        error: str | None = "it holds another state"
        try:
            # Every bit, because a checkpoint that loads may hold parts of two states.
            if digest(COMMON_TOOLS[tool].load(path)) == digest(states.source):
                error = None
        except Exception as raised:
            error = first_line(raised).partition(". ")[0]
        found.append(KilledSave(tool, seconds, written, states.nbytes, error))
    torch_file.unlink()
    return found


def _kill(tool: str, path: Path, source: Path, nbytes: int) -> tuple[float, int]:
    """Kill a save by SIGKILL; return after how many seconds, and how many bytes it had written."""
    for fraction in _FRACTIONS:
        process, ours = start_process(_save_over, tool, path, source)
        try:
            ours.recv()  # The state is ready, and the save begins.
            begin, before, written = time.perf_counter(), machine.written_bytes(process.pid), 0
            # By bytes that the kernel counted, not by time: machines differ, and a save must be killed while it writes.
            while written < fraction * nbytes and not ours.poll(_POLL_SECONDS):
                written = machine.written_bytes(process.pid) - before
            seconds = time.perf_counter() - begin
        except EOFError:
            raise StoreError("the saving process ended before it saved", path=path) from None
        finally:
            process.kill()
            process.join()
        # The save may have ended between the last poll and the kill.
        if not _has_saved(ours):
            return seconds, written
    raise StoreError("every save ended before it was killed", path=path, remedy="use a larger --size")


def _has_saved(connection: Connection) -> bool:
    try:
        # A process that was killed leaves the end of the stream, which `poll` reports as well.
        return connection.poll() and bool(connection.recv())
    except EOFError:
        return False


def _save_over(connection: Connection, tool: str, path: Path, source: Path) -> None:
    state = load(source)
    wipe(state)  # The new checkpoint shares no bytes with the old one.
    connection.send("ready")
    if tool == "tensorkeep":
        save(state, path, overwrite=True)
    else:
        TorchTool().save(state, path)
    connection.send("done")
