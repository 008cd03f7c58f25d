"""Folders that other tools write (Hugging Face's libraries, DCP's safetensors writer, Orbax) are read as those tools
read them, or refused. Each remedy is followed until it leads to full data, or to none.
"""

import json
import logging
import logging.handlers
import queue
import re
import zipfile
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import tensorkeep
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError, UsageError
from tensorkeep.safetensors import safe_open
from tensorkeep.testing import equality
from tensorkeep.testing.cases import case

ORDER = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
FULL = {"w": torch.arange(7.0), "v": torch.full((4,), 7.0)}


def write(folder: Path, name: str, tensors: dict[str, torch.Tensor] = FULL) -> Path:
    """Write a file of the kind that its name says, and of an index two shards as well."""
    folder.mkdir(exist_ok=True)
    stem, _, suffix = name.removesuffix(".index.json").rpartition(".")
    if name.endswith(".index.json"):
        files = {key: f"{stem}-0000{at + 1}-of-00002.{suffix}" for at, key in enumerate(tensors)}
        for key, file in files.items():
            write(folder, file, {key: tensors[key]})
        (folder / name).write_text(json.dumps({"metadata": {"total_size": 44}, "weight_map": files}))
    elif suffix == "safetensors":
        safetensors.torch.save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


def warned(call: Callable[..., Any], *arguments: Any) -> list[str]:
    """Return the warnings that a call logs."""
    logger, records = logging.getLogger("tensorkeep"), queue.SimpleQueue[logging.LogRecord]()
    handler = logging.handlers.QueueHandler(records)
    logger.addHandler(handler)
    try:
        call(*arguments)
    finally:
        logger.removeHandler(handler)
    return [records.get().getMessage() for _ in range(records.qsize())]


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Compare tensors in any order: the header of a safetensors file is sorted."""
    return equality.same(dict(sorted(found.items())), dict(sorted(expected.items())))


def ranks_of_dcp(folder: Path) -> None:
    """Write what `HuggingFaceStorageWriter` does with two ranks that have 4 and 3 of 7 elements."""
    folder.mkdir()
    for rank, offset, tensors in ((1, 0, {"w": FULL["w"][:4], "v": FULL["v"]}), (2, 4, {"w": FULL["w"][4:].clone()})):
        info = {key: {"saved_offsets": [offset]} for key in tensors}
        metadata = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
        file = folder / f"shard-0000{rank}-model-00001-of-00001.safetensors"
        safetensors.torch.save_file({key: tensor.clone() for key, tensor in tensors.items()}, file, metadata)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
OTHERS: list[tuple[bytes, str]] = [
    *(
        (POINTER, "git lfs pull"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"\n <HTML>", "HTML"),
        (b"<?xml ?><Error/>", "XML"),
    ),
    *((b'{"error": "not found"}', "JSON"), (b"Entry not found", "a text"), (b"GGUF\3\0\0\0" + bytes(99), "GGUF")),
    *((b"\x89HDF\r\n\x1a\n" + bytes(99), "HDF5"), (b"\x1f\x8b\x08" + bytes(99), "compressed")),
    *((b"\x93NUMPY\1\0" + bytes(99), "numpy"), (b"\x80\4\x95" + bytes(99), "pickle"), (b"PK\3\4" + bytes(99), "zip")),
]


def orbax(folder: Path) -> None:
    """Write a database of two processes in a folder as Orbax does: each has one half of an array."""
    ts = pytest.importorskip("tensorstore")
    # The remedy names its format.
    pytest.importorskip("tensorkeep_formats")
    (folder / "state").mkdir(parents=True)
    (folder / "_CHECKPOINT_METADATA").write_text("{}")
    (folder / "state" / "_METADATA").write_text('{"tree_metadata": {}}')
    for place, part in (("state", slice(0, 4)), ("state/ocdbt.process_0", slice(0, 2))):
        store = {"driver": "ocdbt", "base": f"file://{folder / place}/", "path": "w/"}
        spec = {"driver": "zarr3", "kvstore": store}
        array = ts.open(spec, create=True, dtype="float32", shape=[4], chunk_layout=ts.ChunkLayout(chunk_shape=[2]))
        array.result()[part].write(torch.tensor([1.0, 1, 2, 2])[part].numpy()).result()


def two_formats(folder: Path) -> None:
    tensorkeep.save(FULL, folder, format="dcp")
    write(folder, "model.safetensors")


def pointers(folder: Path) -> None:
    folder.mkdir()
    (folder / "x.bin").write_bytes(POINTER)


def nonstandard_index(folder: Path) -> None:
    write(folder, "old.safetensors.index.json")
    write(folder, "new.safetensors")


ONE = {"w": torch.tensor([1.0, 1, 2, 2])}
FOLDERS: dict[str, tuple[Callable[[Path], object], dict[str, torch.Tensor] | None]] = {
    "a run of Orbax": (lambda path: orbax(path / "7"), ONE),
    "a step of Orbax": (orbax, ONE),
    "two formats": (two_formats, FULL),
    "an index that transformers does not read, and a file": (nonstandard_index, FULL),
    "two files": (lambda path: [write(path, name) for name in ("a.safetensors", "b.bin")], FULL),
    "shards of torch": (lambda path: [write(path, f"m-0000{i}-of-00002.bin") for i in (1, 2)], None),
    "shards without an index": (lambda path: [write(path, f"m-0000{i}-of-00002.safetensors") for i in (1, 2)], None),
    "ranks of Llama": (lambda path: [write(path, f"consolidated.0{i}.pth") for i in (0, 1)], None),
    "ranks of Megatron": (lambda path: [write(path, f"mp_rank_0{i}_model_states.pt") for i in (0, 1)], None),
    "ranks of FSDP": (lambda path: [write(path, f"model_world_size_2_rank_{i}.pt") for i in (0, 1)], None),
    "one rank of two": (lambda path: write(path, "rank0.safetensors"), None),
    "ranks of DCP": (ranks_of_dcp, None),
    "a folder of pointers": (pointers, None),
}


def variant(folder: Path, index: str) -> Path:
    """Write shards of a variant, with an index of the name that transformers and diffusers give it."""
    stem, suffix = index.split(".")[:2]
    ours = f"{stem}.fp16.{suffix}.index.json"
    (write(folder, ours) / ours).rename(folder / f"{stem}.{suffix}.index.fp16.json")
    return folder


class TestFolders:
    @pytest.mark.parametrize("names", [names for count in (1, 2, 3, 4) for names in combinations(ORDER, count)])
    def test_a_folder_is_read_as_transformers_reads_it_and_other_files_are_named(
        self, names: tuple[str, ...], tmp_path: Path
    ) -> None:
        """The folder is read in the order of ``transformers``; load, info and convert name the other files."""
        tensors = {name: {key: tensor + ORDER.index(name) for key, tensor in FULL.items()} for name in names}
        for name in (*names, "adapter_model.safetensors", "optimizer.pt"):
            write(tmp_path / "m", name, tensors.get(name, FULL))
        for name in ("config.json", "trainer_state.json", "README.md"):
            (tmp_path / "m" / name).write_text('{"quantization_config": {"quant_method": "gptq"}}')
        (tmp_path / "m" / "global_step5").mkdir()
        chosen = tensors[names[0]]
        [unused, quantized] = warned(lambda: tensorkeep.load(tmp_path / "m"))
        assert same(tensorkeep.load(tmp_path / "m"), chosen) and tensorkeep.verify(tmp_path / "m").ok
        for other in ("adapter_model.safetensors", "optimizer.pt", "trainer_state.json"):
            assert other in unused
        assert "config.json" not in unused and "gptq" in quantized
        details = tensorkeep.info(tmp_path / "m").details
        on_disk = {path.name + "/" * path.is_dir() for path in (tmp_path / "m").iterdir()}
        assert {*details["unused_files"], *details["files"]} | {names[0]} == on_disk
        assert len(warned(tensorkeep.convert, tmp_path / "m", tmp_path / "copy")) == 2
        assert same(tensorkeep.load(tmp_path / "copy"), chosen)
        # A folder with more than the checkpoint is never replaced.
        for format in ("safetensors", "torch"):
            with pytest.raises(tensorkeep.DestinationExistsError):
                tensorkeep.save(FULL, tmp_path / "m", format=format, overwrite=True)

    def test_an_index_that_lies_is_reported_and_missing_shards_are_named(self, tmp_path: Path) -> None:
        """Wrong indexes, missing shards and shards without their index."""
        for index in ORDER[1::2]:
            folder = write(tmp_path / index, index)
            assert warned(tensorkeep.load, folder) == []
            content = json.loads((folder / index).read_text())
            (folder / index).write_text(json.dumps({**content, "metadata": {"total_size": 45}}))
            assert "total_size of 45" in warned(tensorkeep.load, folder)[0]
            assert "several parts" in warned(tensorkeep.load, folder / content["weight_map"]["v"])[0]
            files = content["weight_map"]
            (folder / index).write_text(json.dumps({"weight_map": files | {"u": files["w"]}}))
            with pytest.raises(CorruptCheckpointError, match="not there"):
                tensorkeep.load(folder)
            (folder / index).write_text(json.dumps(content))
            (folder / content["weight_map"]["v"]).unlink()
            with pytest.raises(CorruptCheckpointError, match="the index lists this file"):
                tensorkeep.load(folder)
            (folder / index).unlink()
            # One shard of two is not the model.
            with pytest.raises(NotACheckpointError, match=re.escape(index)):
                tensorkeep.load(folder)

    def test_a_ranks_file_of_a_sharded_safetensors_save_is_refused(self, tmp_path: Path) -> None:
        """Shards of `HuggingFaceStorageWriter` are refused; its full tensors are read."""
        ranks_of_dcp(tmp_path / "ranks")
        first, second = sorted((tmp_path / "ranks").iterdir())
        second.with_name("model.safetensors").write_bytes(second.read_bytes())
        for path in (first, second, second.with_name("model.safetensors"), tmp_path / "ranks"):
            for read in (tensorkeep.load, tensorkeep.verify, tensorkeep.info):
                with case(path), pytest.raises(UnsupportedError, match="one rank's file") as caught:
                    read(path)
        second.with_name("model.safetensors").unlink()
        with pytest.raises(NotACheckpointError, match="several parts"):
            tensorkeep.load(tmp_path / "ranks")
        assert "HuggingFaceStorageReader" in str(caught.value.remedy)
        joined = {key: torch.zeros_like(tensor) for key, tensor in FULL.items()}
        with pytest.warns(match="torch.distributed is disabled"):
            storage = HuggingFaceStorageReader(str(tmp_path / "ranks"))
            dcp_load(joined, storage_reader=storage, no_dist=True)
        assert same(joined, FULL)
        # The writer's other mode writes full tensors, and the same metadata, which a conversion does not copy.
        content = {"DCP_SHARDING_INFO": json.dumps({key: {"saved_offsets": [0]} for key in FULL}), "run": "7"}
        safetensors.torch.save_file(FULL, tmp_path / "model-00001-of-00001.safetensors", content)
        tensorkeep.convert(tmp_path / "model-00001-of-00001.safetensors", tmp_path / "x.safetensors")
        assert tensorkeep.info(tmp_path / "x.safetensors").metadata == {"run": "7"}
        with safe_open(tmp_path / "model-00001-of-00001.safetensors", "pt") as file:
            assert file.metadata() == content

    def test_a_file_of_another_kind_is_named_and_is_not_corrupt(self, tmp_path: Path) -> None:
        """Exit code 5, not 4, for what never was a checkpoint."""
        for content, words in OTHERS:
            (tmp_path / "x.safetensors").write_bytes(content)
            for read in (tensorkeep.load, tensorkeep.verify):
                with case(content), pytest.raises(NotACheckpointError, match=words):
                    read(tmp_path / "x.safetensors")
            if words not in ("pickle", "zip"):
                (tmp_path / "x.bin").write_bytes(content)
                for format in (None, "torch"):
                    with case(content), pytest.raises(NotACheckpointError, match=words):
                        tensorkeep.load(tmp_path / "x.bin", format=format)
        write(tmp_path, "x.bin").joinpath("x.bin").rename(tmp_path / "x.safetensors")
        with pytest.raises(NotACheckpointError, match="--format torch"):
            tensorkeep.load(tmp_path / "x.safetensors")
        assert same(tensorkeep.load(tmp_path / "x.safetensors", format="torch"), FULL)
        # Damage that looks like one of them by chance: lengths of a header that begin as a pickle and as JSON.
        for length in (0x0280, 0x227B):
            (tmp_path / "x.safetensors").write_bytes(length.to_bytes(8, "little") + b"{" + bytes(length))
            with case(length), pytest.raises(CorruptCheckpointError):
                tensorkeep.load(tmp_path / "x.safetensors")
        folders = [write(tmp_path / name, name) for name in ORDER]
        folders.append(Path(tensorkeep.save(FULL, tmp_path / "dcp", format="dcp").path))
        for file in [file for folder in folders for file in folder.iterdir()]:
            kept = file.read_bytes()
            file.write_bytes(POINTER)
            with case(file), pytest.raises(NotACheckpointError, match="git lfs pull"):
                tensorkeep.load(file.parent)
            file.write_bytes(kept)

    def test_the_cache_of_hugging_face_is_read_in_every_format(self, tmp_path: Path) -> None:
        """Links to files are followed; a loop of links stops no listing."""
        formats = ["safetensors", "dcp", *ORDER]
        for format in formats:
            folder = tmp_path / format / "snapshots" / "0"
            folder.parent.mkdir(parents=True)
            if format in ORDER:
                write(folder, format)
            else:
                tensorkeep.save(FULL, folder, format=format)
            (tmp_path / format / "blobs").mkdir()
            for number, path in enumerate([*folder.iterdir()]):
                path.rename(tmp_path / format / "blobs" / f"{number:x}")
                path.symlink_to(f"../../blobs/{number:x}")
            with case(format):
                assert same(tensorkeep.load(folder), FULL)
                assert tensorkeep.verify(folder).ok
        loop = tmp_path / "folder" / "loop"
        loop.parent.mkdir()
        loop.symlink_to("loop")
        write(loop.parent, "a.pt")
        for path in (loop.parent, loop):
            with pytest.raises(NotACheckpointError):
                tensorkeep.load(path)

    @pytest.mark.parametrize("make", FOLDERS)
    def test_remedies_lead_to_full_data_or_to_none(self, make: str, tmp_path: Path) -> None:
        """Follow each remedy that names a path or a format."""
        write_folder, expected = FOLDERS[make]
        write_folder(tmp_path / "c")
        path = tmp_path / "c"
        format: str | None = None
        found: Any = None
        for _ in range(5):
            try:
                found = tensorkeep.load(path, format=format)
                break
            except (NotACheckpointError, UnsupportedError) as error:
                remedy = str(error.remedy)
                named = re.search(r"the path of (?:one|the whole): ([^;]+)", remedy)
                path = Path(named[1]) if named else path
                format = named_format[1] if (named_format := re.search(r"--format (\w+)", remedy)) else format
                if not named and not named_format:
                    break
        assert found is None if expected is None else same(found, expected)

    def test_a_process_s_part_of_a_database_leads_to_the_whole(self, tmp_path: Path) -> None:
        """What Orbax wrote in one process, or did not finish."""
        orbax(tmp_path / "c")
        part = tmp_path / "c" / "state" / "ocdbt.process_0"
        with pytest.raises(UnsupportedError, match="one process's part") as caught:
            tensorkeep.load(part)
        assert str(caught.value.remedy).endswith(f": {part.parent}")
        part.rename(tmp_path / "c.orbax-checkpoint-tmp-1")
        with pytest.raises(UnsupportedError, match="not finished"):
            tensorkeep.load(tmp_path / "c.orbax-checkpoint-tmp-1")

    def test_a_torch_file_that_a_tool_has_compressed_is_read_and_several_in_one_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A zip bomb is refused before anything is inflated, and a damaged record is found."""
        path = write(tmp_path, "x.pt") / "x.pt"
        stored = path.read_bytes()
        with zipfile.ZipFile(path) as old:
            records = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for name, content in records.items():
                new.writestr(name, content)
        compressed = path.read_bytes()
        assert same(tensorkeep.load(path), FULL) and tensorkeep.verify(path).ok
        assert same(tensorkeep.load(path, mmap=True), FULL)
        with monkeypatch.context() as patched:
            patched.setattr("tensorkeep.formats.torch_file.archive._UNPACKED_BYTES", -64 * len(compressed))
            with pytest.raises(UnsupportedError, match="bytes unpacked"):
                tensorkeep.load(path)
        at = compressed.index(b"data.pkl") + 20
        path.write_bytes(compressed[:at] + bytes(1) + compressed[at + 1 :])
        with pytest.raises(CorruptCheckpointError):
            tensorkeep.load(path)
        for count in (2, 3):
            path.write_bytes(stored * count)
            with pytest.raises(UnsupportedError, match="several files"):
                tensorkeep.load(path)

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
        if format == "t5x":
            pytest.importorskip("tensorkeep_formats")
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
