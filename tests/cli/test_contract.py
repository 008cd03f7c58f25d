"""The contract with scripts: commands, flags, exit codes, one JSON document, errors of at most two lines."""

import _thread
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorkeep.checkpoint.inspect import convert as convert_module
from tensorkeep.cli import errors
from tensorkeep.cli.main import build_app, main
from tensorkeep.errors import StoreError

EVERYWHERE = {"--json", "--quiet", "-q", "--verbose", "-v", "--progress", "--no-progress", "--config", "-C"}
RUN = {"--runs", "--dir", "--out", "--resume", "--overwrite"}
MUCH = {"--threads", "--memory-budget"}
SAMPLING = {
    *("--tokens", "--max-new-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty"),
    *("--stop", "--seed", "--which", "--device"),
}
FLAGS = {
    "info": {"--largest", "--format", "--allow", "--endpoint"},
    "ls": {"--allow", "--long", "-l", "--format", "--endpoint"},
    "log": {"--last", "--metric", "--mode", "--verify", "--endpoint"},
    "show": {"--allow", "--format", "--out", "--sample", "--open", "--endpoint", *MUCH},
    "verify": {"--allow", "--format", "--endpoint", *MUCH},
    "diff": {
        "--allow",
        "--atol",
        "--rtol",
        "--select",
        "--by-layer",
        "--depth",
        "--top",
        "--stat",
        "--endpoint",
        *MUCH,
    },
    "convert": {
        "--allow",
        "--endpoint",
        "--to",
        "--compression",
        "--select",
        "--overwrite",
        "--drop-metadata",
        "--force",
        "--format",
        "--shard-bytes",
        *MUCH,
    },
    "env": {"--path"},
    "bench checkpoint": {
        *("--experiment", "--model", "--from", "--slow-model", "--with-optimizer", "--arms", "--seed", "--list"),
        *("--budget", "--time-limit", "--memory-limit"),
        *RUN,
    },
    "bench claims": {"--model", *RUN},
    "bench training": {
        *("--experiment", "--recipe", "--data", "--steps", "--equal-time", "--arms", "--seed", "--list"),
        *("--budget", "--time-limit", "--memory-limit"),
        *(RUN - {"--dir"}),
    },
    "data prepare": {
        *("--out", "--tokenizer", "--vocab-size", "--validation", "--seed", "--encoding", "--field", "--processes"),
        *("--overwrite", "--conversations"),
    },
    "data info": {"--verify"},
    "train": {
        *("--data", "--out", "--resume", "--branch", "--init-from", "--technique", "--profile"),
        *("--list-recipes", "--list-settings", "--list-techniques"),
    },
    "generate": {"--prompt", "--cache", "--no-cache", *SAMPLING},
    "chat": {"--system", *SAMPLING},
    "eval": {
        *(
            "--data",
            "--encoding",
            "--field",
            "--multiple-choice",
            "--tokens",
            "--which",
            "--precision",
            "--batch-size",
            "--device",
        ),
    },
    "export": {"--out", "--which", "--dtype", "--overwrite"},
    "report": {"--out", "--plots", "--csv", "--tables-only"},
    "prune": {
        "--keep-last",
        "--keep-every",
        "--keep-best",
        "--metric",
        "--mode",
        "--keep-thinned",
        "--broken",
        "--dry-run",
        "--endpoint",
        *("--yes", "-y"),
    },
    "tune checkpoint": {"--seconds", "--size", "--from", "--out", "--dry-run"},
    "tune training": {
        *("--memory", "--run", "--data", "--technique", "--largest", "--predict-only", "--out"),
    },
    "completion": set(),
    "man": set(),
    "demo": {"--size", "--scale", "--from", "--rounds", "--dir", "--training", "--out"},
}


