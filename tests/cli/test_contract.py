"""The contract with scripts: commands, flags, exit codes, one JSON document, errors of at most two lines."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console

import tensorkeep
from command_line import Call, RunJson
from tensorkeep.checkpoint import convert as convert_module
from tensorkeep.cli import commands, errors
from tensorkeep.cli.errors import as_failure
from tensorkeep.cli.help import Formatter
from tensorkeep.cli.main import DESCRIPTION, build_app, main
from tensorkeep.cli.text import BROKEN_PIPE
from tensorkeep.errors import StoreError
from tensorkeep.storage.parallel import Cancellation
from tensorkeep.testing.cases import case

EVERYWHERE = "--json --quiet -q --verbose -v --progress --no-progress --config -C"
RUN = "--runs --dir --out --resume --overwrite"
MUCH = "--threads --memory-budget"
APP = build_app()
WHERE = "--which --device"
SEED = "--seed --list"
LIMITS = "--budget --time-limit --memory-limit"
SAMPLING = f"--tokens --max-new-tokens --temperature --top-k --top-p --min-p --repetition-penalty --stop --seed {WHERE}"
FLAGS = {
    "info": "--largest --format --allow --endpoint",
    "ls": "--allow --long -l --format --endpoint",
    "log": "--last --metric --mode --verify --endpoint",
    "show": f"--allow --format --out --sample --open --endpoint {MUCH}",
    "verify": f"--allow --format --endpoint {MUCH}",
    "diff": f"--allow --atol --rtol --select --by-layer --depth --top --stat --endpoint {MUCH}",
    "convert": "--allow --endpoint --to --compression --select --overwrite --drop-metadata --force --format "
    f"--shard-bytes {MUCH}",
    "env": "--path",
    "bench checkpoint": "--experiment --model --from --slow-model --with-optimizer --keep --arms "
    f"{SEED} {RUN} {LIMITS}",
    "bench claims": f"--model {RUN}",
    "bench training": "--experiment --recipe --data --steps --equal-time --arms --seed --list --runs --out --resume "
    f"--overwrite {LIMITS}",
    "data prepare": "--out --tokenizer --vocab-size --validation --seed --encoding --field --processes --overwrite "
    "--conversations",
    "data info": "--verify",
    "train": "--data --out --resume --branch --init-from --technique --profile --list-recipes "
    "--list-settings --list-techniques",
    "generate": f"--prompt --cache --no-cache {SAMPLING}",
    "chat": f"--system {SAMPLING}",
    "eval": "--data --encoding --field --multiple-choice --tokens --which --precision --batch-size --device",
    "export": "--out --which --dtype --overwrite",
    "report": "--out --plots --csv --tables-only",
    "prune": "--keep-last --keep-every --keep-best --metric --mode --keep-thinned --broken --dry-run "
    "--endpoint --yes -y",
    "tune checkpoint": "--seconds --size --from --out --dry-run",
    "tune training": "--memory --run --data --technique --largest --predict-only --out",
    "completion": "",
    "man": "",
    "demo": "--size --scale --from --rounds --dir --training --out",
}
COMMANDS = """
info ls log show verify diff convert prune env bench data train generate eval chat export report tune demo
completion man
"""


def test_the_commands_are_those_documented(call: Call) -> None:
    commands = [name for name in APP if not name.startswith("-")]
    assert commands == COMMANDS.split()
    groups = [f"{group} {name}" for group in ("bench", "data", "tune") for name in APP[group] if name[0] != "-"]
    assert sorted(groups) == sorted(name for name in FLAGS if " " in name)
    text = call("--help").out
    assert all(f" {command} " in text for command in commands)


@pytest.mark.parametrize("command", FLAGS)
def test_the_flags_and_summaries_are_those_documented(command: str) -> None:
    app = APP
    for word in command.split():
        app = app[word]
    arguments = app.assemble_argument_collection()
    names = {name for argument in arguments for name in argument.names if name.startswith("-")}
    assert names == {*FLAGS[command].split(), *EVERYWHERE.split()}
    # The list of commands has the summary of each.
    assert app.help == app.default_command.__doc__.strip().splitlines()[0]


def test_commands_are_plug_ins_and_a_missing_package_is_named(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    # The table agrees with the entry points of the packages.
    found: dict[str, str] = {}
    for path in Path(__file__).parents[2].glob("packages/*/pyproject.toml"):
        points = tomllib.loads(path.read_text())["project"]["entry-points"]
        found |= points.get("tensorkeep.commands", {})
    elsewhere = {
        name: command.target for name, command in commands.COMMANDS.items() if command.package != commands.CORE
    }
    assert {name.replace(".", " "): target for name, target in found.items()} == elsewhere
    absent = commands.COMMANDS["train"]._replace(target="absent_package.cli:train")
    monkeypatch.setitem(commands.COMMANDS, "train", absent)
    shown = call("train", "recipe", "--out", "run", "--json", code=7)
    assert json.loads(shown.out)["error"]["kind"] == "missing-extra"
    assert shown.err.splitlines() == [
        "error: tensorkeep train is a command of chatgot, which is not installed",
        "in a clone of Tensorkeep: pip install ./packages/chatgot",
    ]
    assert "(needs chatgot)" in call("--help").out
    missing = "a command of chatgot, which is not installed; in a clone of Tensorkeep: pip install ./packages/chatgot"
    assert missing in call("train", "--help").out
    # A folder of that name, such as packages/chatgot in a clone, is not the package.
    (tmp_path / "absent_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not absent.installed
    for name in ("prepare", "info"):
        command = commands.COMMANDS[f"data {name}"]._replace(target="absent_package.cli:data")
        monkeypatch.setitem(commands.COMMANDS, f"data {name}", command)
    assert "Prepare text for training. (needs chatgot)" in call("--help").out
    # Another package adds a command of its own to a group, and cannot replace one.
    entries = {"bench.mine": "platform:python_version", "info": "platform:machine", "mine": "platform:system"}
    package = tmp_path / "mine-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: mine\nVersion: 1\n")
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (package / "entry_points.txt").write_text("\n".join(["[tensorkeep.commands]", *lines, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    for words, name in (("--help", "mine"), ("bench --help", "mine"), ("info --help", "checkpoint")):
        assert f" {name}" in call(*words.split()).out
    assert {*commands.plug_in_commands()} == {"bench mine", "mine"}


@pytest.mark.parametrize("width", [30, 38, 39, 61, 80, 119, 300])
def test_the_help_of_a_program_is_the_help_that_cyclopts_prints(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """``overview`` writes it in less than half of the time."""
    monkeypatch.setenv("COLUMNS", str(width))
    own = commands.Command("absent_package.cli:own", "A command of a-package-with-a-long-name.", "own")
    monkeypatch.setitem(commands.COMMANDS, "own", own)
    monkeypatch.setitem(commands.COMMANDS, "more words", own)
    for program, description in (
        ("tensorkeep", DESCRIPTION),
        ("chatgot", "A trainer."),
        ("own", "Other commands."),
    ):
        app = build_app(name=program, description=description)
        app.help_formatter = Formatter()
        for encoding in ("utf-8", "ascii"):
            written = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
            app.help_print([], console=Console(file=written, width=width))
            written.seek(0)
            with io.TextIOWrapper(io.BytesIO(), encoding=encoding) as stdout, monkeypatch.context() as patched:
                patched.setattr("sys.stdout", stdout)
                assert main(["--help"], program, description) == 0
                stdout.seek(0)
                assert stdout.read() == written.read()


def test_the_help_of_a_program_has_colours_where_the_terminal_has(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = call("--help").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = call("--help").out
    assert "\x1b[36mverify" in coloured and re.sub(r"\x1b\[\d+m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert call("--help").out == plain


@pytest.mark.integration
def test_help_imports_nothing_that_takes_long() -> None:
    script = (
        "import sys, tensorkeep.cli.main as cli; cli.main(['--help']); cli.main(['--version']); "
        "sys.exit(bool({'torch', 'numpy', 'cyclopts', 'rich', 'tensorkeep.cli.info'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_each_failure_has_its_exit_code(first: Path, second: Path, damaged: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "text").write_text("no checkpoint")
    (tmp_path / "blocked").write_text("a file where a folder is needed")
    call("verify", first)
    call("diff", first, second, code=1)
    call("ls", code=2)
    call("convert", first, tmp_path / "blocked" / "there", "--to", "native", code=3)
    call("verify", damaged, code=4)
    call("info", tmp_path / "absent", code=5)
    call("info", tmp_path / "text", code=5)
    call("convert", first, second, "--to", "native", code=6)
    call("convert", first, tmp_path / "new", "--to", "nonsense", code=7)
    # Of several, the code is the most severe one.
    for codes, worst in (([0, 5, 4, 3], 4), ([0, 5, 3], 3), ([7, 5, 0], 5), ([], 0)):
        assert errors.most_severe(codes) == worst


@pytest.mark.integration
def test_a_broken_pipe_ends_quietly(first: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "tensorkeep", "ls", str(first)]
    with os.fdopen(writing, "wb") as pipe:
        result = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, timeout=120)
    assert (result.returncode, result.stderr) == (BROKEN_PIPE, b"")


def test_a_traceback_is_printed_with_verbose_only(call: Call) -> None:
    for more in ([], ["-v"]):
        assert ("Traceback" in call("info", "absent", *more, code=5).err) == bool(more)


def test_an_error_is_one_json_document(run_json: RunJson) -> None:
    for words, kind, code in (("info absent", "not-found", 5), ("info --larges 1", "usage", 2), ("inof", "usage", 2)):
        with case(words):
            error = run_json(*words.split(), code=code)["error"]
            assert (error["exit_code"], error["kind"]) == (code, kind)
            assert error["remedy"]


def test_any_exception_becomes_a_line_and_an_exit_code(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    for raised, code, line in (
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(13, "Permission denied", "x"), 3, "error: x: Permission denied"),
        (MemoryError(), 3, "error: out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 3, "error: out of memory: DefaultCPU"),
        (RuntimeError("no kernel"), 70, "internal error: RuntimeError: no kernel"),
        (KeyError("x"), 70, "internal error: KeyError: 'x'"),
        (StoreError("cannot write"), 3, "error: cannot write"),
    ):
        with case(line):
            monkeypatch.setattr("tensorkeep.cli.info.read_info", mock.Mock(side_effect=raised))
            lines = call("info", "x", code=code).err.splitlines()
            assert lines[0].startswith(line)
            assert len(lines) <= 2


def test_ctrl_c_leaves_nothing_behind(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    honest, cancel = convert_module.open_reader, Cancellation.cancel
    pressed, cancelled = threading.Event(), threading.Event()
    monkeypatch.setattr(Cancellation, "cancel", lambda self: (cancel(self), cancelled.set()))

    def interrupted_reader(*arguments: Any) -> Any:
        reader = honest(*arguments)
        read = reader.read

        def read_and_interrupt(*ranges: Any) -> None:
            if not pressed.is_set():
                pressed.set()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                assert cancelled.wait(60)
            read(*ranges)

        monkeypatch.setattr(reader, "read", read_and_interrupt)
        return reader

    monkeypatch.setattr(convert_module, "open_reader", interrupted_reader)
    assert call("convert", first, tmp_path / "new", "--to", "native", code=130).err == "interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_remedies_name_options_instead_of_keywords() -> None:
    for remedy, shown in (
        ("replace it (overwrite=True)", "replace it (--overwrite)"),
        ("leave it out (drop_metadata=True)", "leave it out (--drop-metadata)"),
        ('give mode="min" or mode="max"', "give --mode min or --mode max"),
        ('metric="val loss"', "--metric 'val loss'"),
        ('allow them: allow=["a.B", "numpy"]', "allow them: --allow a.B --allow numpy"),
        ("give it save_when=EverySteps(100)", "give it save_when=EverySteps(100)"),
        (None, None),
    ):
        with case(remedy):
            failure = as_failure(tensorkeep.UsageError("wrong", remedy=remedy))
            assert failure.remedy == as_failure(failure).remedy == shown


def test_a_remedy_works_when_it_is_followed(tmp_path: Path, call: Call) -> None:
    source, destination = str(tmp_path / "a"), str(tmp_path / "b")
    tensorkeep.save({"w": torch.ones(1)}, source)
    call("convert", source, destination)
    shown = call("convert", source, destination, code=6)
    assert shown.err.endswith("choose another path, or replace it (--overwrite)\n")
    assert main(["convert", source, destination, "--overwrite"]) == 0
