"""Files named ``*.safetensors`` hold all weights of their part, uncompressed; other data files have another suffix."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tensorkeep
from tensorkeep.cli.main import main
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_suite import names_in


def weights() -> dict[str, Any]:
    return {"model": {f"w{number}": torch.arange(4000.0) + number for number in range(4)}, "step": 1}


@pytest.mark.parametrize("compression", [pytest.param("lossless", marks=pytest.mark.coder), "zstd", "gzip"])
def test_no_file_of_a_compressed_checkpoint_looks_like_weights(tmp_path: Path, compression: str) -> None:
    for options in ({}, {"shard_bytes": 20_000}):
        tensorkeep.save(weights(), tmp_path / "c", compression=compression, overwrite=True, **options)
        assert not list((tmp_path / "c").glob("*.safetensors*"))
        assert same(tensorkeep.load(tmp_path / "c"), weights())
        assert tensorkeep.verify(tmp_path / "c")
    assert tensorkeep.save(weights(), tmp_path / "c", overwrite=True).compression == "none"
    # Other tools load the file of an uncompressed checkpoint.
    assert same(safetensors.torch.load_file(tmp_path / "c" / "model.safetensors"), weights()["model"])
    # A compressed file is read alone, under a suffix of its own.
    tensorkeep.save(weights(), tmp_path / "d", compression=compression)
    (tmp_path / "d" / "manifest.json").unlink()
    for path in (tmp_path / "d", tmp_path / "d" / "model.tensorkeep"):
        assert same(tensorkeep.load(path), weights()["model"])
    single = tensorkeep.save(weights(), tmp_path / "w.tensorkeep", compression=compression)
    assert (single.format, (tmp_path / "w.tensorkeep").is_file()) == ("safetensors", True)
    assert same(tensorkeep.load(tmp_path / "w.tensorkeep"), weights())


def test_no_file_of_an_incremental_step_looks_like_weights(tmp_path: Path) -> None:
    tensorkeep.save(weights(), tmp_path / "1", incremental=True)
    tensorkeep.save(weights() | {"more": torch.ones(5)}, tmp_path / "2", base=tmp_path / "1")
    assert names_in(tmp_path / "2") == [
        "changes-model.tensorkeep", "changes-top.tensorkeep", "from-1-model.tensorkeep", "manifest.json"
    ]  # fmt: skip
    tensorkeep.save(weights(), tmp_path / "3", base=tmp_path / "2")
    assert names_in(tmp_path / "3") == ["changes-model.tensorkeep", "from-1-model.tensorkeep", "manifest.json"]
    assert same(tensorkeep.load(tmp_path / "3"), weights())


def test_compressed_safetensors_have_to_be_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, compression in product(("w.safetensors", "folder"), ("lossless", "zstd", "auto")):
        path = tmp_path / compression / name
        options: dict[str, Any] = {"format": "safetensors", "compression": compression}
        with pytest.raises(tensorkeep.UsageError, match=r"uint8 bytes to other tools.*\n.*force=True"):
            tensorkeep.save(weights(), path, **options)
        assert not path.exists()
        tensorkeep.save(weights(), path, force=True, **options)
        assert same(tensorkeep.load(path), weights())
    source, target = str(tmp_path / "c"), str(tmp_path / "w.safetensors")
    tensorkeep.save(weights(), source)
    command = ["convert", source, target, "--to", "safetensors", "--compression", "lossless"]
    assert main(command) == 2
    assert "uint8 bytes to other tools, not weights" in capsys.readouterr().err
    assert names_in(tmp_path) == ["auto", "c", "lossless", "zstd"]
    assert main([*command, "--force"]) == 0
    assert main(["diff", source, target]) == 0
