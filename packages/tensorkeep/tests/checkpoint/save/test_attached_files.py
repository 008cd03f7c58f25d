"""Small files that a caller attaches to a checkpoint: ``config.json`` beside the weights."""

import json
from pathlib import Path

import pytest
import torch

import tensorkeep
from tensorkeep import CheckpointManager
from tensorkeep.formats.native.directory import is_ours
from tensorkeep.storage.store_commit import object_name

CONFIG = json.dumps({"model_type": "gpt2"})
STATE = {"model": {"weight": torch.arange(6.0)}}
NAMES = [
    *("config.json", "generation_config.json", "trainer_state.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "preprocessor_config.json"),
]


@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_a_file_is_written_with_the_checkpoint_and_verified(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "saved"
    report = tensorkeep.save(STATE, path, compression=compression, files={"config.json": CONFIG, "vocab.txt": b"\xff"})
    assert (path / "config.json").read_text() == CONFIG
    assert (path / "vocab.txt").read_bytes() == b"\xff"
    assert report.stored_bytes == sum(file.stat().st_size for file in path.iterdir())
    assert tensorkeep.verify(path).ok
    assert torch.equal(tensorkeep.load(path)["model"]["weight"], STATE["model"]["weight"])
    (path / "config.json").write_text(CONFIG.replace("2", "3"))
    assert [problem.file for problem in tensorkeep.verify(path).problems] == ["config.json"]
    tensorkeep.save(STATE, path, overwrite=True)
    assert not (path / "config.json").exists()


@pytest.mark.parametrize("name", NAMES)
def test_an_attached_file_belongs_to_its_checkpoint_also_without_a_manifest(tmp_path: Path, name: str) -> None:
    tensorkeep.save(STATE, tmp_path / "saved", files={name: "{}"})
    assert is_ours(name) and is_ours(object_name(name, "0123456789abcdef"))


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "notes.json", "../config.json", "", "a/b.json"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(tensorkeep.UsageError, match=r"cannot be attached.*\n.*config\.json"):
        tensorkeep.save(STATE, tmp_path / "saved", files={name: "{}"})
    with pytest.raises(tensorkeep.UsageError, match=r"config\.json is of type int"):
        tensorkeep.save(STATE, tmp_path / "saved", files={"config.json": 7})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("files", [7, "config.json", [("config.json", CONFIG)], {"config.json": "\ud800"}])
def test_what_is_no_mapping_of_texts_is_refused(tmp_path: Path, files: object) -> None:
    with pytest.raises(tensorkeep.UsageError, match=r"give contents by name|give its bytes"):
        tensorkeep.save(STATE, tmp_path / "saved", files=files)


def test_the_files_are_those_of_the_call(tmp_path: Path) -> None:
    files = {"config.json": CONFIG}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": torch.ones(1_000_000)}, files=files)
        files |= {"config.json": "later", "../notes.json": "outside"}
    assert (tmp_path / "step-000001" / "config.json").read_text() == CONFIG
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("incremental", [False, True])
def test_steps_with_files_are_replaced_when_damaged_and_deleted(tmp_path: Path, incremental: bool) -> None:
    with CheckpointManager(tmp_path, incremental=incremental) as manager:
        for step in (1, 2):
            manager.save(step, STATE, files={"config.json": CONFIG}).wait()
        assert all(tensorkeep.verify(step.path).ok for step in manager.steps())
        manifest = tmp_path / "step-000002" / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:-9])
        manager.save(2, STATE, files={"config.json": CONFIG}).wait()
        manager.delete(1)
    assert [path.name for path in tmp_path.glob("step*")] == ["step-000002"]
    assert tensorkeep.verify(tmp_path / "step-000002").ok
