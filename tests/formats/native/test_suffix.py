"""Files named ``*.safetensors`` hold all weights of their part, uncompressed; other data files have another suffix."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tensorkeep
from tensorkeep.cli.main import main
from tensorkeep.testing.disk import names_in
from tensorkeep.testing.equality import same


def weights() -> dict[str, Any]:
    return {"model": {f"w{number}": torch.arange(4000.0) + number for number in range(4)}, "step": 1}


@pytest.mark.parametrize("options", [{}, {"shard_bytes": 20_000}])
@pytest.mark.parametrize("compression", ["lossless", "zstd", "gzip"])
def test_no_file_of_a_compressed_checkpoint_looks_like_weights(
    tmp_path: Path, compression: str, options: dict[str, Any]
) -> None:
    tensorkeep.save(weights(), tmp_path / "c", compression=compression, **options)
    assert not list((tmp_path / "c").glob("*.safetensors*"))
    assert same(tensorkeep.load(tmp_path / "c"), weights())
    assert tensorkeep.verify(tmp_path / "c")
    assert tensorkeep.save(weights(), tmp_path / "c", overwrite=True).compression == "none"


def test_no_file_of_an_incremental_step_looks_like_weights(tmp_path: Path) -> None:
    tensorkeep.save(weights(), tmp_path / "1", incremental=True)
    tensorkeep.save(weights() | {"more": torch.ones(5)}, tmp_path / "2", base=tmp_path / "1")
    assert names_in(tmp_path / "2") == [
        "changes-model.tensorkeep", "changes-top.tensorkeep", "from-1-model.tensorkeep", "manifest.json"
    ]  # fmt: skip
    tensorkeep.save(weights(), tmp_path / "3", base=tmp_path / "2")
    assert names_in(tmp_path / "3") == ["changes-model.tensorkeep", "from-1-model.tensorkeep", "manifest.json"]
    assert same(tensorkeep.load(tmp_path / "3"), weights())


def test_other_tools_load_the_files_of_an_uncompressed_checkpoint(tmp_path: Path) -> None:
    tensorkeep.save(weights(), tmp_path / "c")
    assert same(safetensors.torch.load_file(tmp_path / "c" / "model.safetensors"), weights()["model"])


def test_a_coded_file_is_read_alone(tmp_path: Path) -> None:
    tensorkeep.save(weights(), tmp_path / "c", compression="lossless")
    (tmp_path / "c" / "manifest.json").unlink()
    assert same(tensorkeep.load(tmp_path / "c"), weights()["model"])
    assert same(tensorkeep.load(tmp_path / "c" / "model.tensorkeep"), weights()["model"])


@pytest.mark.parametrize("compression", ["lossless", "zstd", "auto"])
@pytest.mark.parametrize("name", ["w.safetensors", "folder"])
def test_compressed_safetensors_have_to_be_forced(tmp_path: Path, name: str, compression: str) -> None:
    options: dict[str, Any] = {"format": "safetensors", "compression": compression}
    with pytest.raises(tensorkeep.UsageError, match=r"uint8 bytes to other tools.*\n.*force=True"):
        tensorkeep.save(weights(), tmp_path / name, **options)
    assert names_in(tmp_path) == []
    tensorkeep.save(weights(), tmp_path / name, force=True, **options)
    assert same(tensorkeep.load(tmp_path / name), weights())


def test_a_compressed_single_file_has_a_suffix_of_its_own(tmp_path: Path) -> None:
    report = tensorkeep.save(weights(), tmp_path / "w.tensorkeep", compression="lossless")
    assert report.format == "safetensors"
    assert (tmp_path / "w.tensorkeep").is_file()
    assert same(tensorkeep.load(tmp_path / "w.tensorkeep"), weights())


def test_convert_to_compressed_safetensors_needs_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensorkeep.save(weights(), tmp_path / "c")
    command = ["convert", str(tmp_path / "c"), str(tmp_path / "w.safetensors"), "--to", "safetensors"]
    assert main([*command, "--compression", "lossless"]) == 2
    assert "uint8 bytes to other tools, not weights" in capsys.readouterr().err
    assert not (tmp_path / "w.safetensors").exists()
    assert main([*command, "--compression", "lossless", "--force"]) == 0
    assert main(["diff", str(tmp_path / "c"), str(tmp_path / "w.safetensors")]) == 0
