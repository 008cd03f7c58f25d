"""Folders that other tools write are read as those tools read them, or refused."""

from pathlib import Path

import pytest
import torch

import tensorkeep
from tensorkeep.errors import NotACheckpointError, UsageError
from tensorkeep.testing.cases import case
from tensorkeep.testing.folder_suite import FULL, ORDER, POINTER, FolderSuite, same, warned, write


def variant(folder: Path, index: str) -> Path:
    """Write shards of a variant, with an index of the name that transformers and diffusers give it."""
    stem, suffix = index.split(".")[:2]
    ours = f"{stem}.fp16.{suffix}.index.json"
    (write(folder, ours) / ours).rename(folder / f"{stem}.{suffix}.index.fp16.json")
    return folder


class TestFolders(FolderSuite):
    def test_the_index_of_a_variant_is_read(self, tmp_path: Path) -> None:
        for index in ORDER[1::2]:
            folder = variant(tmp_path / index, index)
            assert same(tensorkeep.load(folder), FULL) and tensorkeep.verify(folder).ok
            write(folder, "model.safetensors")
            assert "index.fp16.json" in warned(tensorkeep.load, folder)[0]
        folder = variant(write(tmp_path / "unet", "unet.safetensors.index.json"), "unet.safetensors.index.json")
        with pytest.raises(NotACheckpointError) as caught:
            tensorkeep.load(folder)
        assert caught.value.remedy == f"give the path of one: {folder / 'unet.safetensors.index.fp16.json'}"
        assert same(tensorkeep.load(folder / "unet.safetensors.index.fp16.json"), FULL)

    def test_parts_and_absent_files_are_recognised_by_their_names(self, tmp_path: Path) -> None:
        """The folder of a rank, a folder that is named as a file, and links to files that were not fetched."""
        (tmp_path / "run" / "model.safetensors").mkdir(parents=True)
        rank = write(tmp_path / "run" / "mp_rank_00", "model_optim_rng.pt")
        with pytest.raises(NotACheckpointError) as caught:
            tensorkeep.load(rank)
        assert "give the path" not in str(caught.value.remedy)
        assert "mp_rank_00, it is" in warned(tensorkeep.load, rank / "model_optim_rng.pt")[0]
        with pytest.raises(NotACheckpointError, match="not a checkpoint of any"):
            tensorkeep.load(rank.parent)
        for name in ("model.safetensors", "pytorch_model.bin", ".metadata", "model.safetensors.index.json"):
            folder = write(tmp_path / f"absent {name}", "model-00001-of-00002.safetensors")
            (folder / name).symlink_to("../../blobs/0")
            for path in (folder, folder / name):
                with case(path), pytest.raises(NotACheckpointError, match="leads nowhere"):
                    tensorkeep.load(path)

    @pytest.mark.parametrize("format", ["native", "t5x"])
    def test_a_pointer_in_the_place_of_any_file_is_named(self, format: str, tmp_path: Path) -> None:
        tensorkeep.save(FULL, tmp_path / "c", format=format)
        for file in [path for path in (tmp_path / "c").rglob("*") if path.is_file()]:
            kept = file.read_bytes()
            file.write_bytes(POINTER)
            with case(file), pytest.raises(NotACheckpointError, match="git lfs pull"):
                tensorkeep.load(tmp_path / "c")
            file.write_bytes(kept)

    def test_what_a_load_leaves_out_is_named(self, tmp_path: Path) -> None:
        """Other files in a native checkpoint, attributes in a folder; and no false note on bytes of placeholders."""
        folder = write(Path(tensorkeep.save({"a": FULL}, tmp_path / "c", shard_bytes=32).path), "pytorch_model.bin")
        assert "pytorch_model.bin" in warned(tensorkeep.load, folder)[0]
        assert tensorkeep.info(folder).details["unused_files"] == ["pytorch_model.bin"]
        tagged = torch.ones(2)
        tagged.tag = 1  # type: ignore[attr-defined]
        with pytest.warns(match="attributes of tensors or containers are not loaded: tag"):
            tensorkeep.load(write(tmp_path / "m", "pytorch_model.bin", {"w": tagged}))
        folder = write(tmp_path / "s", "pytorch_model.bin.index.json")
        torch.save({"v": torch.eye(2).to_sparse()}, folder / "pytorch_model-00002-of-00002.bin")
        assert warned(lambda: tensorkeep.load(folder, select="*")) == []

    def test_a_torch_file_is_not_written_under_the_suffix_of_safetensors(self, tmp_path: Path) -> None:
        for name in ("x.safetensors", "x.tensorkeep"):
            with case(name), pytest.raises(UsageError, match="not read under the suffix"):
                tensorkeep.save(FULL, tmp_path / name, format="torch")
