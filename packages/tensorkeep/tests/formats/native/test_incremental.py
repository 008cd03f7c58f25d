"""Incremental saves: unchanged blocks are linked, changed blocks are written or stored as differences."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import tensorkeep
from formats.native.steps import DELTA, LOSSLESS, changed, codecs, trained, weights
from tensorkeep.formats.base import BLOCK_BYTES
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_suite import names_in

WIDE = (256, 256)
"""A tensor of 128 KiB, beside which headers and manifests are small."""

by_compression = pytest.mark.parametrize("compression", ["none", pytest.param("lossless", marks=pytest.mark.coder)])


def files(path: Path) -> dict[str, os.stat_result]:
    return {entry.name: entry.stat() for entry in path.iterdir()}


def new_bytes(state: Any, path: Path, **options: Any) -> int:
    """Save a state with a base, which must be used, and load it; return the bytes that were written."""
    report = tensorkeep.save(state, path, **options)
    assert (report.base, report.base_refused) == (str(options["base"]), None)
    assert same(tensorkeep.load(path), state)
    return report.new_bytes


@by_compression
def test_only_what_has_changed_is_written(tmp_path: Path, compression: str) -> None:
    first = weights(20, WIDE)
    full = tensorkeep.save(first, tmp_path / "1", incremental=True, compression=compression).stored_bytes
    options: dict[str, Any] = {"base": tmp_path / "1", "compression": compression}
    assert new_bytes(first, tmp_path / "same", **options) < 0.02 * full
    assert new_bytes(changed(first, "w3"), tmp_path / "2", **options) < 0.08 * full
    assert tensorkeep.verify(tmp_path / "2").ok
    linked = files(tmp_path / "2")["from-1-model.tensorkeep"]
    suffix = "safetensors" if compression == "none" else "tensorkeep"
    assert linked.st_ino == files(tmp_path / "1")[f"model.{suffix}"].st_ino
    # Tensors that are removed, reshaped, of another dtype, and new ones.
    others = {name: tensor for name, tensor in first.items() if name != "w0"}
    others |= {"w1": first["w1"].reshape(128, 512), "w2": first["w2"].float(), "added": torch.ones(70_000)}
    new_bytes(others, tmp_path / "3", **options)


@by_compression
def test_each_step_is_complete_without_the_others(tmp_path: Path, compression: str) -> None:
    states = [weights(20, WIDE)]
    tensorkeep.save(states[0], tmp_path / "0", incremental=True, compression=compression)
    for number in range(1, 6):
        states.append(changed(states[-1], f"w{number}", f"w{number + 7}"))
        tensorkeep.save(states[-1], tmp_path / str(number), base=tmp_path / str(number - 1), compression=compression)
    for number in (0, 2, 3, 4):
        shutil.rmtree(tmp_path / str(number))
    shutil.copytree(tmp_path / "5", tmp_path / "copy")
    tensorkeep.convert(tmp_path / "5", tmp_path / "plain.safetensors", to="safetensors")
    for name, number in {"1": 1, "5": 5, "copy": 5, "plain.safetensors": 5}.items():
        assert same(tensorkeep.load(tmp_path / name), states[number]), name


def test_one_changed_block_of_a_tensor_is_written(tmp_path: Path) -> None:
    tensor = torch.arange(2 * BLOCK_BYTES // 4 + 1000, dtype=torch.int32)
    tensorkeep.save({"t": tensor}, tmp_path / "1", incremental=True)
    start = BLOCK_BYTES // 4
    tensor[start] = -1
    written = new_bytes({"t": tensor}, tmp_path / "2", base=tmp_path / "1")
    assert BLOCK_BYTES <= written < 1.1 * BLOCK_BYTES
    with tensorkeep.open(tmp_path / "2") as checkpoint:
        assert torch.equal(checkpoint["t"][start - 5 : start + 5], tensor[start - 5 : start + 5])
    # The file of the changes is a safetensors file, which holds only a part of the tensor.
    alone = tmp_path / "2" / "changes-model.tensorkeep"
    with safe_open(alone, "pt") as file:
        assert file.get_tensor("t").dtype == torch.uint8
    with pytest.raises(tensorkeep.UnsupportedError, match="blocks in other files"):
        tensorkeep.load(alone)


def test_a_reshaped_tensor_keeps_its_blocks(tmp_path: Path) -> None:
    weight = torch.randn(300, 100)
    tensorkeep.save({"w": weight}, tmp_path / "a", incremental=True)
    report = tensorkeep.save({"w": weight.reshape(100, 300)}, tmp_path / "b", base=tmp_path / "a")
    assert report.new_bytes < weight.nbytes / 2
    assert same(tensorkeep.load(tmp_path / "b"), {"w": weight.reshape(100, 300)})


def test_tied_tensors_and_scalars(tmp_path: Path) -> None:
    shared = torch.randn(60, 60)
    for number in (1, 2):
        state = {"model": {"a": shared, "b": shared.t(), "n": torch.tensor(number)}, "step": number}
        base = {"base": tmp_path / "1"} if number == 2 else {}
        tensorkeep.save(state, tmp_path / str(number), incremental=True, **base)
    loaded = tensorkeep.load(tmp_path / "2")
    assert same(loaded, state)
    assert loaded["model"]["a"].data_ptr() == loaded["model"]["b"].data_ptr()


def test_a_file_with_few_used_blocks_is_not_linked_again(tmp_path: Path) -> None:
    """Each file has tensors that change in every save, and one that stays: without the rule it would stay for that."""
    state = weights(20, WIDE)
    tensorkeep.save(state, tmp_path / "0", incremental=True)
    for number in range(1, 16):
        state = changed(state, f"w{number}", *(f"w{each}" for each in (0, 16, 17, 18, 19)))
        tensorkeep.save(state, tmp_path / str(number), base=tmp_path / str(number - 1))
        assert same(tensorkeep.load(tmp_path / str(number)), state)
        shutil.rmtree(tmp_path / str(number - 1))
        occupied = sum(found.st_size for found in files(tmp_path / str(number)).values())
        assert occupied < 2.2 * sum(tensor.nbytes for tensor in state.values()), number


def test_a_base_saved_without_incremental_is_refused_and_everything_is_written(tmp_path: Path) -> None:
    state = weights()
    tensorkeep.save(state, tmp_path / "1")
    report = tensorkeep.save(state, tmp_path / "2", base=tmp_path / "1")
    assert report.base is None
    assert "incremental=True" in (report.base_refused or "")
    assert report.new_bytes == report.stored_bytes > sum(tensor.nbytes for tensor in state.values())
    with safe_open(tmp_path / "2" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("w0"), state["w0"])


def test_with_a_damaged_base_everything_is_written(tmp_path: Path) -> None:
    state = weights()
    for damage, inflict in {
        "gone": lambda base: (base / "model.safetensors").unlink(),
        "short": lambda base: os.truncate(base / "model.safetensors", 5000),
        "manifest": lambda base: (base / "manifest.json").write_text("{}"),
    }.items():
        base = tmp_path / damage
        tensorkeep.save(state, base, incremental=True)
        inflict(base)
        with case(damage):
            report = tensorkeep.save(state, tmp_path / f"over-{damage}", base=base)
            assert report.base is None and report.base_refused
            assert same(tensorkeep.load(tmp_path / f"over-{damage}"), state)


def test_replacing_the_base_itself(tmp_path: Path) -> None:
    state = weights(6)
    tensorkeep.save(state, tmp_path / "c", incremental=True)
    for number in range(5):
        state = changed(state, f"w{number}")
        new_bytes(state, tmp_path / "c", base=tmp_path / "c", overwrite=True)
    assert names_in(tmp_path) == ["c"]


def test_contradicting_options_are_refused(tmp_path: Path) -> None:
    for options, message in (
        ({"delta": True}, "delta=True stores compressed differences"),
        ({"incremental": "yes"}, "incremental is 'yes'"),
        ({"base": 3}, "base is 3"),
        ({"base": "x", "incremental": False}, "a save with a base is incremental"),
        # From the first save on, which stores no differences.
        ({"incremental": True, "memory_budget": "64MiB", **DELTA}, "too small"),
    ):
        with case(options), pytest.raises(tensorkeep.UsageError, match=message):
            tensorkeep.save(weights(1), tmp_path / "c", **options)
    assert names_in(tmp_path) == []


@pytest.mark.coder
def test_differences_are_smaller_and_a_full_block_is_stored_at_least_every_eight_steps(tmp_path: Path) -> None:
    states = [weights(2, (512, 512))]
    tensorkeep.save(states[0], tmp_path / "0", incremental=True, **LOSSLESS)
    chains = []
    for number in range(1, 10):
        states.append(trained(states[-1], number))
        report = tensorkeep.save(states[-1], tmp_path / str(number), base=tmp_path / str(number - 1), **DELTA)
        chains.append(tensorkeep.info(tmp_path / str(number)).details.get("history", {}).get("deepest_chain", 0))
        if number in (1, 7, 8, 9):
            whole = tensorkeep.save(states[-1], tmp_path / f"whole-{number}", **LOSSLESS)
            assert report.new_bytes <= (0.7 if number == 1 else 1.01) * whole.stored_bytes, number
            assert ("delta" in codecs(tmp_path / str(number))) == (number != 8)
    assert [number for number, chain in enumerate(chains, 1) if chain == 0] == [8]
    for number, state in enumerate(states):
        assert same(tensorkeep.load(tmp_path / str(number)), state), number
    assert tensorkeep.verify(tmp_path / "7").ok and tensorkeep.verify(tmp_path / "9").ok


@pytest.mark.coder
@pytest.mark.parametrize("stride", [499, pytest.param(13, marks=pytest.mark.exhaustive)])
def test_a_flipped_bit_of_a_chain_is_found(tmp_path: Path, stride: int) -> None:
    first = {"w": torch.randn(100, 100).bfloat16() * 0.02, "v": torch.zeros(3000)}
    tensorkeep.save(first, tmp_path / "1", incremental=True, **LOSSLESS)
    tensorkeep.save(trained(first, 1), tmp_path / "2", base=tmp_path / "1", **DELTA)
    assert "delta" in codecs(tmp_path / "2")
    for file in sorted((tmp_path / "2").iterdir()):
        content = file.read_bytes()
        for at in range(0, len(content), stride):
            file.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
            try:
                found = not tensorkeep.verify(tmp_path / "2").ok
            except tensorkeep.TensorkeepError:
                found = True
            # Blocks of the first step that the second does not use are not checked.
            if not found:
                assert file.name.startswith("from-"), f"{file.name} byte {at}"
                tensorkeep.load(tmp_path / "2")
        file.write_bytes(content)
