"""Incremental saves: unchanged blocks are linked, changed blocks are written or stored as differences."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import tensorkeep
from tensorkeep.formats.native import previous
from tensorkeep.formats.write import BLOCK_BYTES
from tensorkeep.testing.equality import same

MB = 1024**2


def weights(count: int = 20, seed: int = 0) -> dict[str, torch.Tensor]:
    """``count`` tensors of 1 MiB."""
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(512, 1024, generator=generator).bfloat16() for number in range(count)}


def changed(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: tensor + 1 if name in names else tensor for name, tensor in state.items()}


def files(path: Path) -> dict[str, os.stat_result]:
    return {entry.name: entry.stat() for entry in path.iterdir()}


@pytest.fixture(params=["none", "lossless"])
def compression(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def test_only_changed_blocks_are_written(tmp_path: Path, compression: str) -> None:
    first = weights()
    second = changed(first, ["w3"])
    full = tensorkeep.save(first, tmp_path / "1", incremental=True, compression=compression)
    report = tensorkeep.save(second, tmp_path / "2", base=tmp_path / "1", compression=compression)
    assert report.base == str(tmp_path / "1")
    assert report.base_refused is None
    assert report.new_bytes < 0.08 * full.stored_bytes
    assert same(tensorkeep.load(tmp_path / "2"), second)
    assert tensorkeep.verify(tmp_path / "2").ok
    linked = files(tmp_path / "2")["from-1-model.tensorkeep"]
    suffix = "safetensors" if compression == "none" else "tensorkeep"
    assert linked.st_ino == files(tmp_path / "1")[f"model.{suffix}"].st_ino


def test_each_step_is_complete_without_the_others(tmp_path: Path, compression: str) -> None:
    states = [weights()]
    tensorkeep.save(states[0], tmp_path / "0", incremental=True, compression=compression)
    for number in range(1, 6):
        states.append(changed(states[-1], [f"w{number}", f"w{number + 7}"]))
        tensorkeep.save(states[-1], tmp_path / str(number), base=tmp_path / str(number - 1), compression=compression)
    for number in (0, 2, 3, 4):
        shutil.rmtree(tmp_path / str(number))
    assert same(tensorkeep.load(tmp_path / "5"), states[5])
    assert same(tensorkeep.load(tmp_path / "1"), states[1])
    shutil.copytree(tmp_path / "5", tmp_path / "copy")
    assert same(tensorkeep.load(tmp_path / "copy"), states[5])
    tensorkeep.convert(tmp_path / "5", tmp_path / "plain.safetensors", to="safetensors")
    assert same(tensorkeep.load(tmp_path / "plain.safetensors"), states[5])


def test_an_unchanged_state_writes_no_blocks(tmp_path: Path, compression: str) -> None:
    state = weights()
    tensorkeep.save(state, tmp_path / "1", incremental=True, compression=compression)
    report = tensorkeep.save(state, tmp_path / "2", base=tmp_path / "1", compression=compression)
    assert report.new_bytes < 100_000
    assert same(tensorkeep.load(tmp_path / "2"), state)


def test_one_changed_block_of_a_tensor_is_written(tmp_path: Path) -> None:
    tensor = torch.arange(5 * BLOCK_BYTES // 4 + 1000, dtype=torch.int32)
    tensorkeep.save({"t": tensor}, tmp_path / "1", incremental=True)
    other = tensor.clone()
    other[3 * BLOCK_BYTES // 4] = -1
    report = tensorkeep.save({"t": other}, tmp_path / "2", base=tmp_path / "1")
    assert BLOCK_BYTES <= report.new_bytes < 1.1 * BLOCK_BYTES
    assert same(tensorkeep.load(tmp_path / "2"), {"t": other})
    with tensorkeep.open(tmp_path / "2") as checkpoint:
        rows = slice(3 * BLOCK_BYTES // 4 - 5, 3 * BLOCK_BYTES // 4 + 5)
        assert torch.equal(checkpoint["t"][rows], other[rows])


def test_new_removed_and_reshaped_tensors(tmp_path: Path, compression: str) -> None:
    first = weights()
    tensorkeep.save(first, tmp_path / "1", incremental=True, compression=compression)
    second = {name: tensor for name, tensor in first.items() if name != "w0"}
    second["w1"] = first["w1"].reshape(1024, 512)
    second["w2"] = first["w2"].float()
    second["added"] = torch.ones(700_000)
    tensorkeep.save(second, tmp_path / "2", base=tmp_path / "1", compression=compression)
    assert same(tensorkeep.load(tmp_path / "2"), second)


def test_tied_tensors_and_scalars(tmp_path: Path) -> None:
    shared = torch.randn(600, 600)
    state = {"model": {"a": shared, "b": shared.t(), "n": torch.tensor(1)}, "step": 1}
    tensorkeep.save(state, tmp_path / "1", incremental=True)
    state = {"model": {"a": shared, "b": shared.t(), "n": torch.tensor(2)}, "step": 2}
    tensorkeep.save(state, tmp_path / "2", base=tmp_path / "1")
    loaded = tensorkeep.load(tmp_path / "2")
    assert same(loaded, state)
    assert loaded["model"]["a"].data_ptr() == loaded["model"]["b"].data_ptr()


def test_a_file_with_few_used_blocks_is_not_linked_again(tmp_path: Path) -> None:
    state = weights()
    tensorkeep.save(state, tmp_path / "0", incremental=True)
    occupied = []
    for number in range(1, 21):
        state = changed(state, [f"w{number % 20}"])
        tensorkeep.save(state, tmp_path / str(number), base=tmp_path / str(number - 1))
        assert same(tensorkeep.load(tmp_path / str(number)), state)
        shutil.rmtree(tmp_path / str(number - 1))
        occupied.append(sum(found.st_size for found in files(tmp_path / str(number)).values()))
    assert max(occupied) < 2.2 * 20 * MB


def test_a_base_saved_without_incremental_is_refused_and_everything_is_written(tmp_path: Path) -> None:
    state = weights(4)
    tensorkeep.save(state, tmp_path / "1")
    report = tensorkeep.save(state, tmp_path / "2", base=tmp_path / "1")
    assert report.base is None
    assert "incremental=True" in (report.base_refused or "")
    assert report.new_bytes == report.stored_bytes > 4 * MB
    with safe_open(tmp_path / "2" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("w0"), state["w0"])


@pytest.mark.parametrize("damage", ["gone", "short", "manifest"])
def test_with_a_damaged_base_everything_is_written(tmp_path: Path, damage: str) -> None:
    state = weights(4)
    tensorkeep.save(state, tmp_path / "1", incremental=True)
    data = tmp_path / "1" / "model.safetensors"
    if damage == "gone":
        data.unlink()
    elif damage == "short":
        os.truncate(data, 5000)
    else:
        (tmp_path / "1" / "manifest.json").write_text("{}")
    report = tensorkeep.save(state, tmp_path / "2", base=tmp_path / "1")
    assert report.base is None
    assert report.base_refused
    assert same(tensorkeep.load(tmp_path / "2"), state)


def test_replacing_the_base_itself(tmp_path: Path) -> None:
    state = weights(6)
    tensorkeep.save(state, tmp_path / "c", incremental=True)
    for number in range(5):
        state = changed(state, [f"w{number}"])
        report = tensorkeep.save(state, tmp_path / "c", base=tmp_path / "c", overwrite=True)
        assert report.base is not None
        assert same(tensorkeep.load(tmp_path / "c"), state)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_file_of_changes_is_refused_alone(tmp_path: Path) -> None:
    tensor = torch.arange(3 * BLOCK_BYTES // 4, dtype=torch.int32)
    tensorkeep.save({"t": tensor}, tmp_path / "1", incremental=True)
    tensor[0] = 7
    tensorkeep.save({"t": tensor}, tmp_path / "2", base=tmp_path / "1")
    alone = tmp_path / "2" / "changes-model.tensorkeep"
    with safe_open(alone, "pt") as file:  # still a safetensors file
        assert file.get_tensor("t").dtype == torch.uint8
    with pytest.raises(tensorkeep.UnsupportedError, match="blocks in other files"):
        tensorkeep.load(alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": True}, "delta=True stores compressed differences"),
        ({"incremental": "yes"}, "incremental is 'yes'"),
        ({"base": 3}, "base is 3"),
        ({"base": "x", "incremental": False}, "a save with a base is incremental"),
    ],
)
def test_contradicting_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(tensorkeep.UsageError, match=message):
        tensorkeep.save({"a": torch.ones(1)}, tmp_path / "c", **options)


def trained(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return weights after a small update, as of an optimizer with a low learning rate."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (t.float() + 1e-4 * torch.randn(t.shape, generator=generator)).to(t.dtype) for name, t in state.items()
    }


def small_weights(count: int = 8) -> dict[str, torch.Tensor]:
    return {name: tensor * 0.02 for name, tensor in weights(count).items()}


def test_differences_are_smaller_and_load(tmp_path: Path) -> None:
    states = [small_weights()]
    tensorkeep.save(states[0], tmp_path / "0", incremental=True, compression="lossless")
    for number in range(1, 12):
        states.append(trained(states[-1], number))
        report = tensorkeep.save(
            states[-1], tmp_path / str(number), base=tmp_path / str(number - 1), delta=True, compression="lossless"
        )
        whole = tensorkeep.save(states[-1], tmp_path / f"whole-{number}", compression="lossless")
        assert report.new_bytes <= 1.01 * whole.stored_bytes
        if number == 1:
            assert report.new_bytes < 0.7 * whole.stored_bytes
            assert "delta" in tensorkeep.info(tmp_path / "1").by_codec.popitem()[0]
    for number, state in enumerate(states):
        assert same(tensorkeep.load(tmp_path / str(number)), state)
        assert tensorkeep.verify(tmp_path / str(number)).ok
        assert (
            tensorkeep.info(tmp_path / str(number)).details.get("history", {}).get("deepest_chain", 0)
            <= previous.MAX_CHAIN_LENGTH
        )


def test_a_full_block_is_stored_at_least_every_eight_steps(tmp_path: Path) -> None:
    state = small_weights(2)
    tensorkeep.save(state, tmp_path / "0", incremental=True, compression="lossless")
    chains = []
    for number in range(1, 18):
        state = trained(state, number)
        base = tmp_path / str(number - 1)
        tensorkeep.save(state, tmp_path / str(number), base=base, delta=True, compression="lossless")
        chains.append(tensorkeep.info(tmp_path / str(number)).details.get("history", {}).get("deepest_chain", 0))
    whole = [number for number, chain in enumerate(chains) if chain == 0]
    assert whole == [7, 15]


def test_noise_is_not_stored_as_a_difference(tmp_path: Path) -> None:
    tensorkeep.save(weights(4, seed=1), tmp_path / "1", incremental=True, compression="lossless")
    state = weights(4, seed=2)
    report = tensorkeep.save(state, tmp_path / "2", base=tmp_path / "1", delta=True, compression="lossless")
    plain = tensorkeep.save(state, tmp_path / "3", compression="lossless")
    assert report.new_bytes <= 1.01 * plain.stored_bytes
    assert "delta" not in "".join(tensorkeep.info(tmp_path / "2").by_codec)


def test_a_damaged_block_is_not_used_for_a_difference(tmp_path: Path) -> None:
    state = small_weights(2)
    tensorkeep.save(state, tmp_path / "1", incremental=True, compression="lossless")
    data = tmp_path / "1" / "model.tensorkeep"
    content = bytearray(data.read_bytes())
    content[len(content) // 4] ^= 1
    data.write_bytes(content)
    state = trained(state, 1)
    tensorkeep.save(state, tmp_path / "2", base=tmp_path / "1", delta=True, compression="lossless")
    assert same(tensorkeep.load(tmp_path / "2"), state)


@pytest.mark.parametrize("stride", [149, pytest.param(13, marks=pytest.mark.slow)])
def test_a_flipped_bit_of_a_chain_is_found(tmp_path: Path, stride: int) -> None:
    first = {"w": torch.randn(100, 100).bfloat16() * 0.02, "v": torch.zeros(3000)}
    tensorkeep.save(first, tmp_path / "1", incremental=True, compression="lossless")
    tensorkeep.save(trained(first, 1), tmp_path / "2", base=tmp_path / "1", delta=True, compression="lossless")
    assert "delta" in "".join(tensorkeep.info(tmp_path / "2").by_codec)
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
                assert file.name.startswith("from-")
                tensorkeep.load(tmp_path / "2")
        file.write_bytes(content)
