"""The command line in unusual conditions: stdout closed, full or ASCII; flags before the command; odd paths."""

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch

import tensorkeep
from command_line import Call
from forked import ended, start
from tensorkeep.cli.main import main


def shell(command: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in which ``tensorkeep`` is the program and ``$1``... are the arguments."""
    script = command.replace("tensorkeep", f"{sys.executable} -m tensorkeep")
    return subprocess.run(
        ["bash", "-c", script, "bash", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


def fill_disk(words: list[str]) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    sys.stdout = os.fdopen(1, "w")
    sys.exit(main(words))


@pytest.mark.integration
class TestStreams:
    @pytest.mark.xdist_group("processes")
    def test_a_full_disk_is_an_error(self, first: Path, tmp_path: Path) -> None:
        for path, code, message in ((first, 3, "No space left on device"), (first / "absent", 5, "does not exist")):
            errors = tmp_path / str(code)
            assert ended(start(fill_disk, ["info", str(path), "--json"], output=errors)) == code
            lines = errors.read_text().splitlines()
            assert (len(lines), message in lines[0]) == (2, True), lines

    def test_closed_streams_are_not_an_error(self, first: Path, tmp_path: Path) -> None:
        assert shell('tensorkeep ls "$1" >&- 2>&-', tmp_path / "absent").returncode == 5
        # What is printed must not end up in the file that got the number of stdout.
        assert shell('tensorkeep convert "$1" "$2" --to native >&- 2>&- <&-', first, tmp_path / "new").returncode == 0
        assert tensorkeep.diff(first, tmp_path / "new").equal

    def test_characters_outside_the_encoding_are_escaped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tensorkeep.save({"ünï大": torch.ones(2)}, tmp_path / "x")
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        assert main(["ls", str(tmp_path / "x")]) == 0
        assert rb"\xfcn\xef\u5927" in sys.stdout.buffer.getvalue()


def test_global_flags_before_the_command_take_effect(first: Path, tmp_path: Path, call: Call) -> None:
    assert json.loads(call("--json", "info", first).out)["format"] == "native"
    assert call("-q", "ls", first) == ("", "")
    assert json.loads(call("--json", "info", "absent", code=5).out)["error"]["kind"] == "not-found"
    assert "Usage: tensorkeep" in call("--json", "--help").out
    (few := tmp_path / "few.toml").write_text("[info]\nlargest = 2\n")
    for form in (["-C", few], ["--config", few], [f"--config={few}"]):
        assert len(json.loads(call(*form, "--json", "info", first).out)["largest"]) == 2, form


class TestPaths:
    def test_a_source_is_never_written_into(self, first: Path, tmp_path: Path, call: Call) -> None:
        (tmp_path / "link").symlink_to(first)
        before = sorted(first.iterdir())
        for source, inside in product((first, tmp_path / "link"), ("sub", "sub.safetensors", "a/b")):
            assert "is inside the source" in call("convert", source, first / inside, "--to", "native", code=2).err
        assert sorted(first.iterdir()) == before

    def test_unusual_paths_and_names(
        self, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
    ) -> None:
        (tmp_path / "file").write_text("")
        assert "Not a directory" in call("convert", first, tmp_path / "file" / "x", "--to", "native", code=3).err
        assert call("ls", first, "zzz", code=2).err.splitlines()[1] == "its names look like 'model.wte.weight'"
        undecodable = tmp_path / os.fsdecode(b"out\xff")
        assert main(["convert", str(first), str(undecodable), "--to", "native"]) == 0
        assert main(["verify", str(undecodable)]) == 0
        # The empty path is not the current folder.
        monkeypatch.chdir(first)
        assert (main(["info", "."]), main(["info", ""])) == (0, 2)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.safetensors", "b.safetensors"], ["a.safetensors, b.safetensors"]),
        (["model.bin"], ["it holds model.bin", "model.bin"]),
        ([f"step-{i}" for i in range(5)], ["step-0, step-1, step-2 and 2 more"]),
        ([f"m-0000{i}-of-00002.safetensors" for i in (1, 2)], ["02.safetensors, m-", "m.safetensors.index.json"]),
    ],
)
def test_checkpoints_in_a_folder_of_them_are_named(
    names: list[str], expected: list[str], tmp_path: Path, call: Call
) -> None:
    formats = {".safetensors": "safetensors", ".bin": "torch"}
    for name in names:
        tensorkeep.save({"w": torch.ones(3)}, tmp_path / name, format=formats.get(Path(name).suffix, "native"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    lines = call("info", tmp_path, code=5).err.splitlines()
    assert len(lines) == 2
    for line, text in zip(lines, expected, strict=False):
        assert text in line
    # A shard alone is not the checkpoint.
    assert (str(tmp_path / names[0]) in lines[1]) == ("-of-" not in names[0])
    assert "config.json" not in lines[0]


@contextmanager
def without_privileges() -> Iterator[None]:
    """Run as another user, because root can read every file."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


class TestPermissions:
    @pytest.fixture
    def public(self) -> Iterator[Path]:
        """Return a folder that every user can enter, unlike those of pytest."""
        path = Path(tempfile.mkdtemp())
        path.chmod(0o755)
        yield path
        shutil.rmtree(path)

    @pytest.mark.parametrize(
        ("locked", "target"),
        [
            *((name, name) for name in ("x.pt", "x.safetensors", "plain", "folder")),
            ("folder", "folder/below"),
            ("folder/manifest.json", "folder"),
        ],
    )
    def test_an_unreadable_file_is_reported_as_unreadable(
        self, locked: str, target: str, public: Path, call: Call
    ) -> None:
        state = {"w": torch.ones(3)}
        for name, format in (("folder", "native"), ("x.pt", "torch"), ("x.safetensors", "safetensors")):
            tensorkeep.save(state, public / name, format=format)
        shutil.copy(public / "x.pt", public / "plain")
        (public / locked).chmod(0)
        try:
            with without_privileges():
                for command in ("info", "verify"):
                    assert "Permission denied" in call(command, public / target, code=3).err
        finally:
            (public / locked).chmod(0o755)
