"""Help, completion and the manual page: complete, valid for the shells and for man, with examples that parse."""

import io
import shlex
import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from command_line import Call
from tensorkeep.cli.commands import COMMANDS, EXAMPLES, GROUPS
from tensorkeep.cli.main import build_app, main
from tensorkeep.cli.options import flags_after_command
from tensorkeep.testing.cases import case
from tensorkeep.version import __version__

APP = build_app()
COMPLETE = """
source {script} || exit 1
COMP_WORDS=({words}) COMP_CWORD={last}
_tensorkeep
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shell") / "completion.bash"
    with redirect_stdout(io.StringIO()) as out:
        assert main(["completion", "bash"]) == 0
    path.write_text(out.getvalue())
    return path


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        *((["ver"], {"verify"}), (["t"], {"train", "tune"}), (["tune", "tr"], {"training"})),
        *((["prune", "--keep-b"], {"--keep-best"}), (["export", "--which", ""], {"last", "best"})),
    ],
)
def test_bash_completes(bash_script: Path, words: list[str], expected: set[str]) -> None:
    line = COMPLETE.format(script=bash_script, words=shlex.join(["tensorkeep", *words]), last=len(words))
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


@pytest.mark.integration
def test_zsh_completes_files_and_loads_the_script_from_fpath_or_as_a_source(tmp_path: Path, call: Call) -> None:
    script = call("completion", "zsh").out
    assert "'1:The first checkpoint, or" in script and "'2:The second checkpoint.:_files'" in script
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "_tensorkeep").write_text(script)
    code = LOADED_BY_ZSH.format(folder=shlex.quote(str(tmp_path)))
    done = subprocess.run(["zsh", "-fc", code], capture_output=True, text=True, check=True)
    *described, last = done.stdout.splitlines()
    assert (last, done.stderr) == ("compdef _tensorkeep tensorkeep", "")
    assert len(described) == len({name.split()[0] for name in COMMANDS})
    assert "verify:Read checkpoints completely and check every checksum." in described


@pytest.mark.exhaustive
def test_fish_completes(tmp_path: Path, call: Call) -> None:
    (tmp_path / "script").write_text(call("completion", "fish").out)
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    code = f"source {shlex.quote(str(tmp_path / 'script'))}; complete -C 'tensorkeep ver'"
    done = subprocess.run(["fish", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "verify\tRead checkpoints completely and check every checksum.\n"


def test_bash_falls_back_to_files_and_other_shells_are_refused(bash_script: Path, call: Call) -> None:
    assert "complete -o bashdefault -o default -F _tensorkeep tensorkeep" in bash_script.read_text()
    assert "tcsh" in call("completion", "tcsh", code=2).err


def test_help_has_all_text_of_the_docstring_without_its_line_ends(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    shown = call("prune", "--help").out
    assert "All steps that no rule keeps are deleted, but never the last one, nor a step with other files in" in shown
    assert "also finds changed bytes.) Folders that are not checkpoints, could not be read or were" in shown


@pytest.mark.integration
def test_the_manual_page_has_every_command_option_and_example(call: Call) -> None:
    page = call("man").out
    assert all(f'.SS "{name}"' in page for name in COMMANDS)
    for option in (r"\-\-json", r"\-\-keep\-best", r"\-\-max\-new\-tokens", r"\-\-to STR"):
        assert option in page
    assert page.count(r"\-\-verbose, \-v") == 1
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    groff = ["groff", "-man", "-Tutf8", "-ww", "-P-c"]
    shown = subprocess.run(groff, input=page, capture_output=True, text=True, check=True)
    assert shown.stderr == ""
    assert all(example in shown.stdout for name in ("", *COMMANDS) for example in EXAMPLES[name])


def test_every_command_has_examples_and_the_version_is_printed(call: Call) -> None:
    assert call("-V").out == call("--version").out == f"{__version__}\n"
    assert set(EXAMPLES) == {"", *COMMANDS, *GROUPS}


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_ends_with_examples_that_parse_and_fit(call: Call, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = call(*command.split(), "--help").out.rstrip().splitlines()
    examples = EXAMPLES[command]
    assert 2 <= len(examples) <= 4
    assert lines[-len(examples) - 1 :] == ["Examples:", *(f"  {example}" for example in examples)]
    for example in examples:
        with case(example):
            assert len(f"  {example}") <= 80
            line = example.removeprefix("source <(").removesuffix(")").partition(" > ")[0].partition(" | ")[0]
            name, *words = shlex.split(line)
            assert name == "tensorkeep"
            words = flags_after_command(words, GROUPS)
            _, bound, ignored = APP.parse_args(words, exit_on_error=False, print_error=False)
            assert ignored == {} and (bound.args or bound.kwargs or len(words) <= 2)
