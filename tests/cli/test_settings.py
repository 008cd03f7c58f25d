"""Precedence of options: flag, environment, TOML file, default."""

from pathlib import Path
from pkgutil import resolve_name

import pytest
from cyclopts import App

from chatgot.config.config import Config, given_settings, ignored_variables
from command_line import Call, RunJson
from tensorkeep.cli.commands import COMMANDS
from tensorkeep.cli.main import main
from tensorkeep.variables import read_variable


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    path = tmp_path / "tensorkeep.toml"
    path.write_text("[info]\nlargest = 1\n\n[convert]\nto = 'native'\nmemory-budget = '128MiB'\n")
    return path


def shown(run_json: RunJson, *arguments: str | Path) -> int:
    document = run_json("info", *arguments)
    return len(document["largest"])


def test_precedence(first: Path, configuration: Path, run_json: RunJson, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (shown(run_json, first), shown(run_json, first, "-C", configuration)) == (4, 1)
    monkeypatch.setenv("TENSORKEEP_LARGEST", "2")
    assert shown(run_json, first, "-C", configuration) == 2
    assert shown(run_json, first, "-C", configuration, "--largest", "3") == 3

    monkeypatch.delenv("TENSORKEEP_LARGEST")
    monkeypatch.setenv("TENSORKEEP_CONFIG", str(configuration))
    assert shown(run_json, first) == 1


def test_the_file_gives_required_options_and_sizes_and_its_table_save_is_followed(
    first: Path, configuration: Path, tmp_path: Path, run_json: RunJson
) -> None:
    report = run_json("convert", first, tmp_path / "new", "-C", configuration)
    assert report["format"] == "native"
    path = tmp_path / "settings.toml"
    path.write_text('[save]\ncompression = "lossless"\nthreads = 2\n\n[train.loop]\nsteps = 3\n')
    report = run_json("convert", first, tmp_path / "other", "--to", "native", "-C", path)
    assert (report["compression"], report["settings_from"]) == ("lossless", str(path))
    assert given_settings(file=path, environment={}) == {"loop.steps": 3, "checkpoint.settings": str(path)}


def test_environment_gives_options_not_arguments(first: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setenv("TENSORKEEP_PATH", "somewhere")
    call("info", code=2)
    monkeypatch.setenv("TENSORKEEP_JSON", "1")
    assert call("info", "--nonsense", code=2).out.startswith("{")
    assert call("info", first, "--json=false").out.startswith(str(first))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[inof]\nlargest = 1", "did you mean [info]?"),
        ("largest = 1", "tables: info, ls"),
        ("[info]\nlargst = 1", "Did you mean --largest?"),
        ("[info", "is not TOML"),
    ],
)
def test_a_mistyped_table_is_an_error(text: str, expected: str, first: Path, configuration: Path, call: Call) -> None:
    configuration.write_text(text)
    assert expected in call("info", first, "-C", configuration, code=2).err
    assert main(["info", str(first), "-C", str(configuration.with_name("absent.toml"))]) == 2


def test_a_mistyped_variable_is_reported_by_the_command_that_would_read_it(
    first: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setenv("TENSORKEEP_LARGST", "2")
    monkeypatch.setenv("TENSORKEEP_RUNS", "3")  # an option of `bench`, and nearly one of `tune`
    message = "warning: TENSORKEEP_LARGST has no effect; did you mean TENSORKEEP_LARGEST?\n"
    assert call("info", first, "--json").err == message
    assert call("info", first, "-q").err == call("ls", first).err == ""
    assert call("tune", "training", code=2).err.startswith("error: ")


def test_the_library_reports_a_mistyped_variable_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOT", "600")
    with pytest.warns(
        UserWarning, match="TENSORKEEP_STORE_TIMEOT has no effect; did you mean TENSORKEEP_STORE_TIMEOUT"
    ):
        assert read_variable("TENSORKEEP_STORE_TIMEOUT") == ""
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "7")
    assert read_variable("TENSORKEEP_STORE_TIMEOUT") == "7"


def test_variables_that_look_like_settings_of_a_run_are_reported() -> None:
    ignored = {
        "TENSORKEEP_OPTIM_LRR": "did you mean TENSORKEEP_OPTIM_LR?",
        "TENSORKEEP_LEARNING_RATE": "did you mean TENSORKEEP_OPTIM_LR?",
        "TENSORKEEP_TECHNIQUES_COMPILE": "did you mean --technique compile?",
        "TENSORKEEP_TECHNIQUES_COMPILE_MODE": "did you mean --techniques.compile.mode?",
        "TENSORKEEP_LOOP_XYZZY": "see tensorkeep train --list-settings",
    }
    # Settings, an earlier name of one, and options of commands.
    read = ["TENSORKEEP_OPTIM_LR", "TENSORKEEP_OPTIM_CLIP", "TENSORKEEP_DATA", "TENSORKEEP_TEMPERATURE", "LOOP_LRR"]
    found = ignored_variables(dict.fromkeys([*ignored, *read], "1"))
    assert found == [f"{name} has no effect; {hint}" for name, hint in sorted(ignored.items())]


def test_no_alias_of_a_setting_is_an_option_of_a_command() -> None:
    commands = [App(default_command=resolve_name(each.target)) for each in COMMANDS.values()]
    arguments = [argument for app in commands for argument in app.assemble_argument_collection()]
    options = {name.strip("-") for argument in arguments for name in argument.names}
    aliases = {
        alias.replace("_", "-") for kind in Config.__annotations__.values() for alias in getattr(kind, "aliases", ())
    }
    assert len(options) > 80 and len(aliases) > 40 and not options & aliases
