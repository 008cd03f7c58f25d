"""Precedence of options: flag, environment, TOML file, default."""

from pathlib import Path

import pytest

from chatgot.config.config import given_settings
from command_line import Call, RunJson
from tensorkeep.cli.main import main


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