def program(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tensorkeep", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120)


def test_the_commands_are_those_documented(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [name for name in build_app() if not name.startswith("-")]
    assert commands == [
        *(
            "info",
            "ls",
            "log",
            "show",
            "verify",
            "diff",
            "convert",
            "prune",
            "env",
            "bench",
            "data",
            "train",
            "generate",
        ),
        *("eval", "chat", "export", "report", "tune", "demo", "completion", "man"),
    ]
    groups = [f"{group} {name}" for group in ("bench", "data", "tune") for name in build_app()[group] if name[0] != "-"]
    assert groups == [
        *("bench checkpoint", "bench claims", "bench training"),
        *("data prepare", "data info", "tune checkpoint", "tune training"),
    ]
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f" {command} " in text for command in commands)


def found(command: str) -> Any:
    app = build_app()
    for word in command.split():
        app = app[word]
    return app


@pytest.mark.parametrize("command", FLAGS)
def test_the_flags_are_those_documented(command: str) -> None:
    arguments = found(command).assemble_argument_collection()
    names = {name for argument in arguments for name in argument.names if name.startswith("-")}
    assert names == FLAGS[command] | EVERYWHERE


@pytest.mark.parametrize("command", FLAGS)
def test_the_list_of_commands_has_the_summary_of_each_command(command: str) -> None:
    app = found(command)
    assert app.help == app.default_command.__doc__.strip().splitlines()[0]


def test_help_imports_neither_torch_nor_numpy() -> None:
    script = (
        "import sys, tensorkeep.cli.main as cli; cli.main(['--help']); cli.main(['--version']); "
        "sys.exit(bool({'torch', 'numpy', 'tensorkeep.cli.info'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_each_kind_of_failure_has_its_exit_code(first: Path, second: Path, damaged: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no checkpoint")
    (tmp_path / "blocked").write_text("a file where a folder is needed")
    assert main(["verify", str(first)]) == 0
    assert main(["diff", str(first), str(second)]) == 1
    assert main(["ls"]) == 2
    assert main(["convert", str(first), str(tmp_path / "blocked" / "there"), "--to", "native"]) == 3
    assert main(["verify", str(damaged)]) == 4
    assert main(["info", str(tmp_path / "absent")]) == 5
    assert main(["info", str(tmp_path / "text")]) == 5
    assert main(["convert", str(first), str(second), "--to", "native"]) == 6
    assert main(["convert", str(first), str(tmp_path / "new"), "--to", "nonsense"]) == 7


def test_the_program_returns_the_exit_code(first: Path, second: Path) -> None:
    result = program("diff", first, second, "--quiet")
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "")


def test_a_broken_pipe_ends_quietly(first: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "tensorkeep", "ls", str(first)]
    with os.fdopen(writing, "wb") as pipe:
        result = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, timeout=120)
    assert (result.returncode, result.stderr) == (errors.BROKEN_PIPE, b"")


@pytest.mark.parametrize(
    ("arguments", "first_line"),
    [
        (["inof", "x"], "error: unknown command 'inof'; did you mean 'info'?"),
        (["info", "x", "--lagest", "3"], "error: unknown option: --lagest. Did you mean --largest?"),
        (["verify", "x", "--threads", "0"], 'error: invalid value "0" for --threads. Must be >= 1'),
        (["verify", "x", "--memory-budget", "4X"], "error: invalid value for --memory-budget: '4X' is not a size"),
        (["diff", "x", "y", "--atol", "-1"], 'error: invalid value "-1.0" for --atol. Must be >= 0'),
        (["info", "absent"], "error: absent: does not exist"),
        (["info", "a\nb\x1b[2J"], "error: a\\nb\\x1b[2J: does not exist"),
    ],
)
def test_an_error_is_one_line_and_a_remedy(
    arguments: list[str], first_line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) in (2, 5)
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert output.out == ""
    assert lines[0].startswith(first_line)
    assert len(lines) == 2


def test_a_traceback_is_printed_with_verbose_only(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", "absent"])
    assert "Traceback" not in capsys.readouterr().err
    main(["info", "absent", "-v"])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [(["info", "absent"], "not-found", 5), (["info", "--larges", "1"], "usage", 2), (["inof"], "usage", 2)],
)
def test_an_error_is_one_json_document(
    arguments: list[str], kind: str, code: int, run_json: Callable[..., tuple[int, Any]]
) -> None:
    exit_code, document = run_json(*arguments)
    assert exit_code == document["error"]["exit_code"] == code
    assert document["error"]["kind"] == kind
    assert document["error"]["remedy"]


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(13, "Permission denied", "x"), 3, "error: x: Permission denied"),
        (MemoryError(), 3, "error: out of memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            3,
            "error: out of memory: DefaultCPUAllocator: can't",
        ),
        (RuntimeError("no kernel"), 70, "internal error: RuntimeError: no kernel"),
        (KeyError("x"), 70, "internal error: KeyError: 'x'"),
        (StoreError("cannot write"), 3, "error: cannot write"),
    ],
)
def test_any_exception_becomes_a_line_and_an_exit_code(
    raised: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("tensorkeep.cli.info.read_info", fail)
    assert main(["info", "x"]) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(line)
    assert len(lines) <= 2


def test_an_interrupted_convert_leaves_nothing_behind(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = convert_module.open_reader
    pressed = threading.Event()

    def interrupted_reader(*arguments: Any) -> Any:
        reader = honest(*arguments)
        read = reader.read

        def read_and_interrupt(*ranges: Any) -> None:
            if not pressed.is_set():
                pressed.set()
                _thread.interrupt_main()
            read(*ranges)

        monkeypatch.setattr(reader, "read", read_and_interrupt)
        return reader

    monkeypatch.setattr(convert_module, "open_reader", interrupted_reader)
    assert main(["convert", str(first), str(tmp_path / "new"), "--to", "native"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_the_exit_code_is_the_most_severe_one() -> None:
    assert errors.most_severe([0, 5, 4, 3]) == 4
    assert errors.most_severe([0, 5, 3]) == 3
    assert errors.most_severe([7, 5, 0]) == 5
    assert errors.most_severe([]) == 0
