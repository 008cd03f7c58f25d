"""Settings files: they are read where a call names them, the call wins over them, and mistakes are errors."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep import CheckpointManager
from tensorkeep.checkpoint import options
from tensorkeep.checkpoint.options import SaveTable
from tensorkeep.checkpoint.saving import SaveRequest, check_request
from tensorkeep.formats.base import FORMATS
from tensorkeep.formats.native.writer import NativeOptions
from tensorkeep.storage.parallel import default_threads
from tensorkeep.testing.cases import case
from tensorkeep.testing.format_suite import names_in

STATE = {"w": torch.zeros(100_000)}


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tensorkeep.toml"
    path.write_text(text)
    return path


def test_a_save_follows_the_given_file_or_table_and_no_other(tmp_path: Path) -> None:
    write(tmp_path / "runs", '[save]\ncompression = "none"\nthreads = 1\n')
    path = write(tmp_path / "elsewhere", '[save]\ncompression = "lossless"\ndirect_io = false\n')
    report = tensorkeep.save(STATE, tmp_path / "runs" / "step-1", settings=path)
    assert (report.compression, report.direct_io, report.settings_from) == ("lossless", False, str(path))
    assert tensorkeep.load(tmp_path / "runs" / "step-1")["w"].sum() == 0
    without = tensorkeep.save(STATE, tmp_path / "runs" / "step-2")
    assert (without.compression, without.settings_from) == ("none", None)
    report = tensorkeep.save(STATE, tmp_path / "a", settings={"compression": "lossless", "memory_budget": "64MiB"})
    assert (report.compression, report.settings_from) == ("lossless", None)
    with pytest.raises(tensorkeep.UsageError, match="unknown key 'thread'"):
        tensorkeep.save(STATE, tmp_path / "b", settings={"thread": 1})


def test_a_background_save_a_manager_and_convert_follow_them_too(tmp_path: Path) -> None:
    path = write(tmp_path, '[save]\ncompression = "lossless"\nmemory_budget = "64MiB"\n')
    report = tensorkeep.save_async(STATE, tmp_path / "a", settings=path).wait()
    assert (report.compression, report.settings_from) == ("lossless", str(path))
    report = tensorkeep.convert(tmp_path / "a", tmp_path / "copy", settings=path)
    assert (report.compression, report.settings_from) == ("lossless", str(path))
    call = {"compression": "none", "memory_budget": "64MiB"}
    assert tensorkeep.convert(tmp_path / "a", tmp_path / "raw", settings=path, **call).settings_from is None
    with CheckpointManager(tmp_path / "run", settings=path) as manager:
        path.unlink()  # it is read once
        assert manager.save(1, STATE).wait().compression == "lossless"
    budget_only = write(tmp_path, '[save]\nmemory_budget = "64MiB"\n')
    assert tensorkeep.save_async(STATE, tmp_path / "b", settings=budget_only).wait().settings_from is None
    with pytest.raises(tensorkeep.UsageError, match="compression is 'nonsense'"):
        CheckpointManager(tmp_path / "run", settings={"compression": "nonsense"})


def request(path: Path, settings: Any, **given: Any) -> SaveRequest:
    call: dict[str, Any] = {"compression": None, "threads": None, "memory_budget": None, "options": {}, **given}
    others = {"format": None, "overwrite": False, "metadata": None, "progress": None}
    return check_request(path, settings=settings, **others, **call)


def test_the_call_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, '[save]\ncompression = "lossless"\nthreads = 3\nmemory_budget = "128MiB"\n')
    found = request(tmp_path / "a", path)
    assert (found.write.compression, found.write.threads, found.memory_budget) == ("lossless", 3, 128 * 1024**2)
    assert found.settings_from == str(path)
    found = request(tmp_path / "a", path, compression="none", threads=1)
    assert (found.write.compression, found.write.threads, found.settings_from) == ("none", 1, str(path))
    everything = {"compression": "none", "threads": 1, "memory_budget": "64MiB", "options": {"direct_io": True}}
    assert request(tmp_path / "a", path, **everything).settings_from is None
    assert tensorkeep.save(STATE, tmp_path / "a", compression="none", settings=path).compression == "none"


def test_without_settings_or_their_table_the_defaults_apply(tmp_path: Path) -> None:
    found = request(tmp_path / "a", None)
    assert (found.write.compression, found.write.threads, found.memory_budget) == ("none", default_threads(), None)
    assert (found.write.options, found.settings_from) == (NativeOptions(), None)
    others = write(tmp_path, "[convert]\nto = 'native'\n[tune.checkpoint]\nseconds = 3\n")
    assert options.read_settings(others) == SaveTable()


def test_files_for_other_tools_are_not_compressed_by_it(tmp_path: Path) -> None:
    path = write(tmp_path, '[save]\ncompression = "lossless"\ndirect_io = false\nthreads = 1\n')
    report = tensorkeep.save(STATE, tmp_path / "w.safetensors", settings=path)
    assert (report.compression, report.direct_io, report.settings_from) == ("none", False, str(path))
    assert tensorkeep.save(STATE, tmp_path / "w.pt", settings=path).settings_from == str(path)
    path.write_text('[save]\ncompression = "lossless"\n')
    assert tensorkeep.save(STATE, tmp_path / "w2.pt", settings=path).settings_from is None


@pytest.mark.parametrize(
    ("text", "expected", "remedy"),
    [
        ("[save]\ncompresion = 'none'", "unknown key 'compresion'", "did you mean 'compression'?"),
        ("[save]\nmemory-budget = 1", "unknown key 'memory-budget'", "did you mean 'memory_budget'?"),
        ("[save]\ncolour = 1", "unknown key 'colour'", "known: compression, threads"),
        ("[save]\ncompression = 'losless'", "compression is 'losless'", "did you mean 'lossless'?"),
        ("[save]\ncompression = 3", "compression is 3", "choose one of: none, lossless, auto"),
        ("[save]\nthreads = 0", "threads is 0", "from 1 to 1024"),
        ("[save]\nthreads = 1000000000", "threads is 1000000000", "from 1 to 1024"),
        ("[save]\nthreads = true", "threads is True", "give an integer"),
        ("[save]\ndirect_io = 'no'", "direct_io is 'no'", "true or false"),
        ("[save]\nmemory_budget = '1MiB'", "memory_budget is '1MiB'", "at least 64MiB"),
        ("[save]\nmemory_budget = 'much'", "memory_budget is 'much'", "at least"),
        ("[save]\nmemory_budget = -5", "memory_budget is -5", "at least"),
        ("[saves]\nthreads = 2", "table [saves] is unknown", "did you mean"),
        ("threads = 2", "'threads' is not in a table", "into the table [save]"),
        ("save = 2", "'save' is not in a table", "into a table, such as [train]"),
        ("[save", "is not TOML", "correct"),
        ("a = " + "[" * 5000, "is not TOML", "correct"),
        ("a = " + "9" * 5000, "is not TOML", "correct"),
    ],
)
def test_a_mistake_is_an_error_that_names_the_file(tmp_path: Path, text: str, expected: str, remedy: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(tensorkeep.UsageError) as caught:
        tensorkeep.save(STATE, tmp_path / "a", compression="none", settings=path)
    assert expected in caught.value.message
    assert remedy in (caught.value.remedy or "")
    assert caught.value.path == str(path)
    assert not (tmp_path / "a").exists()


def test_the_file_of_a_command_may_be_a_pipe_or_empty_device() -> None:
    reads, writes = os.pipe()
    os.write(writes, b"[verify]\nthreads = 1\n")
    os.close(writes)
    assert options.named_tables(Path(f"/dev/fd/{reads}")) == {"verify": {"threads": 1}}
    os.close(reads)
    assert options.named_tables(Path(os.devnull)) == {}
    for path in ("/", "/dev/zero", "/none.toml"):
        with case(path), pytest.raises(tensorkeep.UsageError, match=r"directory|larger"):
            options.named_tables(Path(path))


def test_anything_but_a_small_text_file_is_refused_and_no_file_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "tensorkeep.toml"
    path.symlink_to("absent")
    for missing in (path, tmp_path / "none.toml"):
        with pytest.raises(tensorkeep.StoreError, match="No such file"):
            tensorkeep.save(STATE, tmp_path / "a", settings=missing)
    path.unlink()
    for name, make in {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "binary": lambda: path.write_bytes(b"\xff\xfe"),
        "huge": lambda: path.write_bytes(b"#" * (1024**2 + 1)),
    }.items():
        with case(name):
            make()
            with pytest.raises(tensorkeep.UsageError, match=r"regular|TOML|larger"):
                tensorkeep.save(STATE, tmp_path / "a", settings=path)
            path.rmdir() if path.is_dir() else path.unlink()
    path.touch()
    options.read_settings(path)
    # Others are closed meanwhile, by what earlier tests have left to the garbage collector.
    assert path.resolve() not in [each.resolve() for each in Path("/proc/self/fd").iterdir()]
    assert names_in(tmp_path) == [path.name]


def test_the_docstring_of_save_names_all_formats() -> None:
    docstring = " ".join((tensorkeep.save.__doc__ or "").split())
    docstring = docstring[docstring.index("format : str") : docstring.index("overwrite : bool")]
    assert [name for name in FORMATS.names() if f'"{name}"' not in docstring] == []
