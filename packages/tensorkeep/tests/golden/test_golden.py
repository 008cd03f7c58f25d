"""Golden checkpoints: checkpoints written by earlier versions must load in every later version."""

import json
import struct
from pathlib import Path

import pytest
import torch
import xxhash
import zstandard

import tensorkeep
from golden import states
from tensorkeep.testing.equality import difference

HERE = Path(__file__).parent
GOLDEN = sorted(path.parent for path in HERE.glob("*/*/manifest.json"))
WHOLE = {"raw", "lossless", "sharded", "zstd", "gzip"}
CHANGES = {"raw-first", "raw-later", "delta-first", "delta-later"}
RANKS = {"rows", "anywhere"}


@pytest.mark.coder
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_golden_checkpoint_loads(path: Path) -> None:
    assert tensorkeep.verify(path).ok
    found = tensorkeep.load(path)
    expected = states.later() if path.name.endswith("-later") else states.state()
    assert difference(found, expected) is None
    assert found["model"]["tied"] is found["model"]["layers.0.weight"]
    assert found["model"]["row"].untyped_storage().data_ptr() == found["model"]["tied"].untyped_storage().data_ptr()
    with tensorkeep.open(path) as opened:
        assert opened.metadata == {"note": "golden"}


def test_golden_checkpoints_cover_each_way_of_storing() -> None:
    """Shows that steps hold no full copies under another name, and that compressed files have both names."""
    assert {path.name for path in GOLDEN} == WHOLE | CHANGES | RANKS
    for folder in ("native-1-changes", "native-1-suffix-changes"):
        for kind, deepest in (("raw", 0), ("delta", 1)):
            path = HERE / folder / f"{kind}-later"
            assert tensorkeep.info(path).details["history"]["deepest_chain"] == deepest
            assert any(file.name.startswith("from-") for file in path.iterdir())
    for kind, ranks in {"rows": 3, "anywhere": 3, "delta-first": 3, "delta-later": 2}.items():
        details = tensorkeep.info(HERE / "native-1-pieces" / kind).details
        assert (len(details["ranks"]), details["block_bytes"]) == (ranks, 2048)
    assert details["history"]["deepest_chain"] == 1
    for kind in ("lossless", "zstd", "gzip"):
        assert (HERE / "native-1" / kind / "model.safetensors").exists()
        assert (HERE / "native-1-suffix" / kind / "model.tensorkeep").exists()


def manifest_of(body: object) -> bytes:
    """Return a manifest with its checksum, by the specification alone."""
    rest = b'","body":' + json.dumps(body).encode() + b"}\n"
    return b'{"xxh3_64":"' + xxhash.xxh3_64_hexdigest(rest).encode() + rest


def test_a_checkpoint_spelled_out_by_hand(tmp_path: Path) -> None:
    """The specification alone is enough to write a checkpoint by hand."""
    data = struct.pack("<3f", 1.0, -2.0, 0.5)
    entry = b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'
    header = struct.pack("<Q", len(entry)) + entry
    file = {"name": "model.safetensors", "bytes": len(header) + 12, "head_bytes": len(header)}
    leaf = {"name": "w", "part": "model", "key": "w", "dtype": "float32", "shape": [3], "file": 0}
    body = {
        "format": "tensorkeep",
        "version": 1,
        "writer": "a person",
        "features": [],
        "metadata": {},
        "block_bytes": 16,
        "compression": "none",
        "aliases": {},
        "files": [file | {"head": xxhash.xxh3_64_hexdigest(header)}],
        "leaves": [leaf | {"offset": len(header), "blocks": [["raw", 12, xxhash.xxh3_64_hexdigest(data), ""]]}],
        "skeleton": {"dict": {"w": {"tensor": "w"}, "lr": {"float": "0.1"}}},
    }
    place = tmp_path / "ckpt"
    place.mkdir()
    (place / "model.safetensors").write_bytes(header + data)
    (place / "manifest.json").write_bytes(manifest_of(body))
    assert tensorkeep.verify(place).ok
    found = tensorkeep.load(place)
    assert found["lr"] == 0.1
    assert torch.equal(found["w"], torch.tensor([1.0, -2.0, 0.5]))


def test_a_written_checkpoint_is_read_without_tensorkeep(tmp_path: Path) -> None:
    """The bytes follow the specification, down to a zstd block that a plain decoder reads."""
    weights = torch.arange(4096, dtype=torch.int32)
    tensorkeep.save({"w": weights, "n": 5}, tmp_path / "ckpt", compression="zstd")
    text = (tmp_path / "ckpt" / "manifest.json").read_bytes()
    assert text[:12] == b'{"xxh3_64":"'
    assert xxhash.xxh3_64_hexdigest(text[28:]).encode() == text[12:28]
    body = json.loads(text)["body"]
    (leaf,) = body["leaves"]
    ((codec, length, raw, stored),) = leaf["blocks"]
    file = (tmp_path / "ckpt" / body["files"][leaf["file"]]["name"]).read_bytes()
    block = file[leaf["offset"] : leaf["offset"] + length]
    assert codec == "zstd"
    assert xxhash.xxh3_64_hexdigest(block) == stored
    content = zstandard.ZstdDecompressor().decompress(block, max_output_size=weights.nbytes)
    assert content == weights.numpy().tobytes()
    assert xxhash.xxh3_64_hexdigest(content) == raw
    assert body["skeleton"] == {"dict": {"w": {"tensor": "w"}, "n": 5}}


def test_views_of_early_manifests_have_separate_keys(tmp_path: Path) -> None:
    """The first manifests did not store the key of a view."""
    tensor = torch.arange(6.0)
    tensorkeep.save({"m": {"m.b": tensor, "b": tensor, "c": tensor[:2]}}, tmp_path / "ckpt")
    manifest = tmp_path / "ckpt" / "manifest.json"
    body = json.loads(manifest.read_bytes())["body"]
    keys = {name: alias.pop("key") for name, alias in body["aliases"].items()}
    assert keys == {"m.b": "b", "m.c": "c"}
    with tensorkeep.open(tmp_path / "ckpt") as opened:
        parts = opened._reader.flat.parts
    manifest.write_bytes(manifest_of(body))
    with tensorkeep.open(tmp_path / "ckpt") as opened:
        assert opened._reader.flat.parts == parts
    tensorkeep.convert(tmp_path / "ckpt", tmp_path / "out.safetensors", to="safetensors")
    assert torch.equal(tensorkeep.load(tmp_path / "out.safetensors")["m"]["b"], tensor)
