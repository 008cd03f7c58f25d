"""Help, completion and the manual page: complete, valid for the shells and for man, with examples that parse."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tensorkeep.cli.examples import EXAMPLES
from tensorkeep.cli.main import COMMANDS, GROUPS, build_app, main
from tensorkeep.cli.options import flags_after_command
from tensorkeep.version import __version__

COMPLETE = """
source {script} || exit 1
COMP_WORDS=({words}) COMP_CWORD={last}
_tensorkeep
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ver"], {"verify"}),
        (["t"], {"train", "tune"}),
        (["tune", "tr"], {"training"}),
        (["prune", "--keep-b"], {"--keep-best"}),
        (["export", "--which", ""], {"last", "best"}),
    ],
)
def test_bash_completes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: set[str]
) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(printed(capsys, "completion", "bash"))
    line = COMPLETE.format(script=script, words=shlex.join(["tensorkeep", *words]), last=len(words))
    done = subprocess.run(["bash", "-u", "-c", line], capture_output=True, text=True, check=True)
    assert (set(done.stdout.split()), done.stderr) == (expected, "")


LOADED_BY_ZSH = """
fpath=({folder})
_arguments() {{ state=cmds }}
_describe() {{ print -l $commands }}
compdef() {{ print compdef $* }}
autoload -Uz _tensorkeep
_tensorkeep
source {folder}/_tensorkeep
"""


def test_zsh_completes_files_and_loads_the_script_from_fpath_or_as_a_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = printed(capsys, "completion", "zsh")
    assert "'1:The first checkpoint, or" in script and "'2:The second checkpoint.:_files'" in script
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "_tensorkeep").write_text(script)
    code = LOADED_BY_ZSH.format(folder=shlex.quote(str(tmp_path)))
    done = subprocess.run(["zsh", "-fc", code], capture_output=True, text=True, check=True)
    described, last = done.stdout.splitlines()[:-1], done.stdout.splitlines()[-1]
    assert (len(described), last, done.stderr) == (
        len({name.split()[0] for name in COMMANDS}),
        "compdef _tensorkeep tensorkeep",
        "",
    )
    assert "verify:Read checkpoints completely and check every checksum." in described


def test_fish_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script").write_text(printed(capsys, "completion", "fish"))
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    code = f"source {shlex.quote(str(tmp_path / 'script'))}; complete -C 'tensorkeep ver'"
    done = subprocess.run(["fish", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "verify\tRead checkpoints completely and check every checksum.\n"


def test_bash_falls_back_to_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert "complete -o bashdefault -o default -F _tensorkeep tensorkeep" in printed(capsys, "completion", "bash")


def test_help_has_all_text_of_the_docstring_without_its_line_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    shown = printed(capsys, "prune", "--help")
    assert "All steps that no rule keeps are deleted, but never the last one, nor a step whose folder contains" in shown
    assert (
        "finds changed bytes.) Folders that are not checkpoints, could not be read or were written by a later" in shown
    )


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "tcsh" in capsys.readouterr().err


def test_the_manual_page_has_every_command_option_and_example(capsys: pytest.CaptureFixture[str]) -> None:
    page = printed(capsys, "man")
    assert all(f'.SS "{name}"' in page for name in COMMANDS)
    for option in (r"\-\-json", r"\-\-keep\-best", r"\-\-max\-new\-tokens", r"\-\-to STR"):
        assert option in page
    assert page.count(r"\-\-verbose, \-v") == 1
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    shown = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-P-c"], input=page, capture_output=True, text=True, check=True
    )
    assert shown.stderr == ""
    assert all(example in shown.stdout for name in ("", *COMMANDS) for example in EXAMPLES[name])


def test_every_command_has_examples() -> None:
    assert set(EXAMPLES) == {"", *COMMANDS, *GROUPS}
    assert all(2 <= len(examples) <= 4 for examples in EXAMPLES.values())


@pytest.mark.parametrize("example", [each for examples in EXAMPLES.values() for each in examples])
def test_examples_parse_and_fit_80_columns(example: str) -> None:
    assert len(f"  {example}") <= 80
    command = example.removeprefix("source <(").removesuffix(")").partition(" > ")[0].partition(" | ")[0]
    name, *words = shlex.split(command)
    assert name == "tensorkeep"
    _, bound, ignored = build_app().parse_args(
        flags_after_command(words, GROUPS), exit_on_error=False, print_error=False
    )
    assert ignored == {} and (bound.args or bound.kwargs or len(words) <= 2)


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_ends_with_the_examples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, *command.split(), "--help").rstrip().splitlines()
    examples = EXAMPLES[command]
    assert lines[-len(examples) - 1 :] == ["Examples:", *(f"  {example}" for example in examples)]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "-V") == printed(capsys, "--version") == f"{__version__}\n"
