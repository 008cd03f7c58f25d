"""Raw checkpoints are files that other tools open, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import tensorkeep
from tensorkeep.formats.safetensors import FORMAT
from tensorkeep.state.dtypes import BY_SAFETENSORS
from tensorkeep.testing.equality import same

# What the library's torch binding can read; the others are covered by our own reader's tests.
KNOWN = [tag for tag in BY_SAFETENSORS if tag != "F8_E8M0"]


def tensor_of(tag: str) -> torch.Tensor:
    """Return 48 bytes of a dtype, all of them different."""
    return torch.arange(48, dtype=torch.uint8).mul(5).view(BY_SAFETENSORS[tag].torch).reshape(2, -1)


@pytest.fixture(scope="module")
def model() -> dict[str, torch.Tensor]:
    tensors = {f"layers.{i}.{tag}": tensor_of(tag) for i, tag in enumerate(KNOWN) if tag != "BOOL"}
    return tensors | {"mask": torch.tensor([True, False]), "scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}


def test_each_part_is_a_complete_weights_file(tmp_path: Path, model: dict[str, torch.Tensor]) -> None:
    # Dtypes that safetensors lacks are stored as bytes.
    ema = {"c": torch.randn(3, dtype=torch.complex128), "w": torch.ones(3)}
    tensorkeep.save({"model": model, "ema": ema, "step": 1}, tmp_path / "ckpt")
    found = load_file(tmp_path / "ckpt" / "ema.safetensors")
    assert same(found["w"], ema["w"]) and found["c"].dtype == torch.uint8
    assert same(found["c"].view(torch.complex128), ema["c"])
    for loaded in (tensorkeep.load(tmp_path / "ckpt")["ema"], tensorkeep.load(tmp_path / "ckpt" / "ema.safetensors")):
        assert same(loaded, ema)
    with safe_open(tmp_path / "ckpt" / "model.safetensors", framework="pt") as file:
        assert (set(file.keys()), file.metadata()) == (set(model), {"format": "pt"})
        for name, tensor in model.items():
            assert same(file.get_tensor(name), tensor), name


def test_transformers_reads_the_sharded_index(tmp_path: Path, model: dict[str, torch.Tensor]) -> None:
    tensorkeep.save({"model": model}, tmp_path / "ckpt", shard_bytes=200)
    index = json.loads((tmp_path / "ckpt" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in model.values())
    found: dict[str, torch.Tensor] = {}
    for shard in shards:
        content = load_file(tmp_path / "ckpt" / shard)
        assert {name for name, file in index["weight_map"].items() if file == shard} == set(content)
        found |= content
    assert same({name: found[name] for name in model}, model)
    assert len(found) == len(model)


@pytest.mark.coder
def test_compressed_file_is_a_valid_safetensors_file(tmp_path: Path) -> None:
    weights = (torch.randn(300, 200, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    state = {"w": weights, "c": torch.randn(3, dtype=torch.complex128)}
    tensorkeep.save({"model": state, "step": 1}, tmp_path / "c", compression="lossless")
    path = tmp_path / "c" / "model.tensorkeep"
    with safe_open(path, framework="pt") as file:
        stored = file.get_tensor("w")
        note = json.loads(file.metadata()["tensorkeep"])["tensors"]["w"]
    assert stored.dtype == torch.uint8
    assert len(stored) < 0.7 * weights.nbytes
    assert (note["dtype"], note["shape"]) == ("bfloat16", [300, 200])
    assert not FORMAT.recognises(tmp_path / "c")
    assert same(dict(sorted(tensorkeep.load(path).items())), dict(sorted(state.items())))
    (codec,) = {entry.codec for entry in tensorkeep.info(path).entries if entry.name == "w"}
    assert "planes" in codec
