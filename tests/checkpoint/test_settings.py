"""``tensorkeep.toml``: which one is found, what it may say, and that the call wins over it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep.checkpoint import settings
from tensorkeep.checkpoint.settings import SaveTable
from tensorkeep.formats.base import FORMATS

STATE = {"w": torch.zeros(100_000)}


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tensorkeep.toml"
    path.write_text(text)
    return path


def test_a_save_follows_the_nearest_file(tmp_path: Path) -> None:
    write(tmp_path, '[save]\ncompression = "none"\n')
    nearest = write(tmp_path / "runs", '[save]\ncompression = "lossless"\ndirect_io = false\n')
    report = tensorkeep.save(STATE, tmp_path / "runs" / "new" / "step-1")
    assert (report.compression, report.direct_io) == ("lossless", False)
    assert report.settings_from == str(nearest)
    assert tensorkeep.load(tmp_path / "runs" / "new" / "step-1")["w"].sum() == 0
    assert tensorkeep.save(STATE, tmp_path / "step-1").compression == "none"


def test_what_the_call_says_wins(tmp_path: Path) -> None:
    path = write(tmp_path, '[save]\ncompression = "lossless"\nthreads = 3\nmemory_budget = "128MiB"\n')
    given: dict[str, Any] = {"compression": None, "threads": None, "memory_budget": None, "options": {}}
    choice = settings.choose(tmp_path / "a", "native", **given)
    assert choice == settings.Choice("lossless", 3, 128 * 1024**2, {}, str(path))
    choice = settings.choose(tmp_path / "a", "native", **{**given, "compression": "none", "threads": 1})
    assert (choice.compression, choice.threads, choice.settings_from) == ("none", 1, str(path))
    said = {"compression": "none", "threads": 1, "memory_budget": "64MiB", "options": {"direct_io": True}}
    assert settings.choose(tmp_path / "a", "native", **said).settings_from is None
    assert tensorkeep.save(STATE, tmp_path / "a", compression="none").compression == "none"


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    choice = settings.choose(tmp_path / "a", "native", compression=None, threads=None, memory_budget=None, options={})
    assert choice == settings.Choice("none", None, None, {}, None)
    assert tensorkeep.save(STATE, tmp_path / "a").settings_from is None


def test_files_for_other_tools_are_not_compressed_by_it(tmp_path: Path) -> None:
    path = write(tmp_path, '[save]\ncompression = "lossless"\ndirect_io = false\nthreads = 1\n')
    report = tensorkeep.save(STATE, tmp_path / "w.safetensors")
    assert (report.compression, report.direct_io, report.settings_from) == ("none", False, str(path))
    assert tensorkeep.save(STATE, tmp_path / "w.pt").settings_from == str(path)
    path.write_text('[save]\ncompression = "lossless"\n')
    assert tensorkeep.save(STATE, tmp_path / "w2.pt").settings_from is None


def test_convert_follows_it_too(tmp_path: Path) -> None:
    path = write(tmp_path / "to", '[save]\ncompression = "lossless"\n')
    tensorkeep.save(STATE, tmp_path / "from")
    report = tensorkeep.convert(tmp_path / "from", tmp_path / "to" / "copy")
    assert (report.compression, report.settings_from) == ("lossless", str(path))
    assert tensorkeep.convert(tmp_path / "from", tmp_path / "to" / "raw", compression="none").settings_from is None


def test_other_tables_are_not_its_business(tmp_path: Path) -> None:
    assert settings.read(write(tmp_path, "[convert]\nto = 'native'\n[tune.checkpoint]\nseconds = 3\n")) == SaveTable()
    tensorkeep.save(STATE, tmp_path / "a")


@pytest.mark.parametrize(
    ("text", "said", "remedy"),
    [
        ("[save]\ncompresion = 'none'", "unknown key 'compresion'", "did you mean 'compression'?"),
        ("[save]\nmemory-budget = 1", "unknown key 'memory-budget'", "did you mean 'memory_budget'?"),
        ("[save]\ncolour = 1", "unknown key 'colour'", "known: compression, threads"),
        ("[save]\ncompression = 'losless'", "compression is 'losless'", "did you mean 'lossless'?"),
        ("[save]\ncompression = 3", "compression is 3", "choose one of: none, lossless, auto"),
        ("[save]\nthreads = 0", "threads is 0", "from 1 to 1024"),
        ("[save]\nthreads = 1000000000", "threads is 1000000000", "from 1 to 1024"),
        ("[save]\nthreads = true", "threads is True", "whole number"),
        ("[save]\ndirect_io = 'no'", "direct_io is 'no'", "true or false"),
        ("[save]\nmemory_budget = '1MiB'", "memory_budget is '1MiB'", "at least 67.1 MB"),
        ("[save]\nmemory_budget = 'much'", "memory_budget is 'much'", "at least"),
        ("[save]\nmemory_budget = -5", "memory_budget is -5", "at least"),
        ("[saves]\nthreads = 2", "no table 'saves'", "did you mean"),
        ("threads = 2", "'threads' stands in no table", "below a line [save]"),
        ("save = 2", "'save' stands in no table", "tables only"),
        ("[save", "is not TOML", "correct"),
        ("a = " + "[" * 5000, "is not TOML", "correct"),
        ("a = " + "9" * 5000, "is not TOML", "correct"),
    ],
)
def test_a_slip_is_an_error_that_names_the_file(tmp_path: Path, text: str, said: str, remedy: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(tensorkeep.UsageError) as caught:
        tensorkeep.save(STATE, tmp_path / "a", compression="none")
    assert said in caught.value.message
    assert remedy in (caught.value.remedy or "")
    assert caught.value.path == str(path)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kind", ["folder", "pipe", "binary", "huge"])
def test_what_is_no_text_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tensorkeep.toml"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"\xff\xfe" if kind == "binary" else b"#" * (1024**2 + 1))
    with pytest.raises(tensorkeep.UsageError, match=r"regular|TOML|larger"):
        tensorkeep.save(STATE, tmp_path / "a")


@pytest.mark.parametrize("kind", ["folder", "pipe", "file"])
def test_nothing_stays_open(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tensorkeep.toml"
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "file": path.touch}[kind]()
    opened = Path("/proc/self/fd")
    before = len(list(opened.iterdir()))
    for _ in range(3):
        try:
            settings.read(path)
        except tensorkeep.UsageError:
            assert kind != "file"
    assert len(list(opened.iterdir())) == before


def test_a_file_that_is_exchanged_for_somebody_elses_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "[save]\nthreads = 1\n")
    tmp_path.chmod(0o1777)
    assert settings.read(path) == SaveTable(threads=1)
    honest = os.fstat

    def fstat(fd: int) -> os.stat_result:
        fields = list(honest(fd))
        fields[4] = 12345
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", fstat)
    assert settings.find(tmp_path / "a") == path
    with pytest.raises(tensorkeep.UsageError, match="somebody else"):
        tensorkeep.save(STATE, tmp_path / "a")
    tmp_path.chmod(0o755)
    assert settings.read(path) == SaveTable(threads=1)


def test_the_docstring_of_save_names_all_formats() -> None:
    said = " ".join((tensorkeep.save.__doc__ or "").split())
    said = said[said.index("format : str") : said.index("overwrite : bool")]
    assert [name for name in FORMATS.names() if f'"{name}"' not in said] == []


def test_a_link_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    (tmp_path / "tensorkeep.toml").symlink_to("absent")
    with pytest.raises(tensorkeep.StoreError, match=r"tensorkeep\.toml"):
        tensorkeep.save(STATE, tmp_path / "a")


def test_the_walk_ends_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "[save]\nthreads = 1\n")
    (tmp_path / "home").mkdir()
    assert settings.find(tmp_path / "home" / "runs" / "a") == path
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert settings.find(tmp_path / "home" / "runs" / "a") is None
    home = write(tmp_path / "home", "[save]\nthreads = 2\n")
    assert settings.find(tmp_path / "home" / "runs" / "a") == home


def test_the_walk_ends_with_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "[save]\nthreads = 1\n")
    (tmp_path / "mounted" / "runs").mkdir(parents=True)
    honest = Path.stat

    def stat(path: Path, **flags: Any) -> os.stat_result:
        found = honest(path, **flags)
        fields = list(found)
        fields[2] += path.is_relative_to(tmp_path / "mounted")
        return os.stat_result(fields)

    assert settings.find(tmp_path / "mounted" / "runs" / "a") is not None
    monkeypatch.setattr(Path, "stat", stat)
    assert settings.find(tmp_path / "mounted" / "runs" / "a") is None


def test_in_a_folder_of_everybody_only_an_own_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "[save]\nthreads = 1\n")
    os.chown(path, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert settings.find(tmp_path / "a") == path
    tmp_path.chmod(0o1777)
    assert settings.find(tmp_path / "a") is None


def test_a_link_in_the_path_leads_to_the_folder_that_is_written(tmp_path: Path) -> None:
    path = write(tmp_path / "real", "[save]\nthreads = 1\n")
    (tmp_path / "link").symlink_to("real")
    assert settings.find(tmp_path / "link" / "a") == path
