"""Precedence of options: flag, environment, TOML file, default."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorkeep.cli.main import main
from tensorkeep.train.config.arguments import given_settings

Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    path = tmp_path / "tensorkeep.toml"
    path.write_text("[info]\nlargest = 1\n\n[convert]\nto = 'native'\nmemory-budget = '128MiB'\n")
    return path


def shown(run_json: Run, *arguments: str | Path) -> int:
    code, document = run_json("info", *arguments)
    assert code == 0
    return len(document["largest"])


def test_precedence_of_flag_environment_and_file(
    first: Path, configuration: Path, run_json: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown(run_json, first) == 4
    assert shown(run_json, first, "-C", configuration) == 1
    monkeypatch.setenv("TENSORKEEP_LARGEST", "2")
    assert shown(run_json, first, "-C", configuration) == 2
    assert shown(run_json, first, "-C", configuration, "--largest", "3") == 3


def test_the_environment_names_the_file(
    first: Path, configuration: Path, run_json: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORKEEP_CONFIG", str(configuration))
    assert shown(run_json, first) == 1


def test_the_file_gives_required_options_and_sizes(first: Path, configuration: Path, run_json: Run) -> None:
    code, report = run_json("convert", first, configuration.with_name("new"), "-C", configuration)
    assert (code, report["format"]) == (0, "native")


def test_the_environment_gives_no_positional_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORKEEP_PATH", "somewhere")
    assert main(["info"]) == 2


def test_the_environment_asks_for_json(
    first: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENSORKEEP_JSON", "1")
    assert main(["info", "--nonsense"]) == 2
    assert capsys.readouterr().out.startswith("{")
    assert main(["info", str(first), "--json=false"]) == 0
    assert capsys.readouterr().out.startswith(str(first))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[inof]\nlargest = 1", "did you mean [info]?"),
        ("largest = 1", "tables: info, ls"),
        ("[info]\nlargst = 1", "Did you mean --largest?"),
        ("[info", "is not TOML"),
    ],
)
def test_a_mistyped_table_is_an_error(
    text: str, expected: str, first: Path, configuration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configuration.write_text(text)
    assert main(["info", str(first), "-C", str(configuration)]) == 2
    assert expected in capsys.readouterr().err


def test_a_missing_file_is_an_error(first: Path, tmp_path: Path) -> None:
    assert main(["info", str(first), "-C", str(tmp_path / "absent.toml")]) == 2


def test_convert_follows_the_table_save_of_the_file(first: Path, tmp_path: Path, run_json: Run) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('[save]\ncompression = "lossless"\n')
    code, report = run_json("convert", first, tmp_path / "new", "--to", "native", "-C", path)
    assert (code, report["compression"], report["settings_from"]) == (0, "lossless", str(path))


def test_training_follows_the_table_save_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("[save]\nthreads = 2\n\n[train.loop]\nsteps = 3\n")
    assert given_settings(file=path, environment={}) == {"loop.steps": 3, "checkpoint.settings": str(path)}
