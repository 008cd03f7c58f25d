"""The command line in unusual conditions: stdout closed, full or ASCII; flags before the command; odd paths."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep.cli.main import main

Run = Callable[..., tuple[int, Any]]


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


class TestStreams:
    @pytest.mark.parametrize("command", ["ls", "--json info"])
    def test_a_full_disk_is_an_error(self, command: str, first: Path) -> None:
        result = shell(f'tensorkeep {command} "$1" >/dev/full', first)
        assert result.returncode == 3
        lines = result.stderr.splitlines()
        assert "No space left on device" in lines[0]
        assert len(lines) == 2

    def test_an_error_keeps_its_code_where_stdout_is_full(self, tmp_path: Path) -> None:
        result = shell('tensorkeep info "$1" --json >/dev/full', tmp_path / "absent")
        assert (result.returncode, len(result.stderr.splitlines())) == (5, 2)

    def test_closed_streams_are_not_an_error(self, first: Path, tmp_path: Path) -> None:
        assert shell('tensorkeep ls "$1" >&-', first).returncode == 0
        assert shell('tensorkeep ls "$1" >&- 2>&-', tmp_path / "absent").returncode == 5
        # What is printed must not end up in the file that got the number of stdout.
        assert shell('tensorkeep convert "$1" "$2" --to native >&- 2>&- <&-', first, tmp_path / "new").returncode == 0
        assert tensorkeep.diff(first, tmp_path / "new").equal

    def test_characters_outside_the_encoding_are_escaped(self, tmp_path: Path) -> None:
        tensorkeep.save({"ünï大": torch.ones(2)}, tmp_path / "x")
        result = shell('tensorkeep ls "$1"', tmp_path / "x", PYTHONIOENCODING="ascii")
        assert result.returncode == 0
        assert r"\xfcn\xef\u5927" in result.stdout


class TestFlagsBeforeTheCommand:
    def test_global_flags_before_the_command_take_effect(self, first: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--json", "info", str(first)]) == 0
        assert json.loads(capsys.readouterr().out)["format"] == "native"
        assert main(["-q", "ls", str(first)]) == 0
        assert capsys.readouterr() == ("", "")
        assert main(["--json", "info", "absent"]) == 5
        assert json.loads(capsys.readouterr().out)["error"]["kind"] == "not-found"

    @pytest.mark.parametrize("form", ["-C {}", "--config {}", "--config={}"])
    def test_settings_file_is_read(self, form: str, first: Path, tmp_path: Path, run_json: Run) -> None:
        (tmp_path / "few.toml").write_text("[info]\nlargest = 2\n")
        code, document = run_json(*form.format(tmp_path / "few.toml").split(), "info", first)
        assert (code, len(document["largest"])) == (0, 2)

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["--bogus", "info", "x"], "error: unknown option: --bogus"),
            (["-q"], "error: no command is given"),
            (["-C", "x"], "error: no command is given"),
        ],
    )
    def test_invalid_flags_are_refused(
        self, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(arguments) == 2
        assert capsys.readouterr().err.splitlines()[0] == expected

    def test_help_is_shown_after_any_flags(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--json", "--help"]) == 0
        assert "Usage: tensorkeep" in capsys.readouterr().out


class TestPaths:
    def test_the_empty_path_is_not_the_current_folder(self, first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(first)
        assert main(["info", "."]) == 0
        assert main(["info", ""]) == 2

    @pytest.mark.parametrize("inside", ["sub", "sub.safetensors", "a/b"])
    def test_a_source_is_never_written_into(
        self, inside: str, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "link").symlink_to(first)
        before = sorted(first.iterdir())
        for source in (first, tmp_path / "link"):
            assert main(["convert", str(source), str(first / inside), "--to", "native"]) == 2
            assert "is inside the source" in capsys.readouterr().err
        assert sorted(first.iterdir()) == before

    def test_a_file_where_a_folder_is_needed(
        self, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").write_text("")
        assert main(["convert", str(first), str(tmp_path / "file" / "x"), "--to", "native"]) == 3
        assert "Not a directory" in capsys.readouterr().err

    def test_undecodable_path_is_accepted(self, first: Path, tmp_path: Path) -> None:
        strange = tmp_path / os.fsdecode(b"out\xff")
        assert main(["convert", str(first), str(strange), "--to", "native"]) == 0
        assert main(["verify", str(strange)]) == 0

    def test_no_suggestion_for_a_name_unlike_all_others(self, first: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["ls", str(first), "zzz"]) == 2
        assert capsys.readouterr().err.splitlines()[1] == "its names look like 'model.wte.weight'"


class TestFolders:
    """The error for a folder of checkpoints names the checkpoints in it."""

    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            (["a.safetensors", "b.safetensors"], ["a.safetensors, b.safetensors"]),
            (["pytorch_model.bin"], ["it holds pytorch_model.bin", "pytorch_model.bin"]),
            ([f"step-{i}" for i in range(5)], ["step-0, step-1, step-2 and 2 more"]),
            (
                ["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"],
                ["m-00001-of-00002.safetensors, m-", "m.safetensors.index.json"],
            ),
        ],
    )
    def test_candidates_are_named(
        self, names: list[str], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        formats = {".safetensors": "safetensors", ".bin": "torch"}
        for name in names:
            tensorkeep.save({"w": torch.ones(3)}, tmp_path / name, format=formats.get(Path(name).suffix, "native"))
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "empty").mkdir()
        assert main(["info", str(tmp_path)]) == 5
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2
        for line, text in zip(lines, expected, strict=False):
            assert text in line
        assert str(tmp_path / names[0]) in lines[1]
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
            ("x.pt", "x.pt"),
            ("x.safetensors", "x.safetensors"),
            ("plain", "plain"),
            ("folder", "folder"),
            ("folder", "folder/below"),
            ("folder/manifest.json", "folder"),
        ],
    )
    def test_an_unreadable_file_is_reported_as_unreadable(
        self, locked: str, target: str, public: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        state = {"w": torch.ones(3)}
        for name, format in (("folder", "native"), ("x.pt", "torch"), ("x.safetensors", "safetensors")):
            tensorkeep.save(state, public / name, format=format)
        shutil.copy(public / "x.pt", public / "plain")
        (public / locked).chmod(0)
        try:
            with without_privileges():
                assert main(["info", str(public / target)]) == 3
                assert main(["verify", str(public / target)]) == 3
        finally:
            (public / locked).chmod(0o755)
        assert "Permission denied" in capsys.readouterr().err
